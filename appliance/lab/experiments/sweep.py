"""The largest load under which a policy still meets its SLO targets, by bisection.

A load is a whole number of steps. That more load is never better is assumed, as it is wherever a
"maximum load" is named: where attainment is not monotone, the answer is one crossing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableMapping
from typing import Protocol

from appliance.errors import LabError
from appliance.lab.experiments.scenario import Scenario

Search = Generator[int, float, int]
"""Yields loads to try, is sent what each attained, and returns the largest that was enough."""


def search(start: int, most: int, target: float) -> Search:
    """From `start` steps of load up or down to the largest, at most `most`, that attains `target`;
    0 if none does. O(log) tries."""
    good, bad = 0, most + 1
    load = min(start, most)
    while bad - good > 1:
        attained = yield load
        if attained >= target:
            good = load
        else:
            bad = load
        # Double until something is too much; then halve what is left.
        load = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def largest(
    load: LoadAxis,
    target: float,
    points: MutableMapping[float, float],
    attained: Callable[[int], float],
) -> int:
    """The steps of the largest load that attains `target`. `points` are what was attained at the
    loads that were tried; none is tried twice."""
    tries = search(load.start, load.most, target)
    try:
        steps = next(tries)
        while True:
            at = load.at(steps)
            if at not in points:
                points[at] = attained(steps)
            steps = tries.send(points[at])
    except StopIteration as end:
        answer: int = end.value
        return answer


class LoadAxis(Protocol):
    """Something of a scenario that there can be more of, `start` steps of it at first."""

    name: str
    start: int
    most: int

    def at(self, steps: int) -> float:
        """So many steps, in what people count."""

    def changes(self, steps: int) -> dict[str, str]:
        """What of the scenario they change."""


class ModelsLoad:
    """A load in models of the first table, `step` at a time."""

    name = "models"

    def __init__(self, chosen: Scenario, step: float | None, most: float | None) -> None:
        first = chosen.models[0]
        if first.names or chosen.arrivals.trace:
            raise LabError("models that have names, or requests of a trace, cannot be more: --over")
        self._step = max(1, round(step or 1))
        count = first.count or len(first.mix)
        self._others = sum(group.count or len(group.mix) for group in chosen.models[1:])
        self.start = max(1, count // self._step)
        self.most = round(most or 8 * count) // self._step

    def at(self, steps: int) -> float:
        return steps * self._step + self._others

    def changes(self, steps: int) -> dict[str, str]:
        return {"models.0.count": str(steps * self._step)}


class RateLoad:
    """A load in times the scenario's rate, `step` at a time."""

    name = "times the rate"

    def __init__(self, chosen: Scenario, step: float | None, most: float | None) -> None:
        self._scale = chosen.arrivals.rate_scale
        self._step = step or 0.05
        self.start = max(1, round(1 / self._step))
        self.most = round((most or 8) / self._step)

    def at(self, steps: int) -> float:
        return round(steps * self._step, 6)

    def changes(self, steps: int) -> dict[str, str]:
        return {"arrivals.rate_scale": repr(float(self._scale * self.at(steps)))}
