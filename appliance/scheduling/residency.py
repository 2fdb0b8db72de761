"""Making room on a device: whose weights go, whose KV is swapped out, how much KV a job may map.

Works on one `InstanceState` while no job is out, so that every command given earlier is done, or
on its way in order, when these run. Cold prefix cache goes first, as no request needs it; then
weights, which cost no copy, then KV that is swapped out; idle models before those that run again
soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.lifecycle import EngineStage, KvPlace
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.state import EngineState, InstanceState, RequestState, SchedulingContext
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import (
    Command,
    Direction,
    EvictModel,
    KvMove,
    LoadModel,
    ModelName,
    MoveKv,
    PrefetchModel,
    StoreWeights,
    TrimKv,
)


@dataclass(slots=True, frozen=True)
class Grant:
    """What prepares a job, and how many slabs of KV its model may map."""

    commands: list[Command]
    kv_slabs: int


class Residency:
    """What is on the devices, planned: changes the ledgers, and gives the commands for it."""

    def __init__(
        self,
        context: SchedulingContext,
        cluster: Cluster,
        requests: RequestBook,
        weight_cache: HostWeightCache,
    ) -> None:
        self._context = context
        self._requests = requests
        self._cluster = cluster
        self._weight_cache = weight_cache

    def room_blocks(self, instance: InstanceState, model: ModelName) -> int:
        """How many blocks more the model could hold with everything else gone. O(residents)."""
        resident = self._resident_blocks(instance.engines[model])
        return self.capacity_blocks(instance, model) - resident

    def capacity_blocks(self, instance: InstanceState, model: ModelName) -> int:
        """How many blocks the model could hold with everything else gone. O(1)."""
        engine = instance.engines[model]
        groups = (instance.ledger.total_slabs - engine.weight_slabs) // engine.shape.group_slabs
        return groups * engine.shape.group_blocks

    def grant(
        self,
        instance: InstanceState,
        model: ModelName,
        more_blocks: int,
        wish_blocks: int,
        now: float,
    ) -> Grant:
        """Bring the model in and let its KV grow by `more_blocks`, which must fit (`room_blocks`).

        Up to `wish_blocks` more are granted from slabs that are free anyway. KV that is mapped
        beyond that, cold or fragmented, is not in the way of the weights: they were there when it
        was granted.
        """
        engine = instance.engines[model]
        ledger, shape = instance.ledger, engine.shape
        used = self._resident_blocks(engine)
        needed = shape.slabs(used + more_blocks)
        weights = 0 if engine.on_device else engine.weight_slabs
        growth = max(0, needed - ledger.kv.get(model, 0))
        commands = self._make_room(instance, model, weights + growth)
        commands += self._bring_in(instance, model, now)
        cap = max(needed, ledger.kv.get(model, 0))
        ledger.set_kv(model, cap)
        wished = shape.slabs(used + more_blocks + wish_blocks) - cap
        spare = ledger.free_slabs // shape.group_slabs * shape.group_slabs
        cap += max(0, min(wished, spare))
        ledger.set_kv(model, cap)
        engine.used = now
        self._weight_cache.touch(model, now)
        return Grant(commands, cap)

    def prefetch(
        self, instance: InstanceState, model: ModelName | None, target: ModelName
    ) -> list[Command]:
        """Load `target` during whatever runs, if slabs are free, cold, or held by weights
        that are needed later only. Nothing is filled for it: that would take the worker's time."""
        ledger = instance.ledger
        engine = instance.engines[target]
        upcoming = instance.upcoming()
        sooner = set(upcoming[: upcoming.index(target)] if target in upcoming else upcoming)
        spared = {target} | sooner if model is None else {model, target} | sooner
        victims = [v for v in self._victims(instance, spared) if v in ledger.weights]
        cold = [m for m in _by_last_use(instance, ledger.cold) if m != model]
        room = sum(ledger.cold[m] for m in cold) + sum(ledger.weights[v] for v in victims)
        if ledger.free_slabs + room < engine.weight_slabs:
            return []
        commands: list[Command] = []
        for name in cold:
            if ledger.free_slabs < engine.weight_slabs:
                commands.append(_trim(instance, name))
        for victim in victims:
            if ledger.free_slabs < engine.weight_slabs:
                commands.append(self.evict(instance, victim))
        commands += self._attach(instance, target, None)
        self._begin_load(instance, target)
        return [*commands, PrefetchModel(instance=instance.id, model=target)]

    def evict(self, instance: InstanceState, model: ModelName) -> Command:
        instance.ledger.evict(model)
        instance.engines[model].to_stage(EngineStage.COLD, model)
        return EvictModel(instance=instance.id, model=model)

    def dismiss(self, instance: InstanceState, model: ModelName) -> list[Command]:
        """Give back everything that the model holds on the device, which computes nothing and
        brings nothing of the model in. Requests keep their KV, in the host tier, as far as that has
        room."""
        commands: list[Command] = []
        if model in instance.ledger.kv:
            commands.append(self.clear_kv(instance, model))
        if instance.engines[model].on_device:
            commands.append(self.evict(instance, model))
        return commands

    def clear_kv(self, instance: InstanceState, model: ModelName) -> Command:
        """Swap out every request of the model that is on the device; its KV slabs are free then."""
        residents = instance.engines[model].residents.values()
        leaving = [request for request in residents if request.kv is KvPlace.DEVICE]
        instance.ledger.set_kv(model, 0)
        return self.swap_out(instance, model, leaving)

    def swap_out_youngest(self, instance: InstanceState, model: ModelName, blocks: int) -> Command:
        """Swap out requests of the model until `blocks` blocks are free or none is left on the
        device: batch work before interactive requests, and of each the youngest first."""
        engine = instance.engines[model]
        leaving: list[RequestState] = []
        for request in sorted(engine.residents.values(), key=_leaves_first):
            if blocks > 0 and request.kv is KvPlace.DEVICE:
                leaving.append(request)
                blocks -= engine.shape.blocks(request.kv_tokens)
        return self.swap_out(instance, model, leaving)

    def swap_out(
        self, instance: InstanceState, model: ModelName, leaving: Iterable[RequestState]
    ) -> Command:
        """Move the KV of these requests to their places in the host tier. If that has no room for
        all, the KV of the youngest is given up, batch work first."""
        shape = instance.engines[model].shape
        moves = []
        for request in sorted(leaving, key=_leaves_first, reverse=True):
            if self._requests.cover(request, shape, request.kv_tokens):
                request.to_kv(KvPlace.LEAVING, instance.id)
                moves.append(_kv_move(request, shape.blocks(request.kv_tokens)))
            else:
                self._requests.displace(request, shape)
        return MoveKv(
            instance=instance.id,
            model=model,
            direction=Direction.OUT,
            moves=tuple(moves),
            kv_slabs=instance.ledger.kv.get(model, 0),
        )

    def swap_in(
        self,
        instance: InstanceState,
        model: ModelName,
        arriving: Iterable[RequestState],
        kv_slabs: int,
    ) -> Command:
        """Bring the KV of these requests to the device; room was granted before."""
        engine = instance.engines[model]
        moves = []
        for request in arriving:
            request.to_kv(KvPlace.ARRIVING, instance.id)
            engine.residents[request.id] = request
            moves.append(_kv_move(request, engine.shape.blocks(request.kv_tokens)))
        return MoveKv(
            instance=instance.id,
            model=model,
            direction=Direction.IN,
            moves=tuple(moves),
            kv_slabs=kv_slabs,
        )

    def _resident_blocks(self, engine: EngineState) -> int:
        """Blocks of requests on the device when everything ordered so far is done; those shared
        through the prefix cache count for each. O(residents)."""
        blocks = engine.shape.blocks
        return sum(
            [
                blocks(request.kv_tokens)
                for request in engine.residents.values()
                if request.kv is not KvPlace.LEAVING
            ]
        )

    def _bring_in(self, instance: InstanceState, model: ModelName, now: float) -> list[Command]:
        """Load the weights, unless they are here or on their way; room was made before."""
        if instance.engines[model].on_device:
            return []
        commands = self._attach(instance, model, now)
        self._begin_load(instance, model)
        return [*commands, LoadModel(instance=instance.id, model=model)]

    def _begin_load(self, instance: InstanceState, model: ModelName) -> None:
        engine = instance.engines[model]
        instance.ledger.begin_load(model, engine.weight_slabs)
        engine.to_stage(EngineStage.LOADING, model)

    def _attach(
        self, instance: InstanceState, model: ModelName, fill_at: float | None
    ) -> list[Command]:
        """Tell the instance where the model's master image is now, if it does not know.

        Without one, an image is filled first (unless `fill_at` is None) if there is room or other
        images can go; else, and while another instance fills it, the model's files are read.
        """
        engine = instance.engines[model]
        master = self._weight_cache.get(model)
        if master is None and fill_at is not None:
            slabs, spared = engine.host_slabs, self.being_read()
            master = self._weight_cache.take(model, slabs, instance.id, fill_at, spared)
            if master is not None:
                return [store(instance, model, master.offsets, master.version, fill=True)]
        if master is None or master.filler is not None:
            return [store(instance, model, (), 0)] if engine.attached else []
        if engine.attached == master.version:
            return []
        return [store(instance, model, master.offsets, master.version)]

    def being_read(self) -> set[ModelName]:
        """Models whose images some instance is loading from."""
        return {
            model
            for instance in self._cluster.instances.values()
            for model in instance.ledger.loading
            if instance.engines[model].attached
        }

    def clear_kv_room(self) -> bool:
        """See `HostWeightCache.clear_kv_room`: what is being read is spared."""
        return self._weight_cache.clear_kv_room(self.being_read())

    def _make_room(self, instance: InstanceState, model: ModelName, slabs: int) -> list[Command]:
        """Free `slabs` slabs, or all there are, without touching `model`."""
        ledger = instance.ledger
        commands: list[Command] = []
        for name in _by_last_use(instance, ledger.cold):
            if ledger.free_slabs < slabs and name != model:
                commands.append(_trim(instance, name))
        if ledger.free_slabs >= slabs:
            return commands
        for victim in self._victims(instance, {model}):
            if ledger.free_slabs < slabs and victim in ledger.weights:
                commands.append(self.evict(instance, victim))
            if ledger.free_slabs < slabs and victim in ledger.kv:
                commands.append(self.clear_kv(instance, victim))
        return commands

    def _victims(self, instance: InstanceState, spared: set[ModelName]) -> list[ModelName]:
        """Models that hold slabs, the best to lose first: idle and least recently used, then the
        one that runs again last; unless the policy has another order. O(models log models)."""
        ledger = instance.ledger
        order = {model: index for index, model in enumerate(instance.upcoming())}
        holders = [m for m in {**ledger.weights, **ledger.kv} if m not in spared]
        idle = _by_last_use(instance, (m for m in holders if m not in order))
        wanted = sorted((m for m in holders if m in order), key=lambda m: -order[m])
        victims = idle + wanted
        if len(victims) < 2:
            return victims
        return list(dict.fromkeys([*self._rank_victims(instance, victims), *victims]))

    def _rank_victims(
        self, instance: InstanceState, victims: list[ModelName]
    ) -> Sequence[ModelName]:
        """The order in which models lose their place on an instance, as the policy says."""
        context = self._context
        instance.view = None
        return context.policy.evict(
            context.now, self._cluster.view(instance), victims, context.costs
        )


def _leaves_first(request: RequestState) -> tuple[bool, float, str]:
    return request.interactive, -request.arrived, request.id


def _kv_move(request: RequestState, blocks: int) -> KvMove:
    return KvMove(request=request.id, host_offsets=request.host_offsets[:blocks])


def store(
    instance: InstanceState,
    model: ModelName,
    offsets: tuple[int, ...],
    version: int,
    *,
    fill: bool = False,
) -> Command:
    """Have the instance load the model from this image, or from its files for version 0."""
    instance.engines[model].attached = version
    return StoreWeights(instance=instance.id, model=model, host_offsets=offsets, fill=fill)


def _trim(instance: InstanceState, model: ModelName) -> Command:
    """Have the model give up all its cold prefix cache."""
    ledger = instance.ledger
    warm = ledger.kv[model] - ledger.cold[model]
    ledger.set_kv(model, warm)
    return TrimKv(instance=instance.id, model=model, kv_slabs=warm)


def _by_last_use(instance: InstanceState, models: Iterable[ModelName]) -> list[ModelName]:
    return sorted(models, key=lambda model: (instance.engines[model].used, model))
