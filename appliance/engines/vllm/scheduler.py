"""vLLM's scheduler, reduced to what is asked of it: step these requests, within these blocks.

Requests never wait in vLLM's queues. All that are known lie in `Scheduler.requests`; those of the
step are put in `running` by `step_only`, and nothing is left there afterwards. Blocks are the
engine's to provide before a step, so vLLM never has a reason to preempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from appliance.engines.vllm.kv.placement import current_placement
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
        self._kv_bytes = kv_bytes  # [layers, blocks, bytes]

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
            self._kv_bytes[:, block.block_id].zero_()
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
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (free if block.block_hash is None else cold).append(block.block_id)
        self.kv.give(free)
        self.kv.give(cold, keep=True)

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

    def _forget(self, blocks: Iterable[int]) -> None:
        """These blocks lost their content: no hash may lead to them."""
        self.evict_blocks(set(blocks))


class ParkedScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler whose requests are parked until a step names them."""

    max_num_scheduled_tokens: int
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        placement = current_placement()
        manager = self.kv_cache_manager
        # vLLM turns the cache off on CPUs where it is not supported; no block has a hash then.
        self.blocks = ElasticBlockPool(
            placement.pool,
            placement.kv_bytes,
            enable_caching=manager.enable_caching,
            hash_block_size=manager.block_pool.hash_block_size,
        )
        coordinator = manager.coordinator
        for owner in (manager, coordinator, *coordinator.single_type_managers):
            # Assigning to a name that vLLM does not use would change nothing, silently.
            assert isinstance(owner.block_pool, BlockPool), f"{owner} has no block pool"
            owner.block_pool = self.blocks
        for single in coordinator.single_type_managers:
            assert single._null_block.is_null, f"{single} has no null block"
            single._null_block = self.blocks.null_block
        self._tables = coordinator.single_type_managers
        self._shapes = placement.tables

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

    def hold(self, request: Request, tokens: int, max_slabs: int) -> int:
        """Give a request that has none the blocks of its first `tokens` tokens, cached ones first.

        Returns how many tokens are in cached blocks; that is never all of the request's, so there
        is always one to compute. The other blocks are provided, for `fill` to take. Raises
        `PoolExhausted` with no block given.
        """
        manager = self.kv_cache_manager
        hits, cached, _ = manager.get_computed_blocks(request)
        # First, because what is provided next must not be taken from the hits.
        manager.coordinator.allocate_new_computed_blocks(
            request.request_id, hits.blocks, cached, num_external_computed_tokens=0
        )
        try:
            lacking = sum(shape.blocks(tokens) for shape in self._shapes)
            self.blocks.provide(lacking - sum(map(len, hits.blocks)), max_slabs)
        except BaseException:
            manager.free(request)
            raise
        return int(cached)

    def fill(self, request: Request, tokens: int) -> Tables:
        """Take what `hold` provided; in each table the blocks of the first `tokens` tokens, in
        their order."""
        manager = self.kv_cache_manager
        manager.coordinator.allocate_new_blocks(request.request_id, tokens, tokens)
        for table in self._tables:
            table.take_new_block_ids()  # they are empty; a step would empty them again, when full
        return tuple(list(blocks) for blocks in manager.get_block_ids(request.request_id))

    def filled(self, request: Request, tokens: int) -> None:
        """The blocks of the first `tokens` tokens have their KV: others may share them."""
        self.kv_cache_manager.cache_blocks(request, tokens)

    def withdraw(self, request: Request) -> None:
        """Take the blocks of a request whose step failed; it is as if nothing had been computed.

        vLLM caches a block when it schedules its last token. What the failed step was to compute
        must not be found by others; what was computed before may be.
        """
        trusted = request.num_computed_tokens - request.num_in_flight_tokens
        for table in self._tables:
            blocks = table.req_to_blocks.get(request.request_id, ())
            doubtful = blocks[trusted // table.block_size :]
            self.blocks.evict_blocks({block.block_id for block in doubtful})
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def blocks_held(self, request_id: str) -> int:
        """How many blocks a request has; asked for every request of every step. O(tables)."""
        return sum([len(table.req_to_blocks.get(request_id, ())) for table in self._tables])

    def take_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, table after table, each in token order; it has none any more, and
        they stay in use."""
        blocks: list[KVCacheBlock] = []
        for table in self._tables:
            blocks += table.req_to_blocks.pop(request_id)
            table.num_cached_block.pop(request_id, None)
        return blocks

    def give_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks of `take_blocks`: the last first, as shared ones are at the front."""
        self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"vLLM would recompute {request.request_id}: blocks were promised")
