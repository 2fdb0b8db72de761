"""Which box should hold which model: few steps from what is there, by the pressure on each box.

The pressure of a box is KVPR (Prism §6.2) over boxes, with the time that models need as their
weight: the share of its devices' time that is asked for, over the share of its memory for weights
that its models leave. Demands are forecasts: what was used lately.

Pure functions: `appliance fleet plan` reads boxes and calls them, the lab makes up both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from appliance.vocabulary import ModelName, Word

FULL_SHARE: Final = 0.05
"""Where less of the memory is left, pressures do not grow further: demands decide."""
FREE_SHARE: Final = 0.2
"""A box with less of its memory left gives up models that others hold, too."""
GAIN: Final = 0.3
"""A box is relieved if a model of it meets a pressure elsewhere that is lower by this share,"""
LESS_GAIN: Final = 0.15
"""and then until none meets one that is lower by this share: so a fleet that was planned stays as
it is while demands change a little."""
QUIET_SHARE: Final = 0.25
"""A box that computes less than this share of its time is not relieved: nothing would be gained."""


class Kind(StrEnum):
    """What a step does with a model."""

    FIRST = "first"
    """No box that answers holds it: one gets it."""
    MOVE = "move"
    """Another box gets it, then the one that it was on gives it up."""
    COPY = "copy"
    """One box more gets it."""
    DROP = "drop"
    """One of several boxes gives it up."""


class BoxRoom(Word, frozen=True, kw_only=True):
    """A box that takes requests."""

    name: str
    devices: int
    """Instances: a model whose `demand` is 1 needs all the time of one."""
    memory_bytes: int
    """For weights: the host cache, or the devices' memory where that is larger."""


class ModelNeed(Word, frozen=True, kw_only=True):
    """A model of the fleet, and what is asked of it."""

    name: ModelName
    weight_bytes: int
    demand: float
    """Instances that are busy with it, on average."""
    boxes: frozenset[str] | None = None
    """Those that may hold it; None for all."""


class Step(Word, frozen=True, kw_only=True):
    """One line of a plan."""

    kind: Kind
    model: ModelName
    target: str | None = None
    """The box that gets it."""
    source: str | None = None
    """The box that gives it up."""
    moved_bytes: int = 0
    """That the target reads."""
    reason: str


class _Load(NamedTuple):
    """What the models of a box ask of it."""

    demand: float
    weight_bytes: int

    def plus(self, demand: float, weight_bytes: int = 0) -> _Load:
        return _Load(self.demand + demand, self.weight_bytes + weight_bytes)


class _Candidate(NamedTuple):
    """A step that may be worth it, and the highest pressure of the boxes it touches, then; `met`
    is that of those that get more to do."""

    worst: float
    met: float
    moved_bytes: int
    model: ModelName
    target: str
    kind: Kind

    @property
    def order(self) -> tuple[float, float, int, ModelName, str]:
        return self.worst, self.met, self.moved_bytes, self.model, self.target


def plan(
    boxes: Sequence[BoxRoom],
    models: Sequence[ModelNeed],
    homes: Mapping[ModelName, frozenset[str]],
    *,
    most: int | None = None,
    must_fit: bool = False,
) -> list[Step]:
    """Steps from `homes` (which boxes hold what now), the most useful first: not more than `most`,
    which is boxes times models if it is not given.

    Models that no box holds come first, the largest demand before others. Then boxes that are short
    of memory give up what others hold, the least demand first. Both are looked at again after each
    step that follows. While a box can be relieved (`GAIN`), the one with the highest pressure
    first, a model of it moves; if no move is worth it, one is copied; if no copy is, the box gives
    up a model that others hold. With `must_fit`, a box takes no model that its memory has no room
    for. Each step takes O(models x log models + models of a box x boxes)."""
    draft = _Draft(boxes, models, homes, must_fit)
    steps: list[Step] = []
    if most is None:
        most = len(boxes) * len(models)
    while len(steps) < most:
        # Each step makes room for a model that had none, or leaves a box short of memory.
        more = [*draft.firsts(), *draft.spared()] or draft.relief()
        if not more:
            break
        steps += more
    return steps[:most]


def after(
    homes: Mapping[ModelName, frozenset[str]], steps: Iterable[Step]
) -> dict[ModelName, frozenset[str]]:
    """Who holds what when all of the steps are taken."""
    found = dict(homes)
    for step in steps:
        mine = found.get(step.model, frozenset())
        gained = frozenset() if step.target is None else frozenset({step.target})
        lost = frozenset() if step.source is None else frozenset({step.source})
        found[step.model] = (mine | gained) - lost
    return found


def pressures(
    boxes: Sequence[BoxRoom],
    models: Sequence[ModelNeed],
    homes: Mapping[ModelName, frozenset[str]],
) -> dict[str, float]:
    """Of each box, by its name."""
    draft = _Draft(boxes, models, homes, must_fit=False)
    return {name: draft.pressure(name) for name in draft.boxes}


class _Draft:
    """Who holds what, and how loaded boxes are, after the steps so far."""

    def __init__(
        self,
        boxes: Sequence[BoxRoom],
        models: Sequence[ModelNeed],
        homes: Mapping[ModelName, frozenset[str]],
        must_fit: bool,
    ) -> None:
        self.boxes = {box.name: box for box in boxes}
        self._models = {model.name: model for model in models}
        self._homes = {m: homes.get(m, frozenset()) & self.boxes.keys() for m in self._models}
        self._must_fit = must_fit
        self._relieved: set[str] = set()
        """Boxes that gave up something for others' sake."""
        self._loads = dict.fromkeys(self.boxes, _Load(0.0, 0))
        self._held: dict[str, set[ModelName]] = {name: set() for name in self.boxes}
        for model in models:
            mine = self._homes[model.name]
            for name in mine:
                self._held[name].add(model.name)
                load = self._loads[name]
                self._loads[name] = load.plus(model.demand / len(mine), model.weight_bytes)

    def pressure(self, name: str, load: _Load | None = None) -> float:
        box, load = self.boxes[name], load or self._loads[name]
        left = 1 - load.weight_bytes / max(1, box.memory_bytes)
        return load.demand / box.devices / max(FULL_SHARE, left)

    def firsts(self) -> list[Step]:
        """Give each model that no box holds one: where the pressure is the least then."""
        lost = [model for model in self._models.values() if not self._homes[model.name]]
        steps = []
        for model in sorted(lost, key=lambda model: (-model.demand, model.name)):
            able = self._able(model)
            if not able:
                continue
            ranked = {
                name: self.pressure(name, self._loads[name].plus(model.demand, model.weight_bytes))
                for name in able
            }
            best = min(able, key=lambda name: (ranked[name], self._loads[name].weight_bytes, name))
            self._place(model, self._homes[model.name] | {best})
            reason = f"no box holds it; {best} has the lowest pressure with it, {ranked[best]:.2f}"
            steps.append(
                Step(
                    kind=Kind.FIRST,
                    model=model.name,
                    target=best,
                    moved_bytes=model.weight_bytes,
                    reason=reason,
                )
            )
        return steps

    def spared(self) -> list[Step]:
        """Boxes short of memory give up copies whose demand the other holders have time for."""
        steps = []
        for name, box in sorted(self.boxes.items()):
            held = [self._models[model] for model in self._held[name]]
            for model in sorted(held, key=lambda one: (one.demand, one.name)):
                used = self._loads[name].weight_bytes
                if not self._short(name):
                    break
                rest = self._homes[model.name] - {name}
                if not self._suffices(model, rest):
                    continue
                self._place(model, rest)
                left = max(0.0, 1 - used / max(1, box.memory_bytes))
                more = f" and {len(rest) - 1} more" * (len(rest) > 1)
                steps.append(
                    Step(
                        kind=Kind.DROP,
                        model=model.name,
                        source=name,
                        reason=f"{name} has {left:.0%} of its memory left, and {min(rest)}{more} "
                        "holds it, too",
                    )
                )
        return steps

    def _suffices(self, model: ModelNeed, homes: frozenset[str]) -> bool:
        """Whether a box short of memory need not hold the model besides these."""
        devices = sum([self.boxes[name].devices for name in homes])
        return bool(homes) and model.demand <= FREE_SHARE * devices

    def _short(self, name: str, more_bytes: int = 0) -> bool:
        box, used = self.boxes[name], self._loads[name].weight_bytes + more_bytes
        return used > (1 - FREE_SHARE) * box.memory_bytes

    def relief(self) -> list[Step]:
        """The best step for the box with the highest pressure, or for the next one that can be
        relieved, of those above the mean; none if there is none."""
        found = {name: self.pressure(name) for name in self.boxes}
        mean = math.fsum(sorted(found.values())) / max(1, len(found))
        for name in sorted(found, key=lambda name: (-found[name], name)):
            busy = self._loads[name].demand / self.boxes[name].devices
            if found[name] <= mean or busy <= QUIET_SHARE:
                continue
            gain = LESS_GAIN if name in self._relieved else GAIN
            for kind in (Kind.MOVE, Kind.COPY, Kind.DROP):
                best = self._best(name, kind, (1 - gain) * found[name], found[name])
                if best is not None:
                    self._relieved.add(name)
                    return [self._taken(name, found[name], busy, best)]
        return []

    def _best(self, name: str, kind: Kind, most: float, now: float) -> _Candidate | None:
        """The one that leaves the least pressure, of those that leave less than now and where no
        other box has more than `most` then."""
        candidates = [
            candidate
            for model in self._held[name]
            if self._models[model].demand > 0
            for candidate in self._candidates(name, self._models[model], kind)
            if candidate.met <= most and candidate.worst < now
        ]
        return min(candidates, key=lambda one: one.order, default=None)

    def _candidates(self, name: str, model: ModelNeed, kind: Kind) -> list[_Candidate]:
        homes = self._homes[model.name]
        share, load = model.demand / len(homes), self._loads[name]
        if kind is Kind.DROP:
            if len(homes) < 2:
                return []
            met = self._worst(model, homes, homes - {name})
            left = self.pressure(name, load.plus(-share, -model.weight_bytes))
            return [_Candidate(max(left, met), met, 0, model.name, "", kind)]
        size = model.weight_bytes
        spare = self._suffices(model, homes - {name} if kind is Kind.MOVE else homes)
        found = []
        for other in self._able(model):
            if spare and self._short(other, size):
                continue  # it would give it up at once
            if kind is Kind.MOVE:
                left = self.pressure(name, load.plus(-share, -size))
                met = self.pressure(other, self._loads[other].plus(share, size))
            else:  # the box itself has to be relieved as much
                left = met = self._worst(model, homes, homes | {other})
            found.append(_Candidate(max(left, met), met, size, model.name, other, kind))
        return found

    def _able(self, model: ModelNeed) -> list[str]:
        """Boxes that do not hold the model, and may."""
        return [
            name
            for name, box in self.boxes.items()
            if model.name not in self._held[name]
            and (model.boxes is None or name in model.boxes)
            and (
                not self._must_fit
                or self._loads[name].weight_bytes + model.weight_bytes <= box.memory_bytes
            )
        ]

    def _worst(self, model: ModelNeed, before: frozenset[str], homes: frozenset[str]) -> float:
        """The highest pressure of the boxes that hold the model, now or with these homes."""
        loads = self._changed(model, before, homes)
        return max([self.pressure(name, load) for name, load in loads.items()])

    def _changed(
        self, model: ModelNeed, before: frozenset[str], homes: frozenset[str]
    ) -> dict[str, _Load]:
        loads = {name: self._loads[name] for name in before | homes}
        for name in before:
            loads[name] = loads[name].plus(-model.demand / len(before), -model.weight_bytes)
        for name in homes:
            loads[name] = loads[name].plus(model.demand / len(homes), model.weight_bytes)
        return loads

    def _place(self, model: ModelNeed, homes: frozenset[str]) -> None:
        before = self._homes[model.name]
        self._loads.update(self._changed(model, before, homes))
        self._homes[model.name] = homes
        for name in before | homes:
            held = self._held[name]
            (held.add if name in homes else held.discard)(model.name)

    def _taken(self, name: str, pressure: float, busy: float, best: _Candidate) -> Step:
        """The step, taken."""
        model = self._models[best.model]
        box, used = self.boxes[name], self._loads[name].weight_bytes
        left = max(0.0, 1 - used / max(1, box.memory_bytes))
        reason = (
            f"{name} is asked for {busy:.0%} of its time with {left:.0%} of its memory left: "
            f"pressure {pressure:.2f}, then {best.worst:.2f} at most"
        )
        homes = self._homes[best.model]
        target = None if best.kind is Kind.DROP else best.target
        source = None if best.kind is Kind.COPY else name
        gained = homes if target is None else homes | {target}
        self._place(model, gained if source is None else gained - {source})
        return Step(
            kind=best.kind,
            model=best.model,
            target=target,
            source=source,
            moved_bytes=best.moved_bytes,
            reason=reason,
        )
