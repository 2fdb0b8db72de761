"""What `auto` means for the sizes of a configuration, chosen from the hardware and the models.

On the CPU, pools and the host cache share one memory. It is divided in steps: each step has what
one more use of the memory needs, and as many steps are taken as there is memory for, the last one
in part. More than the last step is of no use to the models, and stays free for other programs.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.config.groups import devices_of, plan_instances
from appliance.config.schema import Chosen, Config, Devices, Model
from appliance.config.sizing import kv_floor, least
from appliance.platform import machine_memory
from appliance.platform.cpus import front_end_count
from appliance.units import Bytes, Memory, human
from appliance.vocabulary import ModelName

GPU_SHARE: Final = 0.9
"""Of a GPU's memory; vLLM takes as much (`--gpu-memory-utilization`)."""
RUNTIME_SHARE: Final = 0.1
MOST_RUNTIME_BYTES: Final = 4 << 30
CORE_BYTES: Final = 768 << 20
FRONT_END_BYTES: Final = 512 << 20
RANK_BYTES: Final = 1 << 30
"""What the daemon with its helpers, a front end and a rank take besides pools and the host cache:
measured with small models on a CPU, 650 MB, 300 MB and 310 MB; a rank also has activations."""
SPARE_SHARE: Final = 1 / 16
"""Of the memory that is available: for what other programs take meanwhile."""
IDLE_SHARE: Final = 7 / 8
"""Of a machine's memory, what is available while no other programs run."""
UNKNOWN_BYTES: Final = 8 << 30
"""What is expected of a machine that does not say how much memory is available."""
ROOMY_BYTES: Final = 1 << 30
"""A pool or a host cache that may have so much has it, so that models can be added."""
USUAL_TOKENS: Final = 8192
"""A request of so many tokens has room, if its model reads as many."""
SHORT_TOKENS: Final = 4096
FEW_REQUESTS: Final = 8
"""So many requests of `SHORT_TOKENS` of each model have room together."""
MOST_REQUESTS: Final = {False: 32, True: 256}
"""In a batch that `auto` chooses, on CPUs and on GPUs."""
CONTEXT_STEP: Final = 256
"""A context is a multiple of this, unless it is all that the model reads."""
MOST_POSITIONS: Final = 1 << 29
LONG_TOKENS: Final = 131_072
"""The longest request that is planned for, and the context of a model that knows no end."""

Key: TypeAlias = tuple[str, ...]
Known: TypeAlias = tuple[Model, CatalogEntry]


class Room(NamedTuple):
    """What there is to divide, in bytes."""

    host_bytes: int
    """Of the machine's memory, without what processes take."""
    gpu_bytes: int | None = None
    """Of the smallest GPU, or of that with the least free; None if models run on the CPU."""

    @classmethod
    def of(cls, config: Config, available: int, front_ends: int, gpu_bytes: int | None) -> Room:
        """What so much available memory leaves to pools and the host cache."""
        processes = CORE_BYTES + front_ends * FRONT_END_BYTES + _ranks(config) * RANK_BYTES
        return cls(max(0, available - int(available * SPARE_SHARE) - processes), gpu_bytes)

    @classmethod
    def on_this_machine(cls, config: Config, gpu_bytes: int | None, *, now: bool) -> Room:
        """What is there `now`, or would be if no other programs ran."""
        memory = machine_memory.read_memory()
        idle = None if memory.total_bytes is None else int(memory.total_bytes * IDLE_SHARE)
        available = memory.available_bytes if now else idle
        front_ends = front_end_count(config.api.processes, len(os.sched_getaffinity(0)))
        known = UNKNOWN_BYTES if available is None else available
        return cls.of(config, known, front_ends, gpu_bytes)


def choose(
    config: Config,
    entries: Sequence[CatalogEntry | None],
    room: Room,
    running: Config | None = None,
) -> Config:
    """The configuration with a value for each `auto`, and the reasons in `Config.chosen`. What
    `auto` has chosen in `running` already stays. Models without an entry stay as they are."""
    pairs = zip(config.models, entries, strict=False)
    known = [(model, entry) for model, entry in pairs if entry is not None]
    config = _with_gpu(_with_running(config, running), room.gpu_bytes)
    config = _with_host(config, known, room)
    pinned = sum([_pinned(model, entry, config.devices) for model, entry in known])
    for model, entry in known:
        config = _with_model(config, model.name, entry, pinned)
    return config


def _ranks(config: Config) -> int:
    return sum([plan.ranks for plan in plan_instances(config.devices)])


def _pinned(model: Model, entry: CatalogEntry, devices: Devices) -> int:
    """Slabs of the host cache that its weights always have."""
    own = devices_of(model, devices)
    return least(entry, 1, own).weights * own.tensor_parallel if model.pin else 0


# --- setting keys --------------------------------------------------------------------------------


def _open(config: Config) -> Iterator[Key]:
    """The keys whose values are still to be chosen. `runtime` has no meaning on the CPU."""
    devices = config.devices
    if not devices.memory_bytes and devices.memory_bytes.share is None:
        yield "devices", "memory"
    if devices.cuda and not devices.runtime_bytes:
        yield "devices", "runtime"
    if not devices.host_cache_bytes:
        yield "devices", "host_cache"
    for model in config.models:
        yield from [("model", model.name, key) for key in _OF_MODELS if not getattr(model, key)]


_OF_MODELS: Final = ("max_context", "max_batch")


def _put(config: Config, chosen: Chosen) -> Config:
    """The configuration with this value, if it is still to be chosen."""
    if chosen.key not in _open(config):
        return config
    replace = msgspec.structs.replace
    config = replace(config, chosen=(*config.chosen, chosen))
    table, *name, key = chosen.key
    if table == "devices":
        size = (Memory if key == "memory" else Bytes)(chosen.value)
        return replace(config, devices=replace(config.devices, **{f"{key}_bytes": size}))
    models = [
        replace(model, **{key: chosen.value}) if [model.name] == name else model
        for model in config.models
    ]
    return replace(config, models=tuple(models))


def _with_running(config: Config, running: Config | None) -> Config:
    """Models whose checkpoint is another one are new."""
    if running is None:
        return config
    paths = {model.name: model.path for model in config.models}
    same = {model.name for model in running.models if paths.get(model.name) == model.path}
    for chosen in running.chosen:
        if chosen.key[0] == "devices" or chosen.key[1] in same:
            config = _put(config, chosen)
    return config


def with_models(running: Config, found: Config, names: Collection[ModelName]) -> Config:
    """What runs, with models of a configuration that was read, and what was chosen for them."""
    added = [model for model in found.models if model.name in names]
    of_others = [one for one in running.chosen if one.key[0] != "model" or one.key[1] not in names]
    new = [one for one in found.chosen if one.key[0] == "model" and one.key[1] in names]
    return msgspec.structs.replace(
        running, models=(*running.models, *added), chosen=(*of_others, *new)
    )


# --- sizes ---------------------------------------------------------------------------------------


def _with_gpu(config: Config, gpu_bytes: int | None) -> Config:
    if gpu_bytes is None:
        return config
    slab = config.devices.slab_bytes
    memory = int(GPU_SHARE * gpu_bytes) // slab * slab
    reason = f"{GPU_SHARE:.0%} of the {human(gpu_bytes)} that a GPU has to give"
    config = _put(config, Chosen(("devices", "memory"), max(2 * slab, memory), reason))
    runtime = min(MOST_RUNTIME_BYTES, int(RUNTIME_SHARE * gpu_bytes)) // slab * slab
    reason = f"{RUNTIME_SHARE:.0%} of a GPU, {human(MOST_RUNTIME_BYTES)} at most"
    return _put(config, Chosen(("devices", "runtime"), max(slab, runtime), reason))


class _Step(NamedTuple):
    """What a pool and the host cache have in all with one more use of memory, in slabs."""

    pool: int
    host: int
    pool_holds: str
    host_holds: str


def _with_host(config: Config, known: Sequence[Known], room: Room) -> Config:
    """Sizes of what is in the machine's memory: the host cache, and on the CPU the pools."""
    devices = config.devices
    slab, ranks = devices.slab_bytes, 0 if devices.cuda else _ranks(config)
    pool, host = devices.memory_bytes // slab, devices.host_cache_bytes // slab
    left = room.host_bytes // slab - ranks * pool - host
    grows, widest = not pool, pool or room.host_bytes // slab // max(1, ranks)
    host_grows, holds = not host, ("", "")
    for step in _steps(config, known, widest):
        more_pool = max(0, step.pool - pool) if grows else 0
        more_host = max(0, step.host - host) if host_grows else 0
        cost = ranks * more_pool + more_host
        part = min(1.0, max(0, left) / cost) if cost else 1.0
        pool, host = pool + int(part * more_pool), host + int(part * more_host)
        left -= cost
        if left < 0:
            break
        holds = step.pool_holds, step.host_holds
    all_of_it = f"all of the {human(room.host_bytes)} that may be used is taken" if left < 0 else ""
    for key, size, holding in zip(("memory", "host_cache"), (pool, host), holds, strict=True):
        reason = "; ".join(filter(None, (holding, all_of_it)))
        config = _put(config, Chosen(("devices", key), size * slab, reason))
    return config


def _steps(config: Config, known: Sequence[Known], widest: int) -> list[_Step]:
    """In the order of their use, for pools of `widest` slabs at most."""
    devices, slab = config.devices, config.devices.slab_bytes
    roomy = -(-ROOMY_BYTES // slab)
    if not known:
        return [_Step(roomy, roomy, "room for models to be added", "room for models to be added")]
    wishes = [_wish(model, entry, config.devices, widest) for model, entry in known]
    weights, kv = sum([one.weights for one in wishes]), [one.kv for one in wishes]
    floor = max([one.floor for one in wishes])
    smallest_floor = max([one.smallest_floor for one in wishes])
    least_host = floor + sum([one.pinned for one in wishes])
    weights_host = floor + sum([one.weights * one.ranks for one in wishes])
    smallest = max([one.weights + one.smallest for one in wishes])
    all_host = weights_host + sum([one.kv * one.copies for one in wishes])
    single = max([one.weights + one.request for one in wishes])
    alone = max([one.weights + one.kv for one in wishes])
    longest = max([roomy, weights + sum(kv), *(one.weights + one.longest for one in wishes)])
    pool = widest if devices.cuda else longest
    taken = max([one.weights for one in wishes]) if devices.cuda else weights
    # A request has a place in the host cache for all of its KV, also while it is on a device.
    places = max(0, pool - taken) * _ranks(config)
    long_host = max(roomy, all_host, weights_host - floor + places)
    few = f"{FEW_REQUESTS} requests of {SHORT_TOKENS:,} tokens"
    one_at_a_time = "room for one model at a time, with one request"
    first, turns = f"{one_at_a_time} of few tokens", f"room for one model, with {few}"
    few_paused = "room for the KV cache of one paused request of few tokens"
    both, each = "room for all models at once", f"room for all models at once, each with {few}"
    paused, stored = "room for the KV cache of one paused request", "room for all weights"
    kept = f"room for all weights, and the KV cache of {few} of each model"
    return [
        _Step(smallest, least_host - floor + smallest_floor, first, few_paused),
        _Step(single, least_host, one_at_a_time, paused),
        _Step(alone, least_host, turns, paused),
        _Step(alone, weights_host, turns, stored),
        _Step(weights + max(kv), weights_host, both, stored),
        _Step(weights + sum(kv), all_host, each, kept),
        _Step(longest, long_host, each, kept),
    ]


class _Wish(NamedTuple):
    """What a model has a use for, in slabs: of each rank, and, from `smallest_floor` on, on the
    host."""

    ranks: int
    copies: int
    """Ranks of all instances that may serve it."""
    weights: int
    smallest: int
    """KV of one request of the shortest context that `auto` chooses."""
    request: int
    """KV of one request of its context."""
    kv: int
    """KV of `FEW_REQUESTS`, or of that one, if it is more."""
    longest: int
    """KV of one request of all that the model reads, up to `LONG_TOKENS`."""
    smallest_floor: int
    floor: int
    pinned: int


def _wish(model: Model, entry: CatalogEntry, devices: Devices, widest: int) -> _Wish:
    """Groups of KV blocks depend on the size of the pool: what is enough for any up to `widest`."""
    tokens = model.max_context or min(entry.max_positions, USUAL_TOKENS)
    own = devices_of(model, devices)
    slab, ranks = own.slab_bytes, own.tensor_parallel
    sizes = [Memory(slab * number) for number in (1, max(1, widest))]
    pools = [msgspec.structs.replace(own, memory_bytes=size) for size in sizes]
    weights = least(entry, tokens, own).weights
    fewest = model.max_context or min(entry.max_positions, CONTEXT_STEP)
    request = max([least(entry, tokens, pool).kv for pool in pools])
    short = max([least(entry, min(tokens, SHORT_TOKENS), pool).kv for pool in pools])
    most = model.max_context or min(entry.max_positions, LONG_TOKENS)
    few = min(FEW_REQUESTS, model.max_batch or FEW_REQUESTS)
    return _Wish(
        ranks=ranks,
        copies=ranks * own.instances,
        weights=weights,
        smallest=max([least(entry, fewest, pool).kv for pool in pools]),
        request=request,
        kv=max(request, few * short),
        longest=max([least(entry, most, pool).kv for pool in pools]),
        smallest_floor=kv_floor(msgspec.structs.replace(model, max_context=fewest), entry, devices),
        floor=kv_floor(msgspec.structs.replace(model, max_context=tokens), entry, devices),
        pinned=_pinned(model, entry, devices),
    )


def _with_model(config: Config, name: str, entry: CatalogEntry, pinned: int) -> Config:
    """Its context, and its batch."""
    model = next(model for model in config.models if model.name == name)
    devices = devices_of(model, config.devices)
    if not model.max_context:
        tokens, reason = _longest(config, model, entry, pinned)
        config = _put(config, Chosen(("model", name, "max_context"), tokens, reason))
        model = msgspec.structs.replace(model, max_context=tokens)
    short = min(model.max_context, SHORT_TOKENS)
    most, need = MOST_REQUESTS[devices.cuda], least(entry, short, devices)
    number = (devices.slabs - need.weights) // need.kv if need.kv else most
    reason = f"{max(0, number)} requests of {short:,} tokens have room"
    if not need.kv:
        reason = "its requests keep nothing"
    number = min(most, max(FEW_REQUESTS, number))
    return _put(config, Chosen(("model", name, "max_batch"), number, reason))


def _longest(config: Config, model: Model, entry: CatalogEntry, pinned: int) -> tuple[int, str]:
    """The longest context that has room, at least the shortest step, and why it is not longer."""
    devices = config.devices
    slabs = devices.host_cache_bytes // devices.slab_bytes - pinned
    own = devices_of(model, devices)

    def lacking(tokens: int) -> str:
        """What has no room for a request of so many tokens; "" if it fits."""
        sized = msgspec.structs.replace(model, max_context=tokens)
        if least(entry, tokens, own).slabs > own.slabs:
            return "devices.memory"
        return "devices.host_cache" if kv_floor(sized, entry, devices) > slabs else ""

    endless = entry.max_positions > MOST_POSITIONS
    most = LONG_TOKENS if endless else entry.max_positions
    if not lacking(most):
        return most, "the model reads without end" if endless else "as long as the model reads"
    steps = range(1, -(-most // CONTEXT_STEP) + 1)
    fitting = bisect_left(steps, True, key=lambda step: bool(lacking(step * CONTEXT_STEP)))
    tokens = min(most, max(1, fitting) * CONTEXT_STEP)
    key = lacking(min(most, tokens + CONTEXT_STEP))
    return tokens, f"{key} has no room for longer requests; the model reads {most:,} tokens"
