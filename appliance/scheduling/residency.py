"""Making room on a device: whose weights go, whose KV is swapped out, how much KV a job may map.

Works on one `InstanceState` while no job is out, so that every command given earlier is done when
these run. Weights go before KV (they cost no copy), idle models before those that run again soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.scheduling.lifecycle import Engine, KvPlace
from appliance.scheduling.state import InstanceState, RequestState
from appliance.vocabulary import (
    Command,
    Direction,
    EvictModel,
    KvMove,
    LoadModel,
    ModelName,
    MoveKv,
    PrefetchModel,
    RequestId,
)

Requests = Mapping[RequestId, RequestState]


@dataclass(slots=True, frozen=True)
class Grant:
    """What prepares a job, and how many slabs of KV its model may map."""

    commands: list[Command]
    kv_slabs: int


def resident_blocks(instance: InstanceState, model: ModelName, requests: Requests) -> int:
    """Blocks the model holds on the device when everything ordered so far is done. O(residents)."""
    engine = instance.engines[model]
    residents = (requests[request] for request in engine.residents)
    return sum(
        engine.shape.blocks(request.kv_tokens)
        for request in residents
        if request.kv is not KvPlace.LEAVING
    )


def fits(instance: InstanceState, model: ModelName, more_blocks: int, requests: Requests) -> bool:
    """Whether the model could hold `more_blocks` more with everything else gone."""
    engine = instance.engines[model]
    blocks = resident_blocks(instance, model, requests) + more_blocks
    return engine.weight_slabs + engine.shape.slabs(blocks) <= instance.ledger.total_slabs


def grant(
    instance: InstanceState,
    model: ModelName,
    more_blocks: int,
    wish_blocks: int,
    requests: Requests,
    now: float,
) -> Grant:
    """Bring the model in and let its KV grow by `more_blocks`, which must fit (`fits`).

    Up to `wish_blocks` more are granted from slabs that are free anyway.
    """
    engine = instance.engines[model]
    ledger = instance.ledger
    mapped = ledger.kv.get(model, 0)
    used = resident_blocks(instance, model, requests)
    cap = max(mapped, engine.shape.slabs(used + more_blocks))
    weights = 0 if engine.on_device else engine.weight_slabs
    commands = make_room(instance, model, weights + cap - mapped, requests)
    commands += bring_in(instance, model)
    ledger.set_kv(model, cap)
    wished = engine.shape.slabs(used + more_blocks + wish_blocks) - cap
    spare = ledger.free_slabs // engine.shape.group_slabs * engine.shape.group_slabs
    cap += max(0, min(wished, spare))
    ledger.set_kv(model, cap)
    engine.used = now
    return Grant(commands, cap)


def bring_in(instance: InstanceState, model: ModelName) -> list[Command]:
    """Load the weights, or wait for a prefetch of them; room was made before."""
    engine = instance.engines[model]
    if engine.stage is Engine.LOADED:
        return []
    if engine.stage is Engine.STORED:
        instance.ledger.begin_load(model, engine.weight_slabs)
        engine.to_stage(Engine.LOADING, model)
    return [LoadModel(instance=instance.id, model=model)]


def make_room(
    instance: InstanceState, model: ModelName, slabs: int, requests: Requests
) -> list[Command]:
    """Free `slabs` slabs, or all there are, without touching `model`."""
    ledger = instance.ledger
    victims = _victims(instance, {model})
    commands: list[Command] = []
    for victim in victims:
        if ledger.free_slabs >= slabs:
            break
        if victim in ledger.weights:
            commands.append(evict(instance, victim))
        if ledger.free_slabs < slabs and victim in ledger.kv:
            commands.append(clear_kv(instance, victim, requests))
    return commands


def evict(instance: InstanceState, model: ModelName) -> Command:
    instance.ledger.evict(model)
    instance.engines[model].to_stage(Engine.STORED, model)
    return EvictModel(instance=instance.id, model=model)


def clear_kv(instance: InstanceState, model: ModelName, requests: Requests) -> Command:
    """Swap out every request of the model that is on the device; its KV slabs are free then."""
    residents = (requests[request] for request in instance.engines[model].residents)
    leaving = [request for request in residents if request.kv is KvPlace.DEVICE]
    instance.ledger.set_kv(model, 0)
    return swap_out(instance, model, leaving)


def swap_out(instance: InstanceState, model: ModelName, leaving: Iterable[RequestState]) -> Command:
    """Move the KV of these requests to their places in the host tier."""
    shape = instance.engines[model].shape
    moves = []
    for request in leaving:
        request.to_kv(KvPlace.LEAVING, instance.id)
        moves.append(_kv_move(request, shape.blocks(request.kv_tokens)))
    return MoveKv(
        instance=instance.id,
        model=model,
        direction=Direction.OUT,
        moves=tuple(moves),
        kv_slabs=instance.ledger.kv.get(model, 0),
    )


def swap_in(
    instance: InstanceState, model: ModelName, arriving: Iterable[RequestState], kv_slabs: int
) -> Command:
    """Bring the KV of these requests to the device; room was granted before."""
    engine = instance.engines[model]
    moves = []
    for request in arriving:
        request.to_kv(KvPlace.ARRIVING, instance.id)
        engine.residents[request.id] = None
        moves.append(_kv_move(request, engine.shape.blocks(request.kv_tokens)))
    return MoveKv(
        instance=instance.id,
        model=model,
        direction=Direction.IN,
        moves=tuple(moves),
        kv_slabs=kv_slabs,
    )


def prefetch(instance: InstanceState, model: ModelName, target: ModelName) -> list[Command]:
    """Bring `target` in beside `model`, if slabs are free or held by weights needed later only."""
    ledger = instance.ledger
    engine = instance.engines[target]
    commands: list[Command] = []
    upcoming = instance.upcoming()
    sooner = set(upcoming[: upcoming.index(target)])
    victims = [
        victim
        for victim in _victims(instance, {model, target} | sooner)
        if victim in ledger.weights
    ]
    if ledger.free_slabs + sum(ledger.weights[v] for v in victims) < engine.weight_slabs:
        return []
    for victim in victims:
        if ledger.free_slabs >= engine.weight_slabs:
            break
        commands.append(evict(instance, victim))
    ledger.begin_load(target, engine.weight_slabs)
    engine.to_stage(Engine.LOADING, target)
    return [*commands, PrefetchModel(instance=instance.id, model=target)]


def _victims(instance: InstanceState, spared: set[ModelName]) -> list[ModelName]:
    """Models that hold slabs, the best to lose first: idle and least recently used, then the one
    that runs again last. O(models log models)."""
    ledger = instance.ledger
    order = {model: index for index, model in enumerate(instance.upcoming())}
    holders = [m for m in {**ledger.weights, **ledger.kv} if m not in spared]
    idle = sorted(
        (m for m in holders if m not in order), key=lambda m: (instance.engines[m].used, m)
    )
    wanted = sorted((m for m in holders if m in order), key=lambda m: -order[m])
    return idle + wanted


def _kv_move(request: RequestState, blocks: int) -> KvMove:
    return KvMove(request=request.id, host_offsets=request.host_offsets[:blocks])
