"""Prism (arXiv 2505.04021): placement by KV pressure, a shared queue per GPU by Moore-Hodgson.

Alg. 1 (§6.2) puts models where the KV pressure ratio stays lowest; models that were idle for long
leave the plan, lose their memory first, and come back where the pressure is lowest. Alg. 2 (§6.3)
orders the prompts of a GPU so that the fewest first tokens are late. All models of a GPU run side
by side: in short turns here, by MPS there. The printed slips are settled as docs/policies/prism.md
says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    BatchView,
    ClusterView,
    Costs,
    DecodingView,
    InstanceView,
    Migration,
    ModelView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName

Positive: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Homes: TypeAlias = Mapping[ModelName, tuple[InstanceId, ...]]
"""Where the parts of each model are."""

UNLIMITED = 1 << 20
"""More requests than any batch has."""


class Weighting(StrEnum):
    """How a model's pressure w is read (the formula is lost; both readings are in the text)."""

    DEMAND = "demand"
    """Memory demand per unit time: tokens/s x KV bytes per token / TTFT SLO."""
    RATE = "rate"
    """SLO-weighted request rate: requests/s / TTFT SLO."""


class ModelDemand(NamedTuple):
    """What a model brings to the GPUs it is placed on: `weight` is its pressure w and
    `weight_bytes` its size, both shared by `parts` GPUs."""

    model: ModelName
    weight: float
    weight_bytes: float
    parts: int = 1
    instances: frozenset[InstanceId] | None = None
    """Those that can serve it; None for all."""


class GpuBudget(NamedTuple):
    """A GPU while models are placed: their pressure R, and the bytes S left for KV."""

    weight: float
    free_bytes: float


class Plan(NamedTuple):
    """Where models are, and the GPUs with them."""

    homes: dict[ModelName, tuple[InstanceId, ...]]
    gpus: dict[InstanceId, GpuBudget]


def kvpr(gpu: GpuBudget) -> float:
    """The KV pressure ratio R / S (§6.2); infinite if nothing is left for KV."""
    return gpu.weight / gpu.free_bytes if gpu.free_bytes > 0 else math.inf


def place_greedily(
    loads: Sequence[ModelDemand],
    capacity_bytes: Mapping[InstanceId, float],
    homes: Homes,
    migration_threshold: float,
) -> Plan:
    """Alg. 1: the heaviest model first, each part where KVPR is lowest with it there (§6.2).

    A part leaves a GPU of its `homes` only if that lowers the KVPR it meets by more than
    `migration_threshold` of what it is. Parts of a model go to distinct GPUs (A.1.2). A part fits
    where room for KV is left next to it. One that fits nowhere shares its GPU's memory by turns: it
    adds its pressure and takes no room. At equal KVPR, where most room is left.
    O(parts x GPUs). Raises ValueError for a model of more parts than there are GPUs for it.
    """
    gpus = {gpu: GpuBudget(0.0, capacity) for gpu, capacity in capacity_bytes.items()}
    placed: dict[ModelName, tuple[InstanceId, ...]] = {}
    for load in sorted(loads, key=lambda load: (-load.weight / load.parts, load.model)):
        able = gpus.keys() if load.instances is None else gpus.keys() & load.instances
        if load.parts > len(able):
            raise ValueError(f"{load.model} has {load.parts} parts for {len(able)} GPUs")
        mine: list[InstanceId] = []
        for _ in range(load.parts):
            free = {g: state for g, state in gpus.items() if g in able and g not in mine}
            known = homes.get(load.model, ())
            best, gpus[best] = _choose(load, free, known, migration_threshold)
            mine.append(best)
        placed[load.model] = tuple(mine)
    return Plan(placed, gpus)


def _choose(
    load: ModelDemand,
    gpus: Mapping[InstanceId, GpuBudget],
    homes: Sequence[InstanceId],
    threshold: float,
) -> tuple[InstanceId, GpuBudget]:
    """The GPU that a part goes to, and what that GPU is with it."""
    weight, size = load.weight / load.parts, load.weight_bytes / load.parts
    fits = any([state.free_bytes > size for state in gpus.values()])
    room = size if fits else 0.0
    options = [
        (
            kvpr(GpuBudget(state.weight + weight, state.free_bytes - room)),
            room - state.free_bytes,
            gpu,
        )
        for gpu, state in gpus.items()
        if state.free_bytes > size or not fits
    ]
    best = min(options)
    home = min([option for option in options if option[2] in homes], default=best)
    if home[0] * (1 - threshold) <= best[0]:
        best = home
    gpu = best[2]
    return gpu, GpuBudget(gpus[gpu].weight + weight, gpus[gpu].free_bytes - room)


def moore_hodgson(
    deadlines: Sequence[float], seconds: Sequence[float], now: float
) -> tuple[list[int], list[int]]:
    """Jobs in an order that makes the fewest late on one machine (Alg. 2), and the late ones.

    In the order of their deadlines; when one would be late, the longest so far is taken out. Both
    answers are in the order of deadlines. O(n log n).
    """
    order = sorted(range(len(deadlines)), key=lambda job: (deadlines[job], job))
    longest: list[tuple[float, int]] = []
    end, late = now, set()
    for job in order:
        heapq.heappush(longest, (-seconds[job], job))
        end += seconds[job]
        if end > deadlines[job]:
            shorter, removed = heapq.heappop(longest)
            end += shorter
            late.add(removed)
    return [job for job in order if job not in late], [job for job in order if job in late]


class Prism(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Parameters; the paper gives none of these values, the released code the idle time."""

    weighting: Weighting = Weighting.DEMAND
    """How a model's pressure is read."""
    period_seconds: Positive = 10.0
    """Places are thought over as often as this."""
    migration_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """A model moves if it meets a KV pressure lower by more than this share."""
    idle_seconds: Positive = 50.0
    """A model without requests for so long leaves the plan and is evicted first."""
    turn_seconds: Positive = 0.05
    """Length of a turn while several models, or prompts, share a GPU: the stand-in for MPS."""
    alone_seconds: Positive = 4.0
    """Length of a turn while no other model needs the GPU."""
    swap_ratio: Positive = 4.0
    """A model that has to be brought in for a turn runs for this times what that takes."""
    chunk_tokens: Annotated[int, Meta(ge=0)] = 2048
    """Prompts are computed in such chunks within their model's decoding steps; whole for 0."""
    reserve_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Of a GPU's memory, what is left for the KV of running requests to grow."""
    patience_seconds: Positive = 60.0
    """Prompts later than this go first, whatever Moore-Hodgson says: no request waits for ever."""

    def __post_init__(self) -> None:
        """What is kept from one question to the next; it follows from the questions alone."""
        self._models: dict[ModelName, ModelView] = {}
        self._mean_kv_bytes = 1.0
        self._seen: dict[ModelName, float] = {}
        self._plan = Plan({}, {})
        self._plan_at = -math.inf
        self._alone: set[InstanceId] = set()
        """Whose round is the long turn of a lone model."""

    # --- placement -------------------------------------------------------------------------------

    @hookimpl
    def place(self, now: float, cluster: ClusterView) -> Sequence[Placement]:
        """Alg. 1 over the models that are not idle, every period and when a GPU comes or goes, or a
        model that has its place goes.
        Those that came to life since are confined at once; idle ones may be served anywhere."""
        capacity = {view.id: float(view.total_bytes) for view in cluster.instances if view.up}
        self._models = {model.name: model for model in cluster.models}
        known = [model.kv_bytes_per_token for model in cluster.models if model.kv_bytes_per_token]
        self._mean_kv_bytes = sum(known) / len(known) if known else 1.0
        for model in cluster.models:
            seen = now if model.requests else model.last_arrival
            self._seen[model.name] = max(seen, self._seen.get(model.name, -math.inf))
        if not capacity:
            return [Placement()] * len(cluster.instances)
        known_homes = {n: gpus for n, gpus in self._plan.homes.items() if n in self._models}
        same = capacity.keys() == self._plan.gpus.keys() and len(known_homes) == len(
            self._plan.homes
        )
        if not same or now >= self._plan_at:
            self._plan_at = now + self.period_seconds
            loads = [
                self._load(model, able)
                for model in cluster.models
                if not self._is_idle(model.name, now)
                and (able := sum([model.fits(gpu) for gpu in capacity]))
            ]
            homes = {**self._found(cluster), **known_homes}
            self._plan = place_greedily(loads, capacity, homes, self.migration_threshold)
        else:
            awake = [model.name for model in cluster.models if not self._is_idle(model.name, now)]
            homeless = [name for name in awake if name not in self._plan.homes]
            found = self._found(cluster) if homeless else {}
            for name in homeless:
                self._activate(name, found.get(name, ()))
        homes = self._plan.homes
        anywhere = frozenset(self._models.keys() - homes.keys())
        confined: dict[InstanceId, list[ModelName]] = {view.id: [] for view in cluster.instances}
        for name, gpus in homes.items():
            for gpu in gpus:
                confined[gpu].append(name)
        return [Placement(models=anywhere.union(confined[view.id])) for view in cluster.instances]

    def _is_idle(self, model: ModelName, now: float) -> bool:
        return now - self._seen.get(model, -math.inf) > self.idle_seconds

    def _load(self, model: ModelView, gpus: int) -> ModelDemand:
        """What the model brings. KV sizes that are not known yet are guessed: the mean of those
        that are."""
        if self.weighting is Weighting.RATE:
            rate = model.arrivals_per_second
        else:
            rate = model.tokens_per_second * (model.kv_bytes_per_token or self._mean_kv_bytes)
        return ModelDemand(
            model=model.name,
            weight=rate / model.slo.ttft_seconds,
            weight_bytes=model.weight_bytes,
            parts=min(model.parts, gpus),
            instances=model.instances,
        )

    def _found(self, cluster: ClusterView) -> dict[ModelName, tuple[InstanceId, ...]]:
        """Where models are at work, or else in memory, whatever the plan said."""
        working: dict[ModelName, tuple[InstanceId, ...]] = {}
        resident: dict[ModelName, tuple[InstanceId, ...]] = {}
        for view in cluster.instances:
            if view.up:
                groups = [group.model for group in view.groups]
                for name in dict.fromkeys([*groups, *(batch.model for batch in view.batches)]):
                    working[name] = (*working.get(name, ()), view.id)
                for name in view.resident:
                    resident[name] = (*resident.get(name, ()), view.id)
        return {**resident, **working}

    def _activate(self, model: ModelName, known: Sequence[InstanceId]) -> None:
        """The model gets a place in the plan: where it is `known`, else at the lowest KVPR."""
        able = {gpu: b for gpu, b in self._plan.gpus.items() if self._models[model].fits(gpu)}
        if not able:
            return  # none that can serve it was up when the plan was made
        load = self._load(self._models[model], len(able))
        gpus = {gpu: able[gpu] for gpu in known if gpu in able}
        if len(gpus) < load.parts:
            gpus = able
        mine: list[InstanceId] = []
        for _ in range(load.parts):
            free = {gpu: state for gpu, state in gpus.items() if gpu not in mine}
            best, self._plan.gpus[best] = _choose(load, free, (), 0.0)
            mine.append(best)
        self._plan.homes[model] = tuple(mine)

    # --- requests --------------------------------------------------------------------------------

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice:
        """Where its model is; an idle one is activated: where it is in memory still, else at the
        lowest KVPR. Every request queues by itself."""
        self._seen[request.model] = now
        if request.model in self._models and request.model not in self._plan.homes:
            known = [view.id for view in instances if request.model in view.resident]
            self._activate(request.model, known or [view.id for view in instances])
        homes = self._plan.homes.get(request.model, ())
        best = min(
            instances, key=lambda view: (view.id not in homes, self._kvpr(view), view.load, view.id)
        )
        return PrefillChoice(instance=best.id)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """Where it was prefilled; if its model has left there, at the lowest KVPR."""
        best = min(
            instances,
            key=lambda view: (view.id != prefilled_on, self._kvpr(view), view.load, view.id),
        )
        return best.id

    @hookimpl
    def flow(
        self,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
    ) -> Sequence[Migration]:
        """Requests follow their model when it has moved."""
        offered = {view.id for view in others}
        moved: dict[ModelName, InstanceId] = {}
        for name in dict.fromkeys([request.model for request in requests]):
            homes = self._plan.homes.get(name, (instance.id,))
            if instance.id not in homes and homes[0] in offered:
                moved[name] = homes[0]
        return [
            Migration(request=request.id, target=moved[request.model])
            for request in requests
            if request.model in moved
        ]

    def _kvpr(self, view: InstanceView) -> float:
        gpu = self._plan.gpus.get(view.id)
        return 0.0 if gpu is None else kvpr(gpu)

    @hookimpl
    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        """Alg. 2 over the GPU's queue: those that can be on time, then the late ones, each in the
        order of their deadlines."""
        groups = instance.groups
        order = sorted(range(len(groups)), key=lambda number: groups[number].deadline)
        absent: set[ModelName] = set()
        seconds = [0.0] * len(groups)
        for number in order:
            group = groups[number]
            mean = group.tokens // group.waiting
            seconds[number] = group.waiting * costs.prefill_seconds(group.model, mean)
            if group.model not in instance.resident and group.model not in absent:
                absent.add(group.model)
                seconds[number] += costs.switch_seconds(group.model)
        on_time, late = moore_hodgson([group.deadline for group in groups], seconds, now)
        patience = now - self.patience_seconds
        urgent = [number for number in late if groups[number].deadline < patience]
        return list(dict.fromkeys([*urgent, *on_time, *late]))

    # --- sharing a GPU ---------------------------------------------------------------------------

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """Prompts and turns alternate; but a prompt while only its own model decodes comes
        at once, as that goes on with it. One that its engine has no room for waits in the queue
        (§6.3) until others are done."""
        if not self._has_room(instance):
            return Phase.DECODE
        running = {batch.model for batch in instance.batches if batch.runnable}
        mixed = self.chunk_tokens > 0 and running == {instance.groups[0].model}
        # One since the last turn began was mixed with it; if there are two, one has run alone.
        owed = instance.prefills_since_turn > mixed
        return Phase.DECODE if owed else Phase.PREFILL

    def _has_room(self, instance: InstanceView) -> bool:
        """Whether the first prompt's KV fits next to all models of this GPU, with the reserve left.
        Where they do not fit together, they make room for each other by turns."""
        group = instance.groups[0]
        at_home = {name for name, homes in self._plan.homes.items() if instance.id in homes}
        if group.model not in at_home:
            return True
        weights = sum([self._models[name].weight_bytes for name in at_home])
        room = (1 - self.reserve_share) * instance.total_bytes - weights
        prompt = group.tokens // group.waiting * self._models[group.model].kv_bytes_per_token
        return room <= 0 or instance.kv_bytes + prompt <= room

    @hookimpl
    def round(self, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """A short turn for every model, those that have to be brought in last and longer."""
        batches = [batch for batch in instance.batches if batch.runnable]
        self._alone.discard(instance.id)
        if len(instance.batches) == 1 and not instance.groups:
            self._alone.add(instance.id)
            return [PlannedTurn(model=batches[0].model, quota_seconds=self.alone_seconds)]
        batches.sort(key=lambda batch: batch.model not in instance.resident)
        return [
            PlannedTurn(model=batch.model, quota_seconds=self._quota(instance, batch, costs))
            for batch in batches
        ]

    def _quota(self, instance: InstanceView, batch: BatchView, costs: Costs) -> float:
        if batch.model in instance.resident:
            return self.turn_seconds
        return max(self.turn_seconds, self.swap_ratio * costs.switch_seconds(batch.model))

    @hookimpl
    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        """Who was alone shares from now on: its turn ends when a short one would, or at the next
        step. Others end soon, or have been brought in for it."""
        if instance.turn is None or instance.id not in self._alone:
            return math.inf
        left = instance.turn_began + self.turn_seconds - now
        return max(costs.step_seconds(instance.turn), left)

    @hookimpl
    def batch(self) -> BatchLimits:
        """As many as the model allows; prompts in chunks."""
        return BatchLimits(requests=UNLIMITED, chunk_tokens=self.chunk_tokens)

    # --- memory ----------------------------------------------------------------------------------

    @hookimpl
    def evict(self, now: float, victims: Sequence[ModelName]) -> Sequence[ModelName]:
        """Models idle for longer than the threshold first, of them those with the largest SLO
        (§6.2); the others as they come."""
        idle = [model for model in victims if self._is_idle(model, now)]
        idle.sort(key=self._slo_seconds, reverse=True)
        return idle

    def _slo_seconds(self, model: ModelName) -> float:
        view = self._models.get(model)
        return 0.0 if view is None else view.slo.ttft_seconds
