"""Where a new engine's KV cache goes: agreed between `build` and the classes vLLM instantiates.

vLLM creates its worker and scheduler itself, from class names, so they cannot be handed anything.
While an engine is being built, its placement is the value of a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from appliance.engines.vllm.tensors import bytes_at
from appliance.memory.arena import Arena, Region
from appliance.memory.kvpool import KvGeometry, KvPool


class KvPlacement:
    """The KV address range of one engine; empty until the worker knows the model's KV shape."""

    def __init__(self, arena: Arena, owner: str, least_blocks: int) -> None:
        self._arena = arena
        self._owner = owner
        self._least_blocks = least_blocks
        self._region: Region | None = None
        self._pool: KvPool | None = None

    @property
    def region(self) -> Region:
        assert self._region is not None, "the KV shape is not known yet"
        return self._region

    @property
    def pool(self) -> KvPool:
        assert self._pool is not None, "the KV shape is not known yet"
        return self._pool

    @property
    def geometry(self) -> KvGeometry:
        return self.pool.geometry

    @property
    def kv_bytes(self) -> torch.Tensor:
        """The cache as ``[layers, blocks, bytes]``; only to be indexed at blocks in use."""
        geometry, region = self.geometry, self.region
        cache = bytes_at(region.address, geometry.layers * geometry.layer_bytes)
        return cache.view(geometry.layers, geometry.blocks, geometry.layer_block_bytes)

    def plan(self, layers: int, layer_block_bytes: int) -> KvGeometry:
        """Reserve the addresses; called once."""
        assert self._region is None, "a KV cache is placed once"
        geometry = KvGeometry.plan(
            layers=layers,
            layer_block_bytes=layer_block_bytes,
            slab_bytes=self._arena.slab_bytes,
            pool_slabs=self._arena.slabs,
            least_blocks=self._least_blocks,
        )
        self._region = self._arena.reserve(self._owner, geometry.slots)
        self._pool = KvPool(geometry, self._region)
        return geometry

    def discard(self) -> None:
        """Undo `plan`, if it got that far."""
        if self._region is not None:
            self._region.release()
            self._region = self._pool = None


_current: ContextVar[KvPlacement] = ContextVar("kv placement")


@contextmanager
def placing(placement: KvPlacement) -> Iterator[None]:
    """The engine built in this context puts its KV cache there."""
    token = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(token)


def current_placement() -> KvPlacement:
    """The placement of the engine being built. Raises `LookupError` outside of a build."""
    return _current.get()
