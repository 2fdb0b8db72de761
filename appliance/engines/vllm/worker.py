"""What vLLM's workers do otherwise here: weights and KV cache lie in the arena. For any device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)

from appliance.checkpoints.windows import window_blocks
from appliance.engines.vllm.drafts.heads import join_head, use_heads
from appliance.engines.vllm.kv.placement import KvTable, current_placement
from appliance.engines.vllm.layers.layer_scalars import make_layer_scalars_parameters
from appliance.memory.kv_pool import BLOCK_TOKENS

make_layer_scalars_parameters()


class UnsupportedKvCache(ValueError):
    """The model's KV cache is not made of equal blocks of all layers."""


class InArena:
    """For a worker of vLLM's: takes the size of the KV cache, and the places of cache and weights,
    from the placement of the engine being built."""

    model_runner: Any
    vllm_config: Any

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        use_heads(self.model_runner)
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        model = self.model_runner.get_model()
        join_head(self.model_runner, model)
        current_placement().loaded(model)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Of each layer. One whose window holds the longest request keeps the KV of all tokens,
        unless that has another size in other layers, which cannot be in the same table."""
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        longest = -(-self.vllm_config.model_config.max_model_len // BLOCK_TOKENS)
        sizes = {_token_bytes(spec) for spec in specs.values() if not _has_state(spec)}
        equal = len(sizes) <= 1
        return {layer: _windowed(spec, longest if equal else None) for layer, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """Bytes of the address range, so that vLLM plans exactly the blocks that it holds."""
        specs = self.get_kv_cache_spec()
        _check(specs.values())
        groups = get_kv_cache_groups(self.vllm_config, specs)
        tables, (page,) = [_table(group) for group in groups], _pages(groups)
        geometry = current_placement().plan(tables, page)
        return geometry.layers * geometry.layer_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        encoder = self.vllm_config.model_config.attn_type == "encoder_only"
        if encoder is bool(kv_cache_config.kv_cache_groups):
            raise UnsupportedKvCache(
                "a model whose tokens attend in both directions keeps no KV, and any other does"
            )
        if encoder:  # vLLM did not ask for memory
            current_placement().plan_none()
        else:
            _check_layout(kv_cache_config)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """`kv_cache` only: for the other tags the device's own memory is the right one."""
        placement = current_placement()
        if tag != "kv_cache" or not placement.tables:
            return nullcontext()
        size = placement.geometry.layers * placement.geometry.layer_bytes
        return _PlaceOneAllocation(placement.device.bytes_at(placement.region.address, size))


def _token_bytes(spec: KVCacheSpec) -> int:
    """Of a token in one layer that keeps its KV."""
    return int(spec.page_size_bytes // spec.block_size)


def _windowed(spec: KVCacheSpec, longest: int | None) -> KVCacheSpec:
    """With blocks as long as those of other layers; without a window that `longest` blocks fit, if
    they are given.

    Layers that attend to the chunk of a token keep a window as long as that: no chunk begins before
    its window does. How they attend is theirs to know.
    """
    if type(spec) is ChunkedLocalAttentionSpec:
        chunk = spec.attention_chunk_size
        drop = ("attention_chunk_size",)
        spec = replace_as(spec, SlidingWindowSpec, drop=drop, sliding_window=chunk)
    if type(spec) is not SlidingWindowSpec:
        return spec
    if longest is None or window_blocks(spec.sliding_window, BLOCK_TOKENS) < longest:
        return replace(spec, block_size=BLOCK_TOKENS)
    return replace_as(
        spec, FullAttentionSpec, drop=("extra_retained_tokens",), block_size=BLOCK_TOKENS
    )


def _check(specs: Collection[KVCacheSpec]) -> None:
    """Raise `UnsupportedKvCache` for layers that keep neither KV of tokens nor a state, and for KV
    of several sizes, but for one size in layers with windows and another one in all others."""
    for spec in specs:
        if not (
            _has_state(spec)
            or (type(spec) in _ATTENTION and not getattr(spec, "non_causal", False))
        ):
            raise UnsupportedKvCache(
                f"layers keep their KV as {spec}, not of all tokens, a window, an encoder or a "
                "state"
            )
    kept = [spec for spec in specs if not _has_state(spec)]
    windows = {spec.page_size_bytes for spec in kept if type(spec) is SlidingWindowSpec}
    others = {spec.page_size_bytes for spec in kept if type(spec) is not SlidingWindowSpec}
    sizes = windows | others
    if (
        not specs
        or max(len(windows), len(others), len(sizes) if len(kept) < len(specs) else 0) > 1
        or any(max(sizes) % size for size in sizes)
    ):
        raise UnsupportedKvCache("the model's layers differ in the size of their KV")


_ATTENTION: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, CrossAttentionSpec)


def _has_state(spec: KVCacheSpec) -> bool:
    return type(spec) is MambaSpec and spec.mamba_cache_mode == "none"


def _table(group: KVCacheGroupSpec) -> KvTable:
    spec = group.kv_cache_spec
    window = 0
    if isinstance(spec, SlidingWindowSpec):
        window = window_blocks(spec.sliding_window, spec.block_size)
    encoded = 0
    if isinstance(spec, CrossAttentionSpec):
        encoded = -(-current_placement().encoder_tokens // spec.block_size)
    return KvTable(len(group.layer_names), spec.block_size, _has_state(spec), window, encoded)


def _pages(groups: Sequence[KVCacheGroupSpec]) -> set[int]:
    """Bytes of a block in one layer: one size. Raises `UnsupportedKvCache` if there are others."""
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    if len(pages) != 1:
        raise UnsupportedKvCache("the model's layers differ in the size of their blocks")
    return pages


def _check_layout(config: KVCacheConfig) -> None:
    """Raise `UnsupportedKvCache` unless the cache lies as `KvGeometry` says: each table begins
    where the others do, as no block is in two."""
    placement = current_placement()
    if [_table(group) for group in config.kv_cache_groups] != placement.tables:
        raise UnsupportedKvCache("its layers are divided among other block tables than before")
    wanted = (0, *placement.strides, placement.geometry.blocks)
    layers = [table.layers for table in placement.tables]
    for tensor, count in zip(config.kv_cache_tensors, layers, strict=True):
        found = (tensor.offset, tensor.layer_stride, tensor.block_stride, config.num_blocks)
        if found != wanted or len(tensor.layers) != count:
            raise UnsupportedKvCache(f"offset, strides and blocks are {found}, not {wanted}")


class _PlaceOneAllocation(TorchFunctionMode):
    """Answers the one ``torch.zeros`` of the KV cache with a tensor over reserved addresses.

    There is no memory behind them yet; `ElasticBlockPool` empties every block that it hands out.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self._cache = cache
        self._placed = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.zeros and tuple(args) == (self._cache.numel(),):
            self._placed += 1
            return self._cache.view(torch.int8)
        return func(*args, **(kwargs or {}))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        if exc_type is None and self._placed != 1:
            raise UnsupportedKvCache(f"the KV cache was allocated {self._placed} times, not once")
