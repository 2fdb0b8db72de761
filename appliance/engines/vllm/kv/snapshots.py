"""Snapshots of states: the prefix cache of models whose layers keep a state (Mamba, linear
attention, short convolutions).

A state is that of the last computed token; those before it are overwritten. So the steps of a
prompt end where its state is worth keeping (`stop`), and the state is copied then (`keep`), into
blocks that no request uses. They are cold, and found by the hash of all tokens before, as other
blocks are. A request with the same tokens begins with a copy of the state (`find`, `restore`).

Blocks of keys and values are long next to states (500 to 1600 tokens), so they are shared where
they are full, and the begun one is a part of the snapshot.

vLLM's own way (`mamba_cache_mode = "align"`) does not compute Mamba 2 on a CPU, and moves the state
of a request to another block at the end of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from appliance.engines.vllm.kv.placement import KvTable
from appliance.memory.arena import PoolExhausted

if TYPE_CHECKING:
    from appliance.engines.vllm.scheduler import ElasticBlockPool

EVERY_TOKENS: Final = 128
"""Snapshots are at multiples of this: to end a step costs about as much as to decode a token, which
so many tokens are worth."""


class PrefixHit(NamedTuple):
    """What is cached of a request."""

    blocks: Sequence[Sequence[KVCacheBlock]]
    """In each of its tables: those that it shares."""
    shared: int
    """How many tokens these hold."""
    tokens: int
    """How many it has with the snapshot: those, or more."""
    snapshot: Sequence[KVCacheBlock] = ()


class StateSnapshots:
    """Of the requests of one engine, in blocks of its pool. Where they are follows from the tokens
    of a request, and how many of them are computed."""

    def __init__(
        self, pool: ElasticBlockPool, tables: Sequence[tuple[Any, KvTable]], algorithm: str
    ) -> None:
        """`tables` are vLLM's managers, and what each is of; `algorithm` is vLLM's name of one that
        hashes tokens. `pool` has a hash for every `hashed_tokens`."""
        self._pool = pool
        self._tables = tables
        self._states = [table for table, shape in tables if shape.has_state]
        self._attention = [table for table, shape in tables if not shape.has_state]
        shapes = [shape for _, shape in tables]
        self._block_tokens = next((s.block_tokens for s in shapes if not s.has_state), EVERY_TOKENS)
        self._hashed = hashed_tokens(shapes)
        hashing = get_hash_fn_by_name(algorithm)
        init_none_hash(hashing)
        self.hasher: Callable[[Request], list[BlockHash]] = get_request_block_hasher(
            self._hashed, hashing
        )
        """What vLLM's requests hash their tokens with."""
        self._written: WeakKeyDictionary[Request, tuple[int, list[KVCacheBlock]]] = (
            WeakKeyDictionary()
        )
        """The last snapshot that a request made of what it writes: behind how many tokens, where.
        One that another request made with the same tokens is not its own to replace."""
        for table in self._attention:  # vLLM caches its blocks then, as it schedules them
            table.enable_caching = True

    @property
    def blocks(self) -> int:
        """The most of one snapshot."""
        begun = EVERY_TOKENS % self._block_tokens != 0
        return len(self._states) + begun * len(self._attention)

    def find(self, request: Request, *, with_state: bool) -> PrefixHit:
        """The longest prefix that is cached, but for the last token; if `with_state`, the longest
        with a snapshot. Where others have more is noted, for a step to end there."""
        request.shared_prefix_boundary = 0
        most = request.num_tokens - 1
        if request.skip_reading_prefix_cache or not request.block_hashes:
            return PrefixHit([()] * len(self._tables), 0, 0)
        attention, shared = self._find_attention(request, most)
        if not with_state:
            return self._hit(attention, shared if attention else 0)
        tokens = min(most, shared + self._block_tokens - 1) if attention else most
        tokens -= tokens % EVERY_TOKENS
        snapshot: list[KVCacheBlock] = []
        while tokens and not (snapshot := self._at(request, tokens)):
            tokens -= EVERY_TOKENS
        if tokens < shared and attention:
            request.shared_prefix_boundary = shared
        return self._hit(attention, tokens, snapshot)

    def _find_attention(
        self, request: Request, most: int
    ) -> tuple[Sequence[Sequence[KVCacheBlock]], int]:
        """Cached blocks of keys and values, of `most` tokens at most, and how many they hold."""
        if not self._attention:
            return (), most
        found: tuple[Sequence[Sequence[KVCacheBlock]], int] = (
            FullAttentionManager.find_longest_cache_hit(
                block_hashes=request.block_hashes,
                max_length=most,
                kv_cache_group_ids=[table.kv_cache_group_id for table in self._attention],
                block_pool=self._pool,
                kv_cache_spec=self._attention[0].kv_cache_spec,
                drop_eagle_block=False,
                alignment_tokens=self._block_tokens,
            )
        )
        return found

    def _hit(
        self,
        attention: Sequence[Sequence[KVCacheBlock]],
        tokens: int,
        snapshot: Sequence[KVCacheBlock] = (),
    ) -> PrefixHit:
        """With as many of the blocks of keys and values as so many tokens fill."""
        full = tokens // self._block_tokens
        found = iter(attention)
        blocks = [() if shape.has_state else next(found)[:full] for _, shape in self._tables]
        return PrefixHit(blocks, full * self._block_tokens, tokens, snapshot)

    def _parts(self, tokens: int) -> list[tuple[Any, int]]:
        """What a snapshot behind so many tokens has copies of: of each table, the place in it."""
        parts = [(table, 0) for table in self._states]
        if tokens % self._block_tokens:
            parts += [(table, tokens // self._block_tokens) for table in self._attention]
        return parts

    def _at(self, request: Request, tokens: int) -> list[KVCacheBlock]:
        """The snapshot behind so many tokens, if there is one."""
        behind = request.block_hashes[tokens // self._hashed - 1]
        groups = [table.kv_cache_group_id for table, _ in self._parts(tokens)]
        return self._pool.get_cached_block(behind, groups) or []

    def restore(self, request_id: str, tokens: int, snapshot: Sequence[KVCacheBlock]) -> None:
        """A request, which has blocks, begins behind so many tokens, with this snapshot: of `find`,
        and used until now."""
        if snapshot:
            for (table, place), kept in zip(self._parts(tokens), snapshot, strict=True):
                self._pool.copy(kept, table.req_to_blocks[request_id][place])
            self._pool.free_blocks(snapshot)

    def stop(self, request: Request) -> int:
        """Behind which token of a prompt a step has to end, as its state is worth keeping there; 0
        if there is none to come."""
        places = self._stops(request)
        return next((place for place in places if place > request.num_computed_tokens), 0)

    def _stops(self, request: Request) -> tuple[int, int]:
        """Where others have the same tokens, and near the end: another prompt may go on there."""
        shared, last = request.shared_prefix_boundary, request.num_tokens - 1
        return shared - shared % EVERY_TOKENS, last - last % EVERY_TOKENS

    def keep(self, request: Request, max_slabs: int) -> None:
        """Keep the state of a request behind a step, if it is worth it and there is room: in what
        is free, in slabs up to `max_slabs`, or in place of what is coldest in the cache.

        Of what a request writes it leaves one snapshot, the last.
        """
        computed = request.num_computed_tokens
        if not computed or computed % EVERY_TOKENS:
            return
        writing = computed == request.num_tokens - 1
        if not writing and computed not in self._stops(request):
            return
        if not self._states[0].req_to_blocks.get(request.request_id):
            return  # it has ended
        if self._at(request, computed):
            return
        tokens, last = self._written.pop(request, (0, [])) if writing else (0, [])
        if last and self._at(request, tokens) == last:
            self._pool.drop(last)
        parts = self._parts(computed)
        try:
            self._pool.provide(len(parts), max_slabs)
        except (PoolExhausted, OSError):  # the system may refuse to map more
            return  # what is not kept is computed again
        copies = self._pool.get_new_blocks(len(parts))
        try:
            self._copy(request, parts, copies)
        finally:
            self._pool.free_blocks(copies)
        if computed > request.num_prompt_tokens:
            self._written[request] = computed, copies

    def _copy(
        self, request: Request, parts: Sequence[tuple[Any, int]], copies: Sequence[KVCacheBlock]
    ) -> None:
        """Have new blocks hold what a request does in these parts, and be found by its tokens."""
        full = request.num_computed_tokens // self._hashed
        for (table, place), copy in zip(parts, copies, strict=True):
            self._pool.copy(table.req_to_blocks[request.request_id][place], copy)
            self._pool.cache_full_blocks(
                request=request,
                blocks=[self._pool.null_block] * (full - 1) + [copy],
                num_cached_blocks=full - 1,
                num_full_blocks=full,
                block_size=self._hashed,
                kv_cache_group_id=table.kv_cache_group_id,
            )


def hashed_tokens(tables: Sequence[KvTable]) -> int:
    """How many tokens have a hash of their own: blocks and snapshots end with one."""
    return gcd(EVERY_TOKENS, *(table.block_tokens for table in tables if not table.has_state))


def can_be_kept(tables: Sequence[KvTable], *, host_memory: bool) -> bool:
    """Whether a model with these tables has states, and nothing that windows give back; and whether
    the CPU copies. A GPU may still be at a copy when a trim unmaps what it copies."""
    has_states = any(table.has_state for table in tables)
    return host_memory and has_states and not any(table.window for table in tables)
