"""Where a new engine's KV cache goes: agreed between `build` and the classes vLLM instantiates.

vLLM creates its worker and scheduler itself, from class names, so they cannot be handed anything.
While an engine is being built, its placement is the value of a context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from appliance.checkpoints.windows import STEP_TOKENS
from appliance.engines.vllm.device import Device
from appliance.engines.vllm.weights.placed import PlacedWeights
from appliance.memory.arena import Arena, Region
from appliance.memory.kv_pool import KvGeometry, KvPool


class KvTable(NamedTuple):
    """One of vLLM's groups of layers: their blocks are in one table of each request."""

    layers: int
    block_tokens: int
    has_state: bool
    """Whether its layers keep a state of constant size, which takes one block of a request."""
    window: int = 0
    """The most blocks that a request keeps in it, if its layers attend to a window; else 0."""
    encoded: int = 0
    """The blocks of a request, however many tokens it has, if its layers attend to what an encoder
    made (cross attention); else 0."""

    @property
    def grows(self) -> bool:
        """Whether a request with more tokens has more blocks in it, without end."""
        return not (self.has_state or self.window or self.encoded)

    def blocks(self, tokens: int) -> int:
        """Of a request that has `tokens` tokens in its KV cache."""
        blocks = self._all(tokens)
        return min(blocks, self.window) if self.window else blocks

    def first_kept(self, tokens: int) -> int:
        """Where the blocks begin that a request of `tokens` tokens keeps; before are none."""
        return -(-tokens // self.block_tokens) - self.blocks(tokens) if self.window else 0

    def reach(self, tokens: int, computed: int) -> int:
        """Where the blocks end that a prompt of `tokens` tokens has while so many are computed, and
        the next step is to come."""
        blocks = self._all(tokens)
        if not self.window:
            return blocks
        return min(blocks, self.first_kept(computed + 1) + self.window + self.step_blocks)

    def _all(self, tokens: int) -> int:
        """Of so many tokens, if no window gave any back."""
        if self.has_state or self.encoded:
            return max(1, self.encoded) if tokens else 0
        return -(-tokens // self.block_tokens)

    @property
    def step_blocks(self) -> int:
        """What a prompt has in a window's table beyond the window."""
        return -(-STEP_TOKENS // self.block_tokens)


class KvPlacement:
    """The KV address range of one engine; empty until the worker knows the model's KV shape."""

    def __init__(
        self,
        arena: Arena,
        owner: str,
        max_context: int,
        device: Device,
        on_loaded: Callable[[torch.nn.Module], PlacedWeights],
        most_images: int = 0,
        image_token_bytes: int = 0,
        encoder_tokens: int = 0,
    ) -> None:
        """A request of `max_context` tokens always has addresses. `on_loaded` gives the parameters
        of the model, once it is built, their own. A prompt has at most so many images, and what the
        encoder makes of each of their tokens has so many bytes."""
        self.device = device
        self.most_images = most_images
        self.image_token_bytes = image_token_bytes
        self.encoder_tokens = encoder_tokens
        """What an encoder makes of any sound, if the model's decoder attends to that; else 0."""
        self.kv_layers = 0
        """Layers of a block table; of the longest one, if there are several."""
        self.tables: list[KvTable] = []
        self.null_block: Sequence[int] = ()
        """The slots in which vLLM's null block lies, once they have memory; on a CPU they have
        none."""
        self._on_loaded = on_loaded
        self._placed: PlacedWeights | None = None
        self._arena = arena
        self._owner = owner
        self._max_context = max_context
        self._region: Region | None = None
        self._pool: KvPool | None = None

    def loaded(self, model: torch.nn.Module) -> None:
        """Called by the worker once it has built the model."""
        self._placed = self._on_loaded(model)

    @property
    def placed(self) -> PlacedWeights:
        assert self._placed is not None, "the model is not built yet"
        return self._placed

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
        cache = self.device.bytes_at(region.address, geometry.layers * geometry.layer_bytes)
        return cache.view(geometry.layers, geometry.blocks, geometry.layer_block_bytes)

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from a layer to the next within a block, and from a block to the next."""
        geometry = self.geometry
        if self.device.block_outermost:
            return geometry.layer_block_bytes // self.kv_layers, geometry.layer_block_bytes
        return geometry.layer_bytes, geometry.layer_block_bytes

    @property
    def block_tokens(self) -> int:
        """Of the tables that keep all tokens, or of those with windows if there are no others; of
        a model that keeps states only, its longest context."""
        kept = sorted((t for t in self.tables if not t.has_state), key=lambda table: table.window)
        return kept[0].block_tokens if kept else self._max_context

    @property
    def window_tokens(self) -> int:
        """Of the tables with windows, if others have blocks of other lengths; else 0."""
        tokens = next((t.block_tokens for t in self.tables if t.window), 0)
        return tokens if tokens != self.block_tokens else 0

    def plan(self, tables: Sequence[KvTable], layer_block_bytes: int) -> KvGeometry:
        """Reserve the addresses; called once. Layers side by side in a block are one to us."""
        assert self._region is None, "a KV cache is placed once"
        self.tables = list(tables)
        self.kv_layers = layers = max(table.layers for table in tables)
        if self.device.block_outermost:
            layers, layer_block_bytes = 1, layers * layer_block_bytes
        least_blocks = sum(table.reach(self._max_context, 0) for table in tables)
        return self._reserve(layers, layer_block_bytes, self._arena.slabs, least_blocks)

    def plan_none(self) -> None:
        """Reserve addresses for a model that keeps nothing of its requests: those of two blocks of
        a slab, which no request takes."""
        self.kv_layers = 1
        self._reserve(1, self._arena.slab_bytes, 1, 1)

    def _reserve(
        self, layers: int, layer_block_bytes: int, pool_slabs: int, least_blocks: int
    ) -> KvGeometry:
        geometry = KvGeometry.plan(
            layers=layers,
            layer_block_bytes=layer_block_bytes,
            slab_bytes=self._arena.slab_bytes,
            pool_slabs=pool_slabs,
            least_blocks=least_blocks,
        )
        self._region = self._arena.reserve(self._owner, geometry.slots)
        self._pool = KvPool(geometry, self._region)
        return geometry

    def discard(self) -> None:
        """Undo `plan`, if it got that far."""
        if self._region is not None:
            self.device.settle()
            self._region.release()
            self._region = self._pool = None
            self.device.retired(self.null_block)


_current: ContextVar[KvPlacement] = ContextVar("kv placement")


@contextmanager
def placing(placement: KvPlacement) -> Iterator[KvPlacement]:
    """The engine built in this context puts its KV cache there; if that fails, the placement is
    discarded."""
    token = _current.set(placement)
    try:
        yield placement
    except BaseException:
        placement.discard()
        raise
    finally:
        _current.reset(token)


def current_placement() -> KvPlacement:
    """The placement of the engine being built. Raises `LookupError` outside of a build."""
    return _current.get()
