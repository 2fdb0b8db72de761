"""What the adapter relies on inside vLLM, checked when an engine is built.

One exact version: the adapter writes into objects that vLLM does not call public.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

VERSION: Final = "0.32.0"

SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (EngineCore.__init__, ("vllm_config", "executor_class", "log_stats")),
    (EngineCore.step, ()),
    (Scheduler._preempt_request, ("request",)),
    (Scheduler.finish_requests, ("request_ids", "finished_status")),
    (KVCacheManager.free, ("request",)),
    (KVCacheCoordinator.allocate_new_blocks, ("request_id", "num_tokens", "num_tokens_main_model")),
    (BlockPool.__init__, ("num_gpu_blocks", "enable_caching", "hash_block_size")),
    (BlockPool.get_new_blocks, ("num_blocks",)),
    (BlockPool.free_blocks, ("ordered_blocks",)),
    (BlockPool.get_num_free_blocks, ()),
    (InputBatch.remove_request, ("req_id",)),
    # Of the classes that the CPU's are made from: to import those would spoil torch for a GPU.
    (Worker.load_model, ("load_dummy_weights",)),
    (Worker.determine_available_memory, ()),
    (Worker._maybe_get_memory_pool_context, ("tag",)),
    (GPUModelRunner.get_kv_cache_spec, ()),
    (
        CachedRequestState.__init__,
        (
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "generator",
            "block_ids",
            "num_computed_tokens",
            "output_token_ids",
        ),
    ),
)


class SeamMoved(RuntimeError):
    """This vLLM, or its torch, is not the one that the adapter was written for."""


def check_seams() -> None:
    """Raise `SeamMoved` unless vLLM has the version and the signatures relied on."""
    if vllm.__version__ != VERSION:
        raise SeamMoved(f"vLLM is {vllm.__version__}, the adapter is for {VERSION}")
    for function, expected in SIGNATURES:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        if tuple(names[: len(expected)]) != expected:
            raise SeamMoved(f"{function.__qualname__} takes {names}, not {expected}")
