"""vLLM's scheduler, reduced to what is asked of it: step these requests, within these blocks.

Requests never wait in vLLM's queues. All that are known lie in `Scheduler.requests`; those of the
step are put in `running` by `step_only`, and nothing is left there afterwards. Blocks are the
engine's to provide before a step, so vLLM never has a reason to preempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from appliance.engines.vllm.kv.placement import KvTable, current_placement
from appliance.engines.vllm.kv.snapshots import (
    PrefixHit,
    StateSnapshots,
    can_be_kept,
    hashed_tokens,
)
from appliance.memory.kv_pool import KvPool

Tables = tuple[list[int], ...]
"""Numbers of a request's blocks, in each of its block tables."""


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's block objects and its map of hashes, over the blocks that `KvPool` has now.

    A block that no request uses is cold in the pool while it has a hash, and free without one.
    The engine provides blocks before a step (`provide`), and that is when cold ones are lost: what
    vLLM is then handed out is free, and empty.

    Empty, because attention multiplies whole blocks, and what lies behind a request's last token
    with zero. In memory that was others' there are bytes that this does not make zero: NaN and
    infinity. A block with a hash is full of tokens, so nothing else is in it.
    """

    def __init__(
        self, pool: KvPool, kv_bytes: torch.Tensor, *, enable_caching: bool, hash_block_size: int
    ) -> None:
        super().__init__(pool.geometry.blocks, enable_caching, hash_block_size=hash_block_size)
        self.kv = pool
        self.kv_bytes = kv_bytes  # [layers, blocks, bytes]
        self.on_lost: Callable[[Iterable[int]], None] | None = None
        """Called with cold blocks that lost their content, besides what vLLM forgets of them."""

    def provide(self, blocks: int, max_slabs: int) -> None:
        """See `KvPool.ensure`: free blocks, at the cost of slabs first, then of cold blocks."""
        self._forget(self.kv.ensure(blocks, max_slabs))

    def trim(self, keep_slabs: int | None) -> None:
        """See `KvPool.trim`."""
        self._forget(self.kv.trim(keep_slabs))

    def get_num_free_blocks(self) -> int:
        return self.kv.free

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = [self.blocks[number] for number in self.kv.take(num_blocks)]
        for block in blocks:
            assert (block.ref_cnt, block.block_hash) == (0, None), f"{block} is not free"
            block.ref_cnt = 1
            self.kv_bytes[:, block.block_id].zero_()
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.kv.revive(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        free: list[int] = []
        cold: list[int] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (free if block.block_hash is None else cold).append(block.block_id)
        self.kv.give(free)
        self.kv.give(cold, keep=True)

    def copy(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Have a block hold what another one does. Both are used."""
        self.kv_bytes[:, target.block_id].copy_(self.kv_bytes[:, source.block_id])

    def drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget these cold blocks: they are free. One that is used stays."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.kv.revive(block.block_id)
                self.kv.give([block.block_id])
                self._forget([block.block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached, and unmap it; False, with nothing done, while blocks are used.

        For new weights at the same addresses.
        """
        if self.kv.used:
            return False
        self.trim(0)
        return True

    def get_usage(self) -> float:
        total = self.kv.free + self.kv.cold + self.kv.used
        return self.kv.used / total if total else 0.0

    def _forget(self, blocks: Sequence[int]) -> None:
        """These blocks lost their content: no hash may lead to them."""
        self.evict_blocks(set(blocks))
        if self.on_lost is not None:
            self.on_lost(blocks)


class ParkedScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler whose requests are parked until a step names them."""

    max_num_scheduled_tokens: int
    need_mamba_block_aligned_split: bool
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Heads draft within the blocks that a step has anyway (`drafts.heads`).
        self.num_lookahead_tokens = 0
        placement = current_placement()
        manager = self.kv_cache_manager
        by_snapshots = not manager.enable_caching and can_be_kept(
            placement.tables, host_memory=placement.device.host_memory
        )
        # vLLM turns the cache off on CPUs where it is not supported; no block has a hash then.
        self.blocks = ElasticBlockPool(
            placement.pool,
            placement.kv_bytes,
            enable_caching=manager.enable_caching or by_snapshots,
            hash_block_size=hashed_tokens(placement.tables)
            if by_snapshots
            else manager.block_pool.hash_block_size,
        )
        coordinator = manager.coordinator
        for owner in (manager, coordinator, *coordinator.single_type_managers):
            # Assigning to a name that vLLM does not use would change nothing, silently.
            assert isinstance(owner.block_pool, BlockPool), f"{owner} has no block pool"
            owner.block_pool = self.blocks
        for single in coordinator.single_type_managers:
            assert single._null_block.is_null, f"{single} has no null block"
            single._null_block = self.blocks.null_block
        self._tables = list(zip(coordinator.single_type_managers, placement.tables, strict=True))
        for table, shape in self._tables:
            if shape.window:  # in whole blocks: it gives one back when another begins
                table.sliding_window = (shape.window - 1) * shape.block_tokens + 1
        self.snapshots: StateSnapshots | None = None
        self._snapshot: Sequence[KVCacheBlock] = ()
        """With which the request begins for which `fill` is to take blocks."""
        if by_snapshots:
            algorithm = self.cache_config.prefix_caching_hash_algo
            self.snapshots = StateSnapshots(self.blocks, self._tables, algorithm)
            assert not self.need_mamba_block_aligned_split, "vLLM keeps states itself"
            self.need_mamba_block_aligned_split = True

    @contextmanager
    def step_only(self, requests: Sequence[Request], tokens: int) -> Iterator[None]:
        """Within, a step schedules these requests and no other, and at most so many tokens: vLLM
        gives each what it lacks, in their order, until none is left."""
        most, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, tokens
        self.running = list(requests)
        try:
            yield
        finally:
            self.running = []
            self.max_num_scheduled_tokens = most

    def hold(
        self, request: Request, tokens: int, max_slabs: int, prompts: Sequence[Request] | None
    ) -> int:
        """Have blocks for a request that has none: for a prompt of `tokens` tokens next to others
        that have begun, or for a request all of whose tokens were computed elsewhere, if `prompts`
        is None. Cached blocks are its own from now on.

        Returns how many tokens are in cached blocks; that is never all of the request's, so there
        is always one to compute. The other blocks are provided, for `fill` to take. Raises
        `PoolExhausted` with no block given.
        """
        name, manager = request.request_id, self.kv_cache_manager
        hit = self._find(request, prompts is not None)
        cached = hit.tokens
        # First, because what is provided next must not be taken from the hits.
        manager.coordinator.allocate_new_computed_blocks(
            name, hit.blocks, hit.shared, num_external_computed_tokens=0
        )
        self.blocks.touch(hit.snapshot)
        try:
            if prompts is None:
                self.slide(request, tokens - 1)
                lacking = self._lacking(request, tokens, tokens)
            else:
                lacking = self._lacking(request, tokens, cached)
                lacking += self.needed((), [*prompts, request])
            self.blocks.provide(lacking, max_slabs)
        except BaseException:
            self.blocks.free_blocks(hit.snapshot)
            manager.free(request)
            raise
        self._snapshot = hit.snapshot
        return cached

    def _find(self, request: Request, is_prompt: bool) -> PrefixHit:
        """What is cached of a request; of one that was computed elsewhere, its state is not looked
        for."""
        if self.snapshots is not None:
            return self.snapshots.find(request, with_state=is_prompt)
        hits, cached, _ = self.kv_cache_manager.get_computed_blocks(request)
        return PrefixHit(hits.blocks, cached, int(cached))

    def fill(self, request: Request, tokens: int, computed: int) -> Tables:
        """Take what was provided for a request of `tokens` tokens, so many of which are `computed`;
        the blocks in each table, in their order. Places before a window have the null block."""
        name, pool = request.request_id, self.blocks
        for table, shape in self._tables:
            first, end = _span(shape, tokens, computed)
            if shape.window:
                blocks = table.req_to_blocks[name]
                blocks += [pool.null_block] * (first - len(blocks))
                for place in range(first, len(blocks)):
                    if blocks[place].is_null:
                        (blocks[place],) = pool.get_new_blocks(1)
            upto = end * shape.block_tokens if shape.window or shape.encoded else tokens
            table.allocate_new_blocks(name, upto, upto)
            table.take_new_block_ids()  # they are empty; a step would empty them again, when full
        if self.snapshots is not None:
            self.snapshots.restore(name, computed, self._snapshot)
            self._snapshot = ()
        return tuple(list(blocks) for blocks in self.kv_cache_manager.get_block_ids(name))

    def needed(self, growing: Sequence[Request], prompts: Iterable[Request] = ()) -> int:
        """How many blocks requests need more: those that are `growing`, for their next step, and
        `prompts` that have begun, to their ends. All give blocks back as their windows move on, but
        one that others have, too, is not free then."""
        given = Counter(
            table.req_to_blocks[request.request_id][place].block_id
            for request in growing
            for (table, _), gone in zip(
                self._tables, self._behind(request, request.num_computed_tokens), strict=True
            )
            for place in gone
        )
        taken: int = self.wanted(growing)
        for prompt in prompts:
            for table, shape in self._tables:
                if shape.window:
                    blocks = table.req_to_blocks.get(prompt.request_id, ())
                    # What it has behind this place it keeps, however far its window moves on.
                    last = shape.first_kept(prompt.num_tokens)
                    own = [block.block_id for block in blocks[:last] if not block.is_null]
                    given.update(own)
                    taken += len(own)
        freed = [self.blocks.blocks[block].ref_cnt == times for block, times in given.items()]
        return taken - int(sum(freed))

    def wanted(self, requests: Sequence[Request]) -> int:
        """How many blocks they take in their next step, once `slide` took what they give back."""
        return sum([self._lacking(r, r.num_tokens, r.num_computed_tokens) for r in requests])

    def _lacking(self, request: Request, tokens: int, computed: int) -> int:
        lacking = 0
        for table, shape in self._tables:
            blocks = table.req_to_blocks.get(request.request_id, ())
            first, end = _span(shape, tokens, computed)
            lacking += max(0, end - max(first, len(blocks)))
            if shape.window:
                lacking += sum([blocks[place].is_null for place in range(first, len(blocks))])
        return lacking

    def slide(self, request: Request, computed: int) -> list[range]:
        """Have a request give back, in each table, the blocks that no token needs which comes after
        so many `computed` ones: the places that are empty now."""
        gone = self._behind(request, computed)
        for (table, _), places in zip(self._tables, gone, strict=True):
            if places:
                table.remove_skipped_blocks(request.request_id, computed)
        return gone

    def _behind(self, request: Request, computed: int) -> list[range]:
        """The places with blocks that are behind the window of the token that comes next."""
        found = []
        for table, shape in self._tables:
            end = begin = 0
            if shape.window:
                blocks = table.req_to_blocks.get(request.request_id, ())
                begin = end = min(shape.first_kept(computed + 1), len(blocks))
                while begin and not blocks[begin - 1].is_null:
                    begin -= 1
            found.append(range(begin, end))
        return found

    def filled(self, request: Request, tokens: int) -> None:
        """The blocks of the first `tokens` tokens have their KV: others may share them."""
        self.kv_cache_manager.coordinator.cache_blocks(request, tokens)

    def reach(self, request: Request, tokens: int) -> int:
        """How many of `tokens` tokens that a request lacks a step computes, if it can: fewer where
        it has to end for a state."""
        stop = self.snapshots.stop(request) if self.snapshots is not None else 0
        return min(tokens, stop - request.num_computed_tokens) if stop else tokens

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        return self.reach(request, num_new_tokens)

    def withdraw(self, request: Request) -> None:
        """Take the blocks of a request whose step failed, or which could not begin; it is as if
        nothing had been computed.

        vLLM caches a block when it schedules its last token. What the failed step was to compute
        must not be found by others; what was computed before may be.
        """
        trusted = request.num_computed_tokens - request.num_in_flight_tokens
        for table, _ in self._tables:
            blocks = table.req_to_blocks.get(request.request_id, ())
            doubtful = blocks[trusted // table.block_size :]
            self.blocks.evict_blocks({block.block_id for block in doubtful})
        self.blocks.free_blocks(self._snapshot)
        self._snapshot = ()
        self.kv_cache_manager.free(request)
        self.encoder_cache_manager.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def has_blocks(self, request_id: str) -> bool:
        """Whether a request has any."""
        return any(table.req_to_blocks.get(request_id) for table, _ in self._tables)

    def holds(self, request_id: str, tokens: int) -> bool:
        """Whether a request has the blocks of so many tokens, no more and no less; asked for every
        request of a new batch. O(tables)."""
        for table, shape in self._tables:
            blocks, first = table.req_to_blocks.get(request_id, ()), shape.first_kept(tokens)
            if len(blocks) != first + shape.blocks(tokens):
                return False
            if first and not (blocks[first - 1].is_null and not blocks[first].is_null):
                return False
        return True

    def has_begun(self, request: Request) -> bool:
        """Whether a request has the blocks of a prompt that is being computed. O(tables)."""
        tokens, computed = request.num_tokens, request.num_computed_tokens
        for table, shape in self._tables:
            places = len(table.req_to_blocks.get(request.request_id, ()))
            if shape.window and not places * shape.block_tokens > computed:
                return False
            if not shape.window and places != shape.blocks(tokens):
                return False
        return True

    def held_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, table after table, each in token order. O(places)."""
        return [
            block
            for table, _ in self._tables
            for block in table.req_to_blocks.get(request_id, ())
            if not block.is_null
        ]

    def take_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """`held_blocks`; the request has none any more, and they stay in use."""
        blocks = self.held_blocks(request_id)
        for table, _ in self._tables:
            table.req_to_blocks.pop(request_id)
            table.num_cached_block.pop(request_id, None)
        return blocks

    def give_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks of `take_blocks`: the last first, as shared ones are at the front."""
        self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"vLLM would recompute {request.request_id}: blocks were promised")


def _span(shape: KvTable, tokens: int, computed: int) -> tuple[int, int]:
    """Where the blocks begin and end that a request of `tokens` tokens has in a table while so many
    are `computed`: for its next step, if it has one."""
    if computed < tokens:
        return shape.first_kept(computed + 1), shape.reach(tokens, computed)
    first = shape.first_kept(tokens)
    return first, first + shape.blocks(tokens)
