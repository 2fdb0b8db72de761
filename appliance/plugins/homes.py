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

    def able(self, instances: Iterable[InstanceId]) -> list[InstanceId]:
        """Those of the instances that can serve it."""
        return [i for i in instances if self.instances is None or i in self.instances]


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
        able = [one for one in seekers if len(one.able(capacity_bytes)) >= FEWEST_INSTANCES]
        found = find_homes(able, capacity_bytes, self.of, THRESHOLD)
        if (
            self.of.keys() != found.keys()
            or not all([self.of[one.model].issubset(one.able(capacity_bytes)) for one in able])
            or (found != self.of and is_better(able, capacity_bytes, found, self.of))
        ):
            self.of = found

    def placements(self, cluster: ClusterView, seekers: Sequence[HomeSeeker]) -> list[Placement]:
        """Planned anew: which models each instance may serve; None for all, if none has homes.
        Weights are loaded ahead where they have a home, the largest demands first.
        O(models x homes x instances)."""
        self.plan({view.id: view.total_bytes for view in cluster.instances if view.up}, seekers)
        rest = frozenset([model.name for model in cluster.models]).difference(self.of)
        largest_first = sorted(seekers, key=lambda one: (-one.demand, one.model))
        placements = []
        for view in cluster.instances:
            here = self.at(view.id)
            ahead = tuple([one.model for one in largest_first if one.model in here])
            models = rest | here if self.of else None
            placements.append(Placement(models=models, ahead=ahead))
        return placements

    def moves(
        self,
        instance: InstanceView,
        requests: Iterable[DecodingView],
        others: Sequence[InstanceView],
    ) -> list[Migration]:
        """Requests that decode here though their model has its homes elsewhere, since homes moved:
        each turn of theirs would bring weights here that have no place. They go on at a home,
        rather where the weights are, and then where the least KV is. O(requests x homes)."""
        found = []
        for request in requests:
            homes = self.of.get(request.model)
            if homes is None or instance.id in homes:
                continue
            model = request.model
            able = [view for view in others if view.id in homes]
            able.sort(key=lambda view: (model not in view.resident, count_kv_tokens(view), view.id))
            if able:
                found.append(Migration(request=request.id, target=able[0].id))
        return found

    def at(self, instance: InstanceId) -> frozenset[ModelName]:
        """The models that have a home there. O(models)."""
        return frozenset([model for model, homes in self.of.items() if instance in homes])


class _Room(NamedTuple):
    demand: float
    free_bytes: float
    total_bytes: float

    def pressure(self, demand: float, weight_bytes: int) -> float:
        """Demand for the memory left, if the model came here, too."""
        left = self.free_bytes - weight_bytes
        return (self.demand + demand) / left if left > 0 else math.inf

    def takes(self, weight_bytes: int) -> bool:
        """Whether a further home of a model has room here."""
        left = self.free_bytes - weight_bytes
        shared = self.free_bytes < self.total_bytes
        return left >= (FREE_SHARE * self.total_bytes if shared else 0)

    def spares(self, demand: float, weight_bytes: int) -> bool:
        """Whether a home that the demand does not ask for has room here."""
        left = self.free_bytes - weight_bytes
        return left >= SPARE_SHARE * self.total_bytes and self.demand + demand <= SPARE_DEMAND

    def after(self, demand: float, weight_bytes: int) -> _Room:
        """What is left when the model is here."""
        return self._replace(demand=self.demand + demand, free_bytes=self.free_bytes - weight_bytes)


def find_homes(
    seekers: Sequence[HomeSeeker],
    capacity_bytes: Mapping[InstanceId, int],
    known: Mapping[ModelName, frozenset[InstanceId]],
    threshold: float,
) -> dict[ModelName, frozenset[InstanceId]]:
    """The homes of each model. It leaves one that it has (`known`) only for one where the pressure
    is lower by more than `threshold` of it, and the demand by more than `UNEVEN`. `seekers` can
    each be served by an instance. O(models x homes x instances)."""
    rooms = {i: _Room(0.0, float(size), float(size)) for i, size in capacity_bytes.items()}
    total = sum([seeker.demand for seeker in seekers])
    homes: dict[ModelName, list[InstanceId]] = {seeker.model: [] for seeker in seekers}
    largest_first = sorted(seekers, key=lambda one: (-one.demand, one.model))
    counts = [_share(seeker, total, rooms) for seeker in largest_first]
    for further in (False, True):  # each has one before any has several
        for seeker, count in zip(largest_first, counts, strict=True):
            mine = homes[seeker.model]
            for _ in range(count - 1 if further else 1):
                able = {i: rooms[i] for i in seeker.able(rooms) if i not in mine}
                if further:
                    able = {i: room for i, room in able.items() if room.takes(seeker.weight_bytes)}
                if not able:
                    break
                demand = seeker.demand / count
                before = known.get(seeker.model, frozenset())
                best = _best(able, demand, seeker.weight_bytes, before, threshold)
                rooms[best] = rooms[best].after(demand, seeker.weight_bytes)
                mine.append(best)
    for seeker in largest_first:
        if len(homes[seeker.model]) == 1:
            _add_spare(homes[seeker.model], seeker, rooms, known, threshold)
    return {model: frozenset(mine) for model, mine in homes.items()}


def _add_spare(
    mine: list[InstanceId],
    seeker: HomeSeeker,
    rooms: dict[InstanceId, _Room],
    known: Mapping[ModelName, frozenset[InstanceId]],
    threshold: float,
) -> None:
    """Give a model with one home a second one if it has room to spare somewhere: a burst there,
    or of another model at its home, need not wait. Each takes half of its demand. O(instances)."""
    (first,) = mine
    demand = seeker.demand / 2
    able = {i: rooms[i] for i in seeker.able(rooms) if i != first}
    able = {i: room for i, room in able.items() if room.spares(demand, seeker.weight_bytes)}
    if able:
        before = known.get(seeker.model, frozenset())
        second = _best(able, demand, seeker.weight_bytes, before, threshold)
        rooms[first] = rooms[first].after(-demand, 0)
        rooms[second] = rooms[second].after(demand, seeker.weight_bytes)
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
        for one in seekers:
            for instance in homes[one.model]:
                demand[instance] += one.demand / len(homes[one.model])
                left[instance] -= one.weight_bytes
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


def _share(seeker: HomeSeeker, total: float, rooms: Mapping[InstanceId, object]) -> int:
    """As many instances as its share of all demands, rounded up, but no more than can serve it."""
    share = seeker.demand / total * len(rooms) if total else 1.0
    return min(len(seeker.able(rooms)), max(1, math.ceil(share - 1e-9)))


def _best(
    rooms: Mapping[InstanceId, _Room],
    demand: float,
    weight_bytes: int,
    before: frozenset[InstanceId],
    threshold: float,
) -> InstanceId:
    """The room with the least pressure; a home of the model (`before`), unless one is clearly
    better."""

    def order(instance: InstanceId) -> tuple[float, float, float, InstanceId]:
        room = rooms[instance]
        return room.pressure(demand, weight_bytes), room.demand, -room.free_bytes, instance

    mine = [instance for instance in rooms if instance in before]
    if not mine:
        return min(rooms, key=order)
    home = min(mine, key=order)
    here = rooms[home]
    pressure = (1 - threshold) * here.pressure(demand, weight_bytes)
    full = here.free_bytes - weight_bytes < FULL_SHARE * here.total_bytes
    most = math.inf if full else (1 - UNEVEN) * (here.demand + demand)
    better = [
        instance
        for instance, room in rooms.items()
        if room.pressure(demand, weight_bytes) < pressure and room.demand + demand < most
    ]
    return min(better, key=order, default=home)
