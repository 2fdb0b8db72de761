"""Homes: on which instances a model is kept whose weights take too long to come when it is asked.

A model has as many homes as its share of the demand is instances, rounded up, but further ones
only where its weights have room next to those of others, and room is left for KV. A model with one
home gets a second one where there is memory and time to spare. The largest
demands are placed first, each where the least demand for the memory left is (KVPR, Prism §6.2, with
the share of an instance that a model needs to keep its SLO targets as its pressure).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from appliance.plugins.lone_model import count_kv_tokens
from appliance.scheduling.policy_api import (
    ClusterView,
    Costs,
    DecodingView,
    InstanceView,
    Migration,
    ModelView,
    Placement,
)
from appliance.vocabulary import InstanceId, ModelName

FEWEST_INSTANCES = 2
"""A model has homes if as many can serve it."""
PERIOD_SECONDS = 10.0
"""Homes are thought over as often as this."""
THRESHOLD = 0.6
"""A model leaves a home for one with a pressure that is lower by more than this share: until its
weights are there, its first tokens are late, and demands are estimates."""
UNEVEN = 0.3
"""It stays, too, while the demand at its home is higher by no more than this share than it would be
there: what is left of full memory makes large differences of pressure from small ones of demand."""
FULL_SHARE = 0.05
"""Where less of the memory is left for KV, the demand does not count."""
FREE_SHARE = 0.2
"""A model gets a further home next to others only where so much of the memory is left for KV."""
SPARE_SHARE = 0.6
"""A second home that the demand does not ask for is only where so much of the memory stays free."""
SPARE_DEMAND = 0.5
"""It is only where no more of an instance's time is asked for: where more is, requests of a model
have to gather."""
GAIN = 0.1
"""Homes stay as a whole unless the highest pressure of a new plan is lower by this share: models of
about the same demand would change places for nothing."""
LEAST_RATE = 0.01
"""Requests a second that a model is expected to get at least."""


class HomeSeeker(NamedTuple):
    """A model that needs homes: `demand` is the share of an instance that it needs to be in time
    (more than 1 for several), `weight_bytes` its size; `instances` can serve it, None for all."""

    model: ModelName
    demand: float
    weight_bytes: int
    instances: frozenset[InstanceId] | None = None


def find_seekers(
    models: Iterable[ModelView], costs: Costs, home_share: float, output_tokens: int
) -> list[HomeSeeker]:
    """The models with which a request that finds the weights away is late, or nearly so: a switch
    takes more than `home_share` of their TTFT target. `output_tokens` are those of an answer of a
    model that has not answered yet."""
    return [
        HomeSeeker(
            model.name,
            find_demand(model, costs, output_tokens),
            model.weight_bytes,
            model.instances,
        )
        for model in models
        if costs.switch_seconds(model.name) > home_share * model.slo.ttft_seconds
    ]


def find_demand(model: ModelView, costs: Costs, output_tokens: int) -> float:
    """The share of an instance that the model needs to be in time: its prompts, and steps at the
    pace of its TBT target while it has requests, if those come as a Poisson process."""
    rate, prompt = LEAST_RATE, 1.0
    output = model.output_tokens or output_tokens
    if model.arrivals_per_second > LEAST_RATE:
        rate = model.arrivals_per_second
        prompt = max(1.0, model.tokens_per_second / rate - output)
    tbt = model.slo.tbt_seconds
    running = rate * output * tbt
    step = costs.step_seconds(model.name, max(1, round(running)))
    prompts = rate * costs.prefill_seconds(model.name, round(prompt))
    return prompts + (1 - math.exp(-running)) * step / tbt


class Homes:
    """The homes of models, planned anew every `PERIOD_SECONDS` and when models or instances come
    or go."""

    def __init__(self) -> None:
        self.of: dict[ModelName, frozenset[InstanceId]] = {}
        self._there: object = None
        self._due = -math.inf

    def are_due(self, now: float, there: object) -> bool:
        """Whether to plan, now that these models and instances are there: any word for them that
        is another one if they are."""
        if now < self._due and there == self._there:
            return False
        self._due, self._there = now + PERIOD_SECONDS, there
        return True

    def plan(self, capacity_bytes: Mapping[InstanceId, int], seekers: Sequence[HomeSeeker]) -> None:
        """Give those of the models that enough instances can serve homes on instances that are
        up."""
        where = _Where(capacity_bytes)
        able = [one for one in seekers if len(where.of(one)) >= FEWEST_INSTANCES]
        found = find_homes(able, capacity_bytes, self.of, THRESHOLD)
        if (
            self.of.keys() != found.keys()
            or not all([self.of[one.model] <= where.of(one) for one in able])
            or (found != self.of and is_better(able, capacity_bytes, found, self.of))
        ):
            self.of = found

    def placements(self, cluster: ClusterView, seekers: Sequence[HomeSeeker]) -> list[Placement]:
        """Planned anew: which models each instance may serve; None for all, if none has homes.
        Weights are loaded ahead where they have a home, the largest demands first.
        O(models x homes), and what `find_homes` costs."""
        self.plan({view.id: view.total_bytes for view in cluster.instances if view.up}, seekers)
        rest = frozenset([model.name for model in cluster.models]).difference(self.of)
        ahead: dict[InstanceId, list[ModelName]] = {view.id: [] for view in cluster.instances}
        for one in _largest_first(seekers):
            for instance in self.of.get(one.model, ()):
                ahead[instance].append(one.model)
        return [
            Placement(models=rest.union(here) if self.of else None, ahead=tuple(here))
            for here in ahead.values()
        ]

    def moves(
        self,
        instance: InstanceView,
        requests: Iterable[DecodingView],
        others: Sequence[InstanceView],
    ) -> list[Migration]:
        """Requests that decode here though their model has its homes elsewhere, since homes moved:
        each turn of theirs would bring weights here that have no place. They go on at a home,
        rather where the weights are, and then where the least KV is. O(requests), and
        O(instances + their batches) for each model that goes."""
        found, targets = [], dict[ModelName, InstanceId | None]()
        for request in requests:
            model, homes = request.model, self.of.get(request.model)
            if homes is None or instance.id in homes:
                continue
            if model not in targets:
                targets[model] = _best_home(model, [view for view in others if view.id in homes])
            if (target := targets[model]) is not None:
                found.append(Migration(request=request.id, target=target))
        return found


def _best_home(model: ModelName, homes: Sequence[InstanceView]) -> InstanceId | None:
    able = [(model not in view.resident, count_kv_tokens(view), view.id) for view in homes]
    return min(able)[2] if able else None


class _Where:
    """On which of the instances that are up models can be served. O(1), and O(instances) for each
    set of instances that was not seen before."""

    def __init__(self, instances: Iterable[InstanceId]) -> None:
        self._up = frozenset(instances)
        self._of: dict[frozenset[InstanceId] | None, frozenset[InstanceId]] = {None: self._up}

    def of(self, seeker: HomeSeeker) -> frozenset[InstanceId]:
        found = self._of.get(seeker.instances)
        if found is None:
            found = self._of[seeker.instances] = self._up.intersection(seeker.instances or ())
        return found


class _Rooms:
    """What is left of each instance while homes are dealt out."""

    def __init__(self, capacity_bytes: Mapping[InstanceId, int]) -> None:
        self.total_bytes = {i: float(size) for i, size in capacity_bytes.items()}
        self.free_bytes = dict(self.total_bytes)
        self.demand = dict.fromkeys(capacity_bytes, 0.0)

    def give(self, instance: InstanceId, demand: float, weight_bytes: int) -> None:
        """A model is there from now on."""
        self.demand[instance] += demand
        self.free_bytes[instance] -= weight_bytes

    def takes(self, instance: InstanceId, weight_bytes: int) -> bool:
        """Whether a further home of a model has room there."""
        free, total = self.free_bytes[instance], self.total_bytes[instance]
        return free - weight_bytes >= (FREE_SHARE * total if free < total else 0)

    def with_spare_memory(self) -> list[InstanceId]:
        """Where a home that the demand does not ask for may have room, whatever it weighs."""
        return [i for i, b in self.free_bytes.items() if b >= SPARE_SHARE * self.total_bytes[i]]

    def spares(self, instance: InstanceId, demand: float, weight_bytes: int) -> bool:
        """Whether such a home has room there."""
        left = self.free_bytes[instance] - weight_bytes
        return (
            left >= SPARE_SHARE * self.total_bytes[instance]
            and self.demand[instance] + demand <= SPARE_DEMAND
        )

    def pressure(self, instance: InstanceId, demand: float, weight_bytes: int) -> float:
        """Demand for the memory left, if a model came there, too."""
        left = self.free_bytes[instance] - weight_bytes
        return (self.demand[instance] + demand) / left if left > 0 else math.inf

    def least(
        self, instances: Iterable[InstanceId], demand: float, weight_bytes: int
    ) -> InstanceId:
        """The one of the instances with the least pressure; of some with the same, that with the
        least demand, then with the most memory. O(instances)."""
        _, least = min(
            [(self.pressure(i, demand, weight_bytes), i) for i in instances],
            key=lambda found: (
                found[0],
                self.demand[found[1]],
                -self.free_bytes[found[1]],
                found[1],
            ),
        )
        return least

    def best(
        self,
        able: frozenset[InstanceId],
        demand: float,
        weight_bytes: int,
        before: frozenset[InstanceId],
        threshold: float,
    ) -> InstanceId:
        """The one of the `able` instances with the least pressure; a home of the model (`before`),
        unless another one is clearly better. O(able), and O(1) with a home if it would be asked for
        more everywhere."""
        mine = before & able
        if not mine:
            return self.least(able, demand, weight_bytes)
        home = self.least(mine, demand, weight_bytes) if len(mine) > 1 else next(iter(mine))
        free, asked = self.free_bytes[home] - weight_bytes, self.demand
        full = free < FULL_SHARE * self.total_bytes[home]
        most = math.inf if full else (1 - UNEVEN) * (asked[home] + demand)
        if min(asked.values()) + demand >= most:
            return home
        pressure = (1 - threshold) * self.pressure(home, demand, weight_bytes)
        better = [
            i
            for i in able
            if (there := asked[i] + demand) < most
            and (left := self.free_bytes[i] - weight_bytes) > 0
            and there / left < pressure  # no call, as this is asked of each model and instance
        ]
        return self.least(better, demand, weight_bytes) if better else home


def find_homes(
    seekers: Sequence[HomeSeeker],
    capacity_bytes: Mapping[InstanceId, int],
    known: Mapping[ModelName, frozenset[InstanceId]],
    threshold: float,
) -> dict[ModelName, frozenset[InstanceId]]:
    """The homes of each model. It leaves one that it has (`known`) only for one where the pressure
    is lower by more than `threshold` of it, and the demand by more than `UNEVEN`. `seekers` can
    each be served by an instance. O(models x homes x instances), and O(models x homes) where models
    stay and instances are asked for about as much."""
    rooms, where = _Rooms(capacity_bytes), _Where(capacity_bytes)
    total = sum([seeker.demand for seeker in seekers])
    homes: dict[ModelName, list[InstanceId]] = {seeker.model: [] for seeker in seekers}
    largest_first = _largest_first(seekers)
    several: list[tuple[HomeSeeker, int]] = []
    for seeker in largest_first:  # each has one before any has several
        able = where.of(seeker)
        share = seeker.demand / total * len(capacity_bytes) if total else 1.0
        count = min(len(able), max(1, math.ceil(share - 1e-9)))
        if count > 1:
            several.append((seeker, count))
        demand, before = seeker.demand / count, known.get(seeker.model, frozenset())
        best = rooms.best(able, demand, seeker.weight_bytes, before, threshold)
        rooms.give(best, demand, seeker.weight_bytes)
        homes[seeker.model].append(best)
    for seeker, count in several:
        _add_further(homes[seeker.model], seeker, count, rooms, where, known, threshold)
    spare = frozenset(rooms.with_spare_memory())
    for seeker in largest_first if spare else ():
        if len(homes[seeker.model]) == 1:
            able = where.of(seeker) & spare
            _add_spare(homes[seeker.model], seeker, able, rooms, known, threshold)
    return {model: frozenset(mine) for model, mine in homes.items()}


def _add_further(
    mine: list[InstanceId],
    seeker: HomeSeeker,
    count: int,
    rooms: _Rooms,
    where: _Where,
    known: Mapping[ModelName, frozenset[InstanceId]],
    threshold: float,
) -> None:
    """Give a model with one home up to `count`. O(homes x instances)."""
    demand, weight_bytes = seeker.demand / count, seeker.weight_bytes
    before = known.get(seeker.model, frozenset())
    for _ in range(count - 1):
        others = where.of(seeker).difference(mine)
        able = frozenset([i for i in others if rooms.takes(i, weight_bytes)])
        if not able:
            break
        best = rooms.best(able, demand, weight_bytes, before, threshold)
        rooms.give(best, demand, weight_bytes)
        mine.append(best)


def _add_spare(
    mine: list[InstanceId],
    seeker: HomeSeeker,
    able: frozenset[InstanceId],
    rooms: _Rooms,
    known: Mapping[ModelName, frozenset[InstanceId]],
    threshold: float,
) -> None:
    """Give a model with one home a second one if it has room to spare on one of the `able`
    instances: a burst there, or of another model at its home, need not wait. Each takes half of its
    demand. O(able), and O(1) where all are asked for too much."""
    (first,) = mine
    demand, weight_bytes = seeker.demand / 2, seeker.weight_bytes
    if min(rooms.demand.values()) + demand > SPARE_DEMAND:
        return
    roomy = [i for i in able if i != first and rooms.spares(i, demand, weight_bytes)]
    if roomy:
        before = known.get(seeker.model, frozenset())
        second = rooms.best(frozenset(roomy), demand, weight_bytes, before, threshold)
        rooms.give(first, -demand, 0)
        rooms.give(second, demand, weight_bytes)
        mine.append(second)


def is_better(
    seekers: Sequence[HomeSeeker],
    capacity_bytes: Mapping[InstanceId, int],
    new: Mapping[ModelName, frozenset[InstanceId]],
    known: Mapping[ModelName, frozenset[InstanceId]],
) -> bool:
    """Whether less memory is missing with the new homes, or as much, and the highest pressure of
    an instance is lower by `GAIN`. Both plans have homes for all the models. O(models x homes)."""

    def missing_and_pressure(homes: Mapping[ModelName, frozenset[InstanceId]]) -> tuple[int, float]:
        demand, left = dict.fromkeys(capacity_bytes, 0.0), dict(capacity_bytes)
        for model, asked, weight_bytes, _ in seekers:
            mine = homes[model]
            each = asked / len(mine)
            for instance in mine:
                demand[instance] += each
                left[instance] -= weight_bytes
        pressures = [
            demand[instance] / max(FULL_SHARE * size, left[instance])
            for instance, size in capacity_bytes.items()
        ]
        return max(0, -min(left.values())), max(pressures)

    missing, pressure = missing_and_pressure(new)
    missing_before, pressure_before = missing_and_pressure(known)
    if missing != missing_before:
        return missing < missing_before
    return pressure < (1 - GAIN) * pressure_before


def _largest_first(seekers: Iterable[HomeSeeker]) -> list[HomeSeeker]:
    """By demand, then by name: two sorts by what is there cost less than one by made pairs."""
    by_name = sorted(seekers, key=attrgetter("model"))
    return sorted(by_name, key=attrgetter("demand"), reverse=True)
