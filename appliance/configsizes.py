"""What the models of a configuration take of its memory, in slabs, and whether that is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from appliance.catalog import CatalogEntry
from appliance.config import Config, Devices
from appliance.configreport import Report
from appliance.memory.kvpool import BLOCK_TOKENS, KvGeometry
from appliance.units import human


def check_sizes(config: Config, entries: list[CatalogEntry | None], report: Report) -> None:
    """Report models that have no room, in whole slabs, as memory is given out. What this refuses
    can never work."""
    devices, slab = config.devices, config.devices.slab_bytes
    ranks = devices.tensor_parallel
    if any(problem.key.startswith("devices.") for problem in report.problems):
        return  # sizes mean nothing yet
    pinned = 0
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None:
            continue
        share = _share(entry, ranks)
        weights = -(-share.weight_bytes // slab)
        geometry = _kv_geometry(share, devices)
        blocks = -(-model.max_context // BLOCK_TOKENS)
        kv = -(-blocks // geometry.group_blocks) * geometry.group_slabs
        if weights + kv > devices.slabs:
            report.add(
                ("model", index),
                f"{model.name} needs {human(weights * slab)} for its weights and "
                f"{human(kv * slab)} for the KV cache of one request{_on_each(ranks)}, in slabs of "
                f"{human(slab)}: "
                f"more than devices.memory ({human(devices.memory_bytes)})",
                f"set devices.memory to {human((weights + kv) * slab)} or more, a smaller "
                "devices.slab, or a smaller max_context",
            )
        pinned += weights * ranks if model.pin else 0
    longest = kv_floor_slabs(config, [entry for entry in entries if entry is not None])
    needed = (pinned + longest) * slab
    if needed > devices.host_cache_bytes:
        held = f"the weights of pinned models ({human(pinned * slab)}) and " if pinned else ""
        report.add(
            ("devices", "host_cache"),
            f"{human(devices.host_cache_bytes)} do not hold {held}the KV cache of one request "
            f"({human(longest * slab)})",
            f"set it to {human(needed)} or more" + (", or pin fewer models" if pinned else ""),
        )


def kv_floor_slabs(config: Config, entries: Iterable[CatalogEntry]) -> int:
    """Slabs of the host tier that hold the KV cache of any one request at full length."""
    devices = config.devices
    slab, ranks = devices.slab_bytes, devices.tensor_parallel
    contexts = {model.name: model.max_context for model in config.models}
    return max(
        (
            _host_slabs(
                -(-contexts[entry.name] // BLOCK_TOKENS),
                _kv_geometry(_share(entry, ranks), devices).block_bytes * ranks,
                slab,
            )
            for entry in entries
        ),
        default=0,
    )


def uncached(config: Config, entries: Iterable[CatalogEntry]) -> list[str]:
    """Names of the models whose weights the host cache has no room for while all others' are in
    it: some model is loaded from disk now and then."""
    slab = config.devices.slab_bytes
    entries = list(entries)
    pinned = {model.name for model in config.models if model.pin}
    room = config.devices.host_cache_bytes // slab - kv_floor_slabs(config, entries)
    left_out = []
    ranks = config.devices.tensor_parallel
    for entry in sorted(entries, key=lambda entry: entry.name not in pinned):
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
        kv_heads=-(-entry.kv_heads // ranks),
        weight_bytes=-(-entry.weight_bytes // ranks),
    )


def _on_each(ranks: int) -> str:
    return f", on each of {ranks} ranks" if ranks > 1 else ""


def _host_slabs(blocks: int, block_bytes: int, slab_bytes: int) -> int:
    """Slabs of the host tier that hold so many blocks: runs just long enough for one."""
    run = -(-block_bytes // slab_bytes)
    return -(-blocks // (run * slab_bytes // block_bytes)) * run


def _kv_geometry(entry: CatalogEntry, devices: Devices) -> KvGeometry:
    """On a GPU, where all layers of a block lie side by side, they count as one."""
    layers = 1 if devices.cuda else entry.layers
    return KvGeometry.plan(
        layers=layers,
        layer_block_bytes=entry.kv_bytes(BLOCK_TOKENS) // layers,
        slab_bytes=devices.slab_bytes,
        pool_slabs=1,
        least_blocks=1,
    )
