"""Parking: how many instances have to be open for what is asked; the others rest.

What is asked is counted in instances that would do nothing else (`Asked`). As many are open as
carry that with the arrivals' variation on top, each busy for a set share of its time, and as were
needed at any moment of the last while: an instance opens at once and rests only after that. What is
expected is the smoothed rate on its trend, and what was needed in the same minute an hour ago.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from appliance.plugins.homes import LEAST_RATE, find_demand
from appliance.scheduling.demand import WINDOW_SECONDS
from appliance.scheduling.policy_api import ClusterView, Costs, Fleet, InstanceView, ModelView
from appliance.vocabulary import ModelName

PLAN_SECONDS = 1.0
"""The policy is asked this often. What is late has to be done in this time."""
FULL = 0.8
"""Share of the memory of an instance that weights and KV may take."""
DEVIATIONS = 2.0
"""The reserve for bursts, in standard deviations of what arrives in a window."""
BURST_WINDOW_SECONDS = 10.0
"""What arrives is counted in windows of this length: about how long a request stays."""
BURST_WINDOWS = 30
"""Windows that count."""
UNKNOWN_VARIATION = 1.0
"""The coefficient of variation until `FEWEST_WINDOWS` are over: one request in a window has it."""
FEWEST_WINDOWS = 3
TOGETHER = 64
"""Batch requests that are taken to decode in the same steps, if as many wait."""
MINUTE_SECONDS = 60.0
MINUTES = 60
"""What was needed is remembered by the minute, for an hour."""


class Asked(NamedTuple):
    """What is asked of all instances together at a moment."""

    expected: float
    """Instances that interactive requests which arrive keep busy, if they are to be in time."""
    begun: float
    """Instances that the requests which are there keep busy, if they are to be in time."""
    memory: float
    """Instances whose memory, as far as weights leave it and it may be full, holds the KV of
    interactive requests."""
    loads: float
    """Instances whose links bring in the weights that are away, if all of their time went there."""
    weights: float
    """Instances on which the weights of all models that are asked for find room."""
    tokens_per_second: float
    """Smoothed, of the interactive requests of all models."""
    lead_seconds: float
    """How long it takes until an instance that opens computes."""


class Parking:
    """How many instances are to be open, from what was asked so far. A look is O(1), amortised."""

    def __init__(self, load: float, idle_seconds: float) -> None:
        """Instances are to be busy for a share of `load` of their time; one that is not needed
        rests after `idle_seconds`."""
        self._load = load
        self._trend = Trend()
        self._bursts = Bursts()
        self._hour = LastHour()
        self._recent = RecentMost(idle_seconds)

    def open_instances(self, now: float, asked: Asked, instances: int) -> int:
        """Of so many `instances`, at least one. All of them while the first `idle_seconds` since
        the first look are not over."""
        self._trend.look(now, asked.expected)
        self._bursts.look(now, asked.tokens_per_second)
        expected = asked.expected + self._trend.growth(asked.lead_seconds)
        expected = max(expected, self._hour.busy(now + asked.lead_seconds))
        self._hour.look(now, max(asked.expected, asked.begun))
        reserve = 1 + DEVIATIONS * self._bursts.variation
        needed = max(asked.begun, expected * reserve) / self._load
        needed = max(needed, asked.memory * reserve, self._link_instances(asked))
        return self._recent.look(now, _whole(needed, instances), instances)

    def _link_instances(self, asked: Asked) -> float:
        """The fewest, k, whose links are busy for no more than the share `load`: the share of
        loads that are needed is that of the weights which find no room on k instances."""
        if not asked.loads or not asked.weights:
            return 0.0
        return asked.loads / (self._load + asked.loads / asked.weights)


def _whole(needed: float, instances: int) -> int:
    return min(instances, max(1, math.ceil(min(needed, instances) - 1e-9)))


class Trend:
    """How a smoothed rate grows. It is behind the true one by its window on a slope, and so is
    taken on for that long, too."""

    def __init__(self) -> None:
        self._now = -math.inf
        self._value = 0.0
        self._slope = 0.0

    def look(self, now: float, value: float) -> None:
        """The rate now."""
        seconds = now - self._now
        if 0 < seconds < math.inf:
            share = 1 - math.exp(-seconds / WINDOW_SECONDS)
            self._slope += share * ((value - self._value) / seconds - self._slope)
        self._now, self._value = now, value

    def growth(self, lead_seconds: float) -> float:
        """How much more it is likely to be after `lead_seconds`; never less than 0."""
        return max(0.0, self._slope) * (WINDOW_SECONDS + lead_seconds)


class Bursts:
    """The variation of what arrives: the coefficient of variation of the tokens that come in
    windows of equal length."""

    def __init__(self) -> None:
        self._over: deque[float] = deque(maxlen=BURST_WINDOWS)
        self._window: int | None = None
        self._tokens = 0.0
        self._now = 0.0
        self._rate = 0.0

    def look(self, now: float, tokens_per_second: float) -> None:
        """The smoothed rate now. It decays in between, so what came since is what is above that."""
        window = math.floor(now / BURST_WINDOW_SECONDS)
        if self._window is None:
            self._window = window
        else:
            decayed = self._rate * math.exp((self._now - now) / WINDOW_SECONDS)
            self._tokens += max(0.0, WINDOW_SECONDS * (tokens_per_second - decayed))
            for _ in range(min(window - self._window, BURST_WINDOWS + 1)):
                self._over.append(self._tokens)
                self._tokens = 0.0
            self._window = window
        self._now, self._rate = now, tokens_per_second

    @property
    def variation(self) -> float:
        """O(windows)."""
        count = len(self._over)
        mean = sum(self._over) / count if count else 0.0
        if count < FEWEST_WINDOWS or not mean:
            return UNKNOWN_VARIATION
        return math.sqrt(sum([(one - mean) ** 2 for one in self._over]) / count) / mean


class LastHour:
    """How many instances were busy at most, by the minute: without reserve or trend, or what was
    expected would be expected again."""

    def __init__(self) -> None:
        self._most: dict[int, float] = {}

    def look(self, now: float, busy: float) -> None:
        """So many are busy now."""
        minute = math.floor(now / MINUTE_SECONDS)
        if minute not in self._most:
            self._most = {one: most for one, most in self._most.items() if one >= minute - MINUTES}
        self._most[minute] = max(busy, self._most.get(minute, 0.0))

    def busy(self, at: float) -> float:
        """In the same minute an hour before; 0 if that is not known."""
        return self._most.get(math.floor(at / MINUTE_SECONDS) - MINUTES, 0.0)


class RecentMost:
    """The most of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._falling: deque[tuple[float, int]] | None = None
        """Numbers with the time when each, or one as large, was seen last; the largest first."""

    def look(self, now: float, number: int, first: int) -> int:
        """The most of `number` and what was seen in the last seconds; `first` is taken to have been
        seen at the first look."""
        if self._falling is None:
            self._falling = deque([(now, first)])
        falling = self._falling
        while falling and falling[0][0] <= now - self._seconds:
            falling.popleft()
        while falling and falling[-1][1] <= number:
            falling.pop()
        falling.append((now, number))
        return falling[0][1]


# --- reading views -------------------------------------------------------------------------------


def may_park(cluster: ClusterView) -> bool:
    """Whether any instance may rest: the policy says how many do, not which, so each has to be able
    to serve each model."""
    return all([model.instances is None for model in cluster.models])


def interactive(model: ModelView) -> ModelView:
    """The model as if only interactive requests came for it."""
    return structs.replace(
        model,
        arrivals_per_second=max(0.0, model.arrivals_per_second - model.batch_arrivals_per_second),
        tokens_per_second=max(0.0, model.tokens_per_second - model.batch_tokens_per_second),
    )


def find_demands(
    models: Iterable[ModelView], costs: Costs, output_tokens: int
) -> dict[ModelName, float]:
    """The instances that the interactive requests of each model need; 0 while hardly any come.
    `output_tokens` are those of an answer of a model that has not answered yet."""
    asked = [interactive(model) for model in models]
    return {
        model.name: find_demand(model, costs, output_tokens)
        if model.arrivals_per_second > LEAST_RATE
        else 0.0
        for model in asked
    }


def read(
    now: float, cluster: ClusterView, costs: Costs, demands: Mapping[ModelName, float]
) -> Asked:
    """What is asked of a cluster of at least one instance. `demands` are the instances that each
    model needs for what is expected of it. O(models + groups + batches)."""
    up = [view for view in cluster.instances if view.up]
    total_bytes = max([view.total_bytes for view in up], default=0)
    active = [model for model in cluster.models if model.requests or demands[model.name]]
    largest = max([model.weight_bytes for model in active], default=0)
    room = FULL * total_bytes - largest
    kv_bytes = _kv_bytes(cluster)
    outputs = {model.name: model.output_tokens for model in cluster.models}
    weight_bytes = sum([model.weight_bytes for model in active])
    return Asked(
        expected=sum([demands[model.name] for model in active]),
        begun=sum([_begun(now, view, outputs, costs) for view in up]),
        memory=(kv_bytes / room if room > 0 else math.inf) if kv_bytes else 0.0,
        loads=sum([_loads(model, costs) for model in active]),
        weights=weight_bytes / (FULL * total_bytes) if total_bytes else math.inf,
        tokens_per_second=sum([interactive(model).tokens_per_second for model in active]),
        lead_seconds=PLAN_SECONDS
        + max([costs.switch_seconds(model.name) for model in active], default=0.0),
    )


def _loads(model: ModelView, costs: Costs) -> float:
    """The share of a link that the model takes if it is always away: requests that come within a
    TTFT share a load."""
    often = min(model.arrivals_per_second, 1 / model.slo.ttft_seconds)
    return often * costs.switch_seconds(model.name)


def _kv_bytes(cluster: ClusterView) -> float:
    """KV of the interactive requests, and that of their prompts that wait. Batch requests may wait
    for room, and fill whatever there is."""
    sizes = {model.name: model.kv_bytes_per_token for model in cluster.models}
    seen = 0.0
    for view in cluster.instances:
        for batch in view.batches:
            seen += batch.interactive / batch.requests * batch.kv_tokens * sizes[batch.model]
        for group in view.groups:
            seen += group.interactive / group.waiting * group.tokens * sizes[group.model]
    return seen


def _begun(
    now: float, view: InstanceView, outputs: Mapping[ModelName, float], costs: Costs
) -> float:
    """The share of an instance that those who decode here need at the pace of their TBT target (a
    model at most all of it: a target that none can keep opens no other instance), and the prompts,
    with the load of their models, until their deadlines. Batch requests have their answers by then,
    too: they come all at once, and what decodes later would not be seen."""
    needed = 0.0
    for batch in view.batches:
        step = costs.step_seconds(batch.model, batch.requests, batch.kv_tokens)
        needed += min(1.0, step / batch.slo.tbt_seconds)
    for group in view.groups:
        seconds = group.waiting * costs.prefill_seconds(group.model, group.tokens // group.waiting)
        if group.model not in view.resident:
            seconds += costs.switch_seconds(group.model)
        if not group.interactive:
            together = min(group.waiting, TOGETHER)
            steps = group.waiting / together * outputs[group.model]
            kv_tokens = together * (group.tokens // group.waiting)
            seconds += steps * costs.step_seconds(group.model, together, kv_tokens)
        needed += seconds / max(PLAN_SECONDS, group.deadline - now)
    return needed


def fleet(cluster: ClusterView, needed: int) -> Fleet:
    """So many instances open that are up, and all that are down: the machine chooses which rest."""
    down = sum([not view.up for view in cluster.instances])
    return Fleet(interactive=0, mixed=min(len(cluster.instances), max(1, needed + down)), batch=0)
