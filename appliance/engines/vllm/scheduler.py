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

from appliance.engines.vllm.placement import current_placement
from appliance.memory.kvpool import KvPool


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's block objects, handed out as `KvPool` says, and empty. There is no prefix cache.

    Attention multiplies whole blocks, and what lies behind a request's last token with zero. In
    memory that was others' there are bytes that this does not make zero: NaN and infinity.
    """

    def __init__(self, pool: KvPool, kv_bytes: torch.Tensor) -> None:
        super().__init__(pool.geometry.blocks, enable_caching=False, hash_block_size=1)
        self.kv = pool
        self._kv_bytes = kv_bytes  # [layers, blocks, bytes]

    def get_num_free_blocks(self) -> int:
        return self.kv.free

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = [self.blocks[number] for number in self.kv.take(num_blocks)]
        for block in blocks:
            block.ref_cnt += 1
            self._kv_bytes[:, block.block_id].zero_()
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt -= 1
        self.kv.give(block.block_id for block in blocks)

    def get_usage(self) -> float:
        total = self.kv.free + self.kv.used
        return self.kv.used / total if total else 0.0

    def touch(self, blocks: Sequence[KVCacheBlock]) -> NoReturn:
        raise NotImplementedError("blocks are not shared: there is no prefix cache")


class ParkedScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler whose requests are parked until a step names them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        placement = current_placement()
        blocks = ElasticBlockPool(placement.pool, placement.kv_bytes)
        manager = self.kv_cache_manager
        coordinator = manager.coordinator
        for owner in (manager, coordinator, *coordinator.single_type_managers):
            # Assigning to a name that vLLM does not use would change nothing, silently.
            assert isinstance(owner.block_pool, BlockPool), f"{owner} has no block pool"
            owner.block_pool = blocks
        for single in coordinator.single_type_managers:
            assert single._null_block.is_null, f"{single} has no null block"
            single._null_block = blocks.null_block

    @contextmanager
    def step_only(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within, a step schedules these requests and no other."""
        self.running = list(requests)
        try:
            yield
        finally:
            self.running = []

    def blocks_held(self, request_id: str) -> int:
        """How many blocks a request has; asked for every request of every step."""
        (single,) = self.kv_cache_manager.coordinator.single_type_managers
        return len(single.req_to_blocks.get(request_id, ()))

    def take_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, in token order; it has none any more, and they stay in use."""
        (single,) = self.kv_cache_manager.coordinator.single_type_managers
        blocks: list[KVCacheBlock] = single.req_to_blocks.pop(request_id)
        single.num_cached_block.pop(request_id, None)
        return blocks

    def give_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks of `take_blocks`: the last first, as who shares them needs the first."""
        self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"vLLM would recompute {request.request_id}: blocks were promised")
