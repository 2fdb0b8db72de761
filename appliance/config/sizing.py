"""What the models of a configuration take of its memory, in slabs, and whether that is there.

Known of a model before its engine is built is what it takes at least: the engine rounds up, and
may need a slab more. So what is refused here can never be served; what just fits may be refused
later by its engine (`Machine._why_never`), and fails then. A daemon that starts, one that
reloads, and one that is given a model all come here, by `load_config`.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from appliance.checkpoints.adapters import (
    AdapterPlace,
    AdapterRoom,
    AdapterStacks,
    check_base,
    read_adapters,
)
from appliance.checkpoints.checkpoint import (
    BYTES_PER_ELEMENT,
    CatalogEntry,
    read_checkpoint,
    tensor_bytes,
)
from appliance.checkpoints.draft_heads import DraftHead, read_head
from appliance.checkpoints.families import check_cpu, check_cuda
from appliance.checkpoints.kv_layers import BlockTables
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.task import check_task
from appliance.config.groups import devices_of
from appliance.config.problems import ProblemReport
from appliance.config.schema import Config, Devices, Model
from appliance.memory.kv_pool import BLOCK_TOKENS, KvGeometry
from appliance.units import Memory, human, no_less
from appliance.vocabulary import KvShape


class Least(NamedTuple):
    """Slabs that a model cannot do without in the pool of each rank."""

    weights: int
    kv: int
    """Of one request of `max_context` tokens, and of the images or sounds that these may be."""
    tokens: int
    """The longest request whose KV has room next to the weights, in whole blocks; no more than
    `max_context` is asked for."""

    @property
    def slabs(self) -> int:
        return self.weights + self.kv


def least(entry: CatalogEntry, max_context: int, devices: Devices) -> Least:
    """What the model takes of these devices at least: see above. KV is counted as the pool gives
    it out, weights without what an engine pads, and evenly divided among ranks."""
    share = _share(entry, devices.tensor_parallel)
    weights = -(-share.weight_bytes // devices.slab_bytes)
    shape = kv_shape(entry, max_context, devices)
    if not shape.most_blocks(1):  # it keeps nothing of a request
        return Least(weights=weights, kv=0, tokens=max_context)
    groups = max(0, devices.slabs - weights) // shape.group_slabs
    return Least(
        weights=weights,
        kv=shape.slabs(shape.most_blocks(max_context)),
        tokens=_longest(shape, groups * shape.group_blocks, max_context),
    )


def kv_shape(entry: CatalogEntry, max_context: int, devices: Devices) -> KvShape:
    """Blocks of the model's requests, of up to `max_context` tokens, in the pool of each rank: what
    its engine will report, without what the prefix cache keeps."""
    share = _share(entry, devices.tensor_parallel)
    tables = _tables(share, devices, max_context)
    geometry = _kv_geometry(tables, devices)
    return KvShape(
        block_tokens=tables.block_tokens,
        block_bytes=geometry.block_bytes,
        group_blocks=geometry.group_blocks,
        group_slabs=geometry.group_slabs,
        tables=tables.tables,
        state_blocks=tables.state_blocks,
        windows=tables.windows,
        step_blocks=tables.step_blocks,
        image_token_bytes=share.image_token_bytes,
        most_images=share.images or share.sounds,
        window_tokens=tables.window_tokens,
    )


def read_model(model: Model, devices: Devices) -> CatalogEntry:
    """The model's checkpoint, as these devices will serve it. Raises `CheckpointError`."""
    path, devices = Path(model.path), devices_of(model, devices)
    entry = read_checkpoint(
        model.name,
        path,
        model.dtype,
        model.task,
        cuda=devices.cuda,
        images=model.images,
        sounds=model.sounds,
    )
    config = read_model_config(path)
    ranks = devices.tensor_parallel
    if devices.cuda:
        check_cuda(config, ranks)
    else:
        check_cpu(config, entry.dtype, ranks)
    chosen = model.speculate.chosen
    if chosen is not None and chosen.has_head:
        entry = _with_head(entry, read_head(config, chosen))
    room = adapter_room(model)
    if not model.adapters and room is None:
        return entry
    task = check_task(path, model.task)
    check_base(config, task=task, ranks=ranks, cuda=devices.cuda)
    adapters = read_adapters(adapter_places(model), config, task, ranks, cuda=devices.cuda)
    more = AdapterStacks.plan(adapters, config, room).nbytes(BYTES_PER_ELEMENT[entry.dtype])
    return dataclasses.replace(entry, weight_bytes=entry.weight_bytes + more)


def _with_head(entry: CatalogEntry, head: DraftHead) -> CatalogEntry:
    """The model with what a head takes that drafts its tokens: its weights, and KV as in as many
    layers more."""
    return dataclasses.replace(
        entry,
        kv=dataclasses.replace(entry.kv, attention=entry.kv.attention + head.layers),
        weight_bytes=entry.weight_bytes + tensor_bytes(head.tensors, entry.dtype),
    )


def adapter_places(model: Model) -> tuple[AdapterPlace, ...]:
    """Its adapters, in the words of workers, each in the place of its number."""
    return tuple(AdapterPlace(one.name, one.path, n) for n, one in enumerate(model.adapters))


def adapter_room(model: Model) -> AdapterRoom | None:
    """What it has for adapters that come while it serves, if any may."""
    return AdapterRoom(model.max_loras, model.max_lora_rank) if model.max_loras else None


def check_sizes(config: Config, entries: list[CatalogEntry | None], report: ProblemReport) -> None:
    """Report models that have no room, in whole slabs, as memory is given out."""
    devices, slab = config.devices, config.devices.slab_bytes
    if report.concerns("devices"):
        return  # sizes mean nothing yet
    pinned = 0
    floors: dict[int, int] = {}
    """Of each model, by its place."""
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None or model.max_context > entry.max_positions:  # a problem of its own
            continue
        own = devices_of(model, devices)
        ranks, need = own.tensor_parallel, least(entry, model.max_context, own)
        if need.slabs > devices.slabs:
            runtime = devices.runtime_slabs * slab
            reserved = f" after devices.runtime ({human(runtime)})" if runtime else ""
            helps = need.kv > 0 and need.tokens > 0
            shorter = f", or max_context to {need.tokens} or less" if helps else ""
            remedy = f"set devices.memory to {_enough(entry, model.max_context, own)} or more, a "
            if config.is_chosen("devices", "memory"):
                remedy = f"{_FREE_MEMORY}, or a "
            report.add(
                ("model", index),
                f"{model.name} needs {human(need.weights * slab)} for its weights and "
                f"{human(need.kv * slab)} for the KV cache of one request{_on_each(ranks)}, in "
                f"slabs of {human(slab)}: "
                f"more than devices.memory ({human(devices.memory_bytes)}) has{reserved}",
                f"{remedy}smaller devices.slab{shorter}",
                need.slabs * slab,
            )
        pinned += need.weights * ranks if model.pin else 0
        floors[index] = kv_floor(model, entry, devices)
    longest = max(floors.values(), default=0)
    needed = (pinned + longest) * slab
    if needed > devices.host_cache_bytes:
        held = f"the weights of pinned models ({human(pinned * slab)}) and " if pinned else ""
        held += f"the KV cache of one request ({human(longest * slab)})"
        has, fewer = human(devices.host_cache_bytes), ", or pin fewer models" if pinned else ""
        if not config.is_chosen("devices", "host_cache"):
            wrong, remedy = f"{has} do not hold {held}", f"set it to {no_less(needed)} or more"
            report.add(("devices", "host_cache"), wrong, remedy + fewer)
            return
        index = max(floors, key=lambda index: floors[index])
        name = config.models[index].name
        if not config.is_chosen("model", name, "max_context"):
            fewer += ", or give it a shorter max_context"
        report.add(
            ("model", index),
            f"{name} needs host memory for {held}: more than devices.host_cache ({has}) has",
            f"{_FREE_MEMORY}{fewer}",
            needed,
        )


_FREE_MEMORY: Final = "end what else uses memory, restart a daemon that runs (auto chooses anew)"
"""What helps where `auto` has chosen a size that is too small."""


def _enough(entry: CatalogEntry, max_context: int, devices: Devices) -> str:
    """A `devices.memory` for a model that does not fit the one there is. Its groups of KV blocks
    may be larger in a larger pool, up to `kv_pool.MOST_SLABS`: what it needs in this one need not
    be enough there."""
    asked, advised = devices, ""
    while (need := least(entry, max_context, asked).slabs) > asked.slabs:
        advised = no_less((need + devices.runtime_slabs) * devices.slab_bytes)
        asked = msgspec.structs.replace(devices, memory_bytes=Memory.read(advised))
    return advised


def kv_floor_slabs(config: Config, entries: Iterable[CatalogEntry]) -> int:
    """Slabs of the host tier that hold the KV cache of any one request at full length."""
    models = {model.name: model for model in config.models}
    floors = (kv_floor(models[entry.name], entry, config.devices) for entry in entries)
    return max(floors, default=0)


def kv_floor(model: Model, entry: CatalogEntry, devices: Devices) -> int:
    """The same of one model, for all ranks of an instance, at its `max_context`."""
    own = devices_of(model, devices)
    shape = kv_shape(entry, model.max_context, own)
    block_bytes = shape.block_bytes * own.tensor_parallel
    return host_slabs(shape.blocks(model.max_context), block_bytes, devices.slab_bytes)


def uncached(config: Config, entries: Iterable[CatalogEntry]) -> list[str]:
    """Names of the models whose weights the host cache has no room for while all others' are in
    it: some model is loaded from disk now and then."""
    slab = config.devices.slab_bytes
    entries = list(entries)
    pinned = {model.name for model in config.models if model.pin}
    room = config.devices.host_cache_bytes // slab - kv_floor_slabs(config, entries)
    left_out = []
    ranks_of = {m.name: devices_of(m, config.devices).tensor_parallel for m in config.models}
    for entry in sorted(entries, key=lambda entry: entry.name not in pinned):
        ranks = ranks_of[entry.name]
        slabs = -(-_share(entry, ranks).weight_bytes // slab) * ranks
        if slabs <= room:
            room -= slabs
        else:
            left_out.append(entry.name)
    return left_out


def _share(entry: CatalogEntry, ranks: int) -> CatalogEntry:
    """What one of the ranks has of a model: at least so much, as small tensors are not divided."""
    return dataclasses.replace(
        entry,
        kv=entry.kv.share(ranks),
        weight_bytes=-(-entry.weight_bytes // ranks),
    )


def _on_each(ranks: int) -> str:
    return f", on each of {ranks} ranks" if ranks > 1 else ""


def host_slabs(blocks: int, block_bytes: int, slab_bytes: int) -> int:
    """Slabs of the host tier that hold so many blocks: runs just long enough for one."""
    run = -(-block_bytes // slab_bytes)
    return -(-blocks // (run * slab_bytes // block_bytes)) * run


def _tables(entry: CatalogEntry, devices: Devices, max_context: int) -> BlockTables:
    short = entry.kv.compressed and not devices.cuda
    return entry.kv.tables(_SHORT_TOKENS if short else BLOCK_TOKENS, max_context)


_SHORT_TOKENS: Final = 16
"""Of a block with compressed KV (MLA) on a CPU: its kernel knows no others."""


def _longest(shape: KvShape, blocks: int, max_context: int) -> int:
    """Tokens of the longest request, up to `max_context`, whose prompt takes no more blocks."""
    each = range(-(-max_context // shape.block_tokens) + 1)

    def needed(number: int) -> int:
        return shape.most_blocks(number * shape.block_tokens) if number else 0

    return max(0, bisect_right(each, blocks, key=needed) - 1) * shape.block_tokens


def _kv_geometry(tables: BlockTables, devices: Devices) -> KvGeometry:
    """On a GPU, where all layers of a block lie side by side, they count as one."""
    layers = 1 if devices.cuda else tables.layers
    return KvGeometry.plan(
        layers=layers,
        layer_block_bytes=tables.layers * tables.layer_block_bytes // layers,
        slab_bytes=devices.slab_bytes,
        pool_slabs=devices.slabs + devices.runtime_slabs,
        least_blocks=1,
    )
