"""What fits: models in the pool at once, requests of each, what the host cache holds, and which key
to change for more. All of it is counted as the daemon counts it (`appliance.config.sizing`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, TypeAlias

import msgspec

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.task import check_task
from appliance.config.groups import devices_of, instances_of, plan_instances
from appliance.config.schema import Config, Devices, Model
from appliance.config.sizing import kv_floor, kv_floor_slabs, kv_shape, least, uncached
from appliance.scheduling.dispatcher import EMBEDDED_TOKENS
from appliance.units import Memory, no_less

SHORT_TOKENS: Final = 4096

Pair: TypeAlias = tuple[Model, CatalogEntry]


class ModelFit(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Sizes are bytes, for all ranks of an instance."""

    name: str
    weight_bytes: int
    """In whole slabs, as the pool has them."""
    kv_bytes_per_1k_tokens: int
    """Of a request of 1,024 tokens, in whole blocks."""
    max_context: int
    max_batch: int
    requests_at_max_context: int
    """So many requests of `max_context` tokens are computed together, on all instances that may
    serve it: as many as have room next to its weights, and a place for their KV in the host cache,
    up to `max_batch` on each instance. Of prompts that are embedded or scored, no more than a step
    has tokens for, and without a place in the host cache, as nothing of them is kept."""
    requests_at_4k: int
    """The same of 4,096 tokens, or of `max_context`, if that is less."""
    switch_seconds: float
    """How long its weights take from the host cache into the pool."""
    in_host_cache: bool
    """Whether its weights are there next to those of the others, else they come from disk."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A whole configuration."""

    models: tuple[ModelFit, ...]
    kind: str
    pool_bytes: int
    """For weights and KV, of each rank."""
    instances: int
    most_at_once: int
    """So many models, the smallest first, stay in one pool, while any of them has a request of
    4,096 tokens. Of several pools with different models, in the one that has most of them."""
    fewest_at_once: int
    """The same, the largest first, in the pool that has fewest."""
    all_at_once: bool
    """Whether each pool has all models that it may have together so."""
    host_cache_bytes: int
    host_weight_bytes: int
    """Weights in it."""
    host_kv_bytes: int
    """What they leave to the KV of requests, which have a place in it from their beginning."""
    load_bytes_per_second: float
    measured: bool
    """Whether that was measured on this machine."""
    remedies: tuple[str, ...]
    """What to change to fit more."""


def fit(
    config: Config,
    entries: Sequence[CatalogEntry],
    load_bytes_per_second: float,
    *,
    measured: bool = False,
) -> Fit:
    """What fits on each instance of a configuration that was checked. Weights load at that rate."""
    devices, slab = config.devices, config.devices.slab_bytes
    pairs = list(zip(config.models, entries, strict=True))
    left_out = set(uncached(config, entries))
    host_kv = _host_kv_slabs(config, pairs, left_out)
    models = [
        ModelFit(
            name=model.name,
            weight_bytes=least(entry, 1, own).weights * own.tensor_parallel * slab,
            kv_bytes_per_1k_tokens=_kv_bytes(model, entry, own, 1024),
            max_context=model.max_context,
            max_batch=model.max_batch,
            requests_at_max_context=computed_at_once(model, entry, own, model.max_context, host_kv),
            requests_at_4k=computed_at_once(model, entry, own, short(model), host_kv),
            switch_seconds=least(entry, 1, own).weights * slab / load_bytes_per_second,
            in_host_cache=entry.name not in left_out,
        )
        for model, entry, own in [(m, e, devices_of(m, devices)) for m, e in pairs]
    ]
    pools = _pools(config, pairs)
    together = [at_once(devices, pool) for pool in pools]
    return Fit(
        models=tuple(models),
        kind=devices.kind,
        pool_bytes=int(devices.slabs * slab),
        instances=max([devices_of(model, devices).instances for model, _ in pairs]),
        most_at_once=max(together),
        fewest_at_once=min([at_once(devices, reversed(pool)) for pool in pools]),
        all_at_once=together == [len(pool) for pool in pools],
        host_cache_bytes=int(devices.host_cache_bytes),
        host_weight_bytes=sum([one.weight_bytes for one in models if one.in_host_cache]),
        host_kv_bytes=host_kv * slab,
        load_bytes_per_second=load_bytes_per_second,
        measured=measured,
        remedies=tuple(_remedies(config, pairs, left_out, host_kv)),
    )


def _pools(config: Config, pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The models that each instance may serve, the smallest first, for each kind of instance."""
    devices = config.devices
    ordered = sorted(
        pairs, key=lambda pair: least(pair[1], 1, devices_of(pair[0], devices)).weights
    )
    served = [(pair, instances_of(pair[0], devices)) for pair in ordered]
    found: list[list[Pair]] = []
    for number in range(len(plan_instances(devices))):
        pool = [pair for pair, numbers in served if numbers is None or number in numbers]
        if pool and pool not in found:
            found.append(pool)
    return found


def at_once(devices: Devices, pairs: Iterable[Pair]) -> int:
    """How many of these models, from the first on, have their weights in one pool together, with
    room for a short request of any."""
    count = weights = kv = 0
    for model, entry in pairs:
        need = least(entry, short(model), devices_of(model, devices))
        weights, kv = weights + need.weights, max(kv, need.kv)
        if weights + kv > devices.slabs:
            break
        count += 1
    return count


def short(model: Model) -> int:
    """Tokens of a short request."""
    return min(SHORT_TOKENS, model.max_context)


def computed_at_once(
    model: Model, entry: CatalogEntry, devices: Devices, tokens: int, host_kv_slabs: int
) -> int:
    """`requests_at_once`, or, of a model that embeds or scores, `prompts_at_once`."""
    if check_task(entry.path, model.task).pools:
        return prompts_at_once(model, entry, devices, tokens)
    return requests_at_once(model, entry, devices, tokens, host_kv_slabs)


def prompts_at_once(model: Model, entry: CatalogEntry, devices: Devices, tokens: int) -> int:
    """Prompts of so many tokens that are embedded together, on all instances."""
    most = min(model.max_batch, max(1, EMBEDDED_TOKENS // tokens))
    shape = kv_shape(entry, model.max_context, devices)
    if each := shape.most_blocks(tokens):
        groups = max(0, devices.slabs - least(entry, tokens, devices).weights) // shape.group_slabs
        most = min(most, groups * shape.group_blocks // each)
    return most * devices.instances


def requests_at_once(
    model: Model, entry: CatalogEntry, devices: Devices, tokens: int, host_kv_slabs: int
) -> int:
    """Requests of so many tokens that are computed together next to the model's weights, on all
    instances; `devices` as the model finds them. A request has a place for its KV in the host cache
    before it begins, where KV has so many slabs."""
    most = min(model.max_batch, model.max_sequences)
    shape = kv_shape(entry, model.max_context, devices)
    each = shape.blocks(tokens)
    weights = least(entry, tokens, devices).weights
    groups = max(0, devices.slabs - weights) // shape.group_slabs
    # While the prompt of the last one is computed, it may have more.
    blocks = groups * shape.group_blocks - (shape.most_blocks(tokens) - each)
    pools = max(0, min(most, blocks // each)) * devices.instances
    block_bytes = shape.block_bytes * devices.tensor_parallel
    run = -(-block_bytes // devices.slab_bytes)
    places = host_kv_slabs // run * (run * devices.slab_bytes // block_bytes)
    return min(pools, places // each)


def _kv_bytes(model: Model, entry: CatalogEntry, devices: Devices, tokens: int) -> int:
    """Of a request of so many tokens, on all ranks."""
    shape = kv_shape(entry, model.max_context, devices)
    return shape.blocks(tokens) * shape.block_bytes * devices.tensor_parallel


def _host_kv_slabs(config: Config, pairs: Sequence[Pair], left_out: Set[str]) -> int:
    """What weights leave to KV in the host cache."""
    slabs = config.devices.host_cache_bytes // config.devices.slab_bytes
    for model, entry in pairs:
        if entry.name not in left_out:
            own = devices_of(model, config.devices)
            slabs -= least(entry, 1, own).weights * own.tensor_parallel
    return slabs


def _remedies(
    config: Config,
    pairs: Sequence[Pair],
    left_out: Set[str],
    host_kv: int,
) -> Iterator[str]:
    """Sentences, each with a key and the value that helps."""
    devices, slab = config.devices, config.devices.slab_bytes
    needs = [least(entry, short(model), devices_of(model, devices)) for model, entry in pairs]
    lacking = [pool for pool in _pools(config, pairs) if at_once(devices, pool) < len(pool)]
    if lacking:
        size = no_less(max([_memory_for(devices, pool) for pool in lacking]))
        yield f'devices.memory = "{size}": all models are in the pool at once, and none switches'
    entries = [entry for _, entry in pairs]
    if left_out:
        host = kv_floor_slabs(config, entries) + sum(
            [need.weights * devices_of(m, devices).tensor_parallel
             for need, (m, _) in zip(needs, pairs, strict=True)]
        )  # fmt: skip
        yield (f'devices.host_cache = "{no_less(host * slab)}": no model is loaded from disk')
    for (model, entry), need in zip(pairs, needs, strict=True):
        own, tokens = devices_of(model, devices), model.max_context
        two = min(2, model.max_batch, model.max_sequences)
        if check_task(entry.path, model.task).pools:
            two = min(two, max(1, EMBEDDED_TOKENS // tokens))
        if computed_at_once(model, entry, own, tokens, host_kv) >= two:
            continue
        shorter = f"or max_context = {max(1, tokens // 2)}"
        says = f"two requests of {tokens:,} tokens run at once"
        if computed_at_once(model, entry, own, tokens, 1 << 40) >= two:
            more = 2 * kv_floor(model, entry, devices) - host_kv
            size = no_less(devices.host_cache_bytes + more * slab)
            yield f'{model.name}: devices.host_cache = "{size}", {shorter}: {says}'
        else:
            pool = 2 * least(entry, tokens, own).kv + need.weights + devices.runtime_slabs
            yield f'{model.name}: devices.memory = "{no_less(pool * slab)}", {shorter}: {says}'


def _memory_for(devices: Devices, pool: Sequence[Pair]) -> int:
    """A `devices.memory` in which all of these models are together. Groups of KV blocks may be
    larger in a larger pool: what they need in this one need not be enough there."""
    asked, size = devices, 0
    while at_once(asked, pool) < len(pool):
        needs = [least(entry, short(model), devices_of(model, asked)) for model, entry in pool]
        together = sum([need.weights for need in needs]) + max([need.kv for need in needs])
        size = (together + devices.runtime_slabs) * devices.slab_bytes
        asked = msgspec.structs.replace(asked, memory_bytes=Memory.read(no_less(size)))
    return size
