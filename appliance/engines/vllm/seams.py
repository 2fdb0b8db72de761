"""What the adapter relies on inside vLLM, checked when an engine is built.

One exact version: the adapter writes into objects that vLLM does not call public.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import vllm
from vllm import PoolingParams
from vllm.config import ModelConfig
from vllm.distributed import parallel_state
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.pooler.seqwise.methods import MeanPool
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import adapters
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.pool.metadata import PoolingStates
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from appliance.engines.vllm.layers import (
    heads,
    layer_scalars,
    per_layer,
    rotary,
    suppressed_tokens,
)

VERSION: Final = "0.32.0"

Signatures = tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]
"""Functions of vLLM, each with the names of its first parameters."""

SIGNATURES: Final[Signatures] = (
    (EngineCore.__init__, ("vllm_config", "executor_class", "log_stats")),
    (EngineCore.step, ()),
    (Scheduler._preempt_request, ("request",)),
    (Scheduler.finish_requests, ("request_ids", "finished_status")),
    (Scheduler._mamba_block_aligned_split, ("request", "num_new_tokens")),
    (
        FullAttentionManager.find_longest_cache_hit,
        (
            "block_hashes",
            "max_length",
            "kv_cache_group_ids",
            "block_pool",
            "kv_cache_spec",
            "drop_eagle_block",
            "alignment_tokens",
        ),
    ),
    (BlockPool.get_cached_block, ("block_hash", "kv_cache_group_ids")),
    (
        BlockPool.cache_full_blocks,
        (
            "request",
            "blocks",
            "num_cached_blocks",
            "num_full_blocks",
            "block_size",
            "kv_cache_group_id",
        ),
    ),
    (KVCacheManager.free, ("request",)),
    (KVCacheManager.get_computed_blocks, ("request",)),
    (KVCacheManager.get_block_ids, ("request_id",)),
    (KVCacheCoordinator.cache_blocks, ("request", "num_computed_tokens")),
    (KVCacheCoordinator.allocate_new_blocks, ("request_id", "num_tokens", "num_tokens_main_model")),
    (
        KVCacheCoordinator.allocate_new_computed_blocks,
        (
            "request_id",
            "new_computed_blocks",
            "num_local_computed_tokens",
            "num_external_computed_tokens",
        ),
    ),
    (get_kv_cache_groups, ("vllm_config", "kv_cache_spec")),
    (SingleTypeKVCacheManager.take_new_block_ids, ()),
    (BlockPool.__init__, ("num_gpu_blocks", "enable_caching", "hash_block_size")),
    (BlockPool.get_new_blocks, ("num_blocks",)),
    (BlockPool.free_blocks, ("ordered_blocks",)),
    (BlockPool.get_num_free_blocks, ()),
    (BlockPool.touch, ("blocks",)),
    (BlockPool.evict_blocks, ("block_ids",)),
    (BlockPool.reset_prefix_cache, ()),
    (InputBatch.remove_request, ("req_id",)),
    # Of the classes that the CPU's are made from: to import those would spoil torch for a GPU.
    (Worker.load_model, ("load_dummy_weights",)),
    (Worker.determine_available_memory, ()),
    (Worker._maybe_get_memory_pool_context, ("tag",)),
    (GPUModelRunner.get_kv_cache_spec, ()),
    (register_model_loader, ("load_format",)),
    (BaseModelLoader.load_weights, ("model", "model_config")),
    (BaseModelLoader.download_model, ("model_config",)),
    (heads.of_vllm, ("lm_head", "hidden_states")),
    (per_layer.of_vllm, ("input_ids", "positions", "per_layer_inputs")),
    (layer_scalars.of_vllm, ("config", "cache_config", "quant_config", "prefix")),
    (suppressed_tokens.init_of_vllm, ("vllm_config", "prefix")),
    (suppressed_tokens.logits_of_vllm, ("hidden_states",)),
    (QuantizeMethodBase.process_weights_after_loading, ("layer",)),
    (rotary.of_vllm, ("positions", "query", "key")),
    (PoolingParams.verify, ("model_config",)),
    (MeanPool.forward, ("hidden_states", "pooling_metadata")),
    (PoolingStates.clean, ()),
    (LoRAModelManager._create_lora_modules, ()),
    (BaseLinearLayerWithLoRA._apply_lora_to_output, ("x", "output")),
    (
        LoRAModelRunnerMixin._set_active_loras,
        ("prompt_lora_mapping", "token_lora_mapping", "lora_requests", "mapping_type"),
    ),
    (create_custom_proposer, ("vllm_config",)),
    (EagleProposer.__init__, ("vllm_config", "device", "runner")),
    (
        EagleProposer._update_positions_dependent_metadata,
        (
            "positions",
            "common_attn_metadata",
            "batch_size",
            "input_batch_size",
            "block_size",
        ),
    ),
    (EagleProposer._maybe_share_embeddings, ("target_language_model",)),
    (EagleProposer._maybe_share_lm_head, ("target_language_model",)),
    (GPUModelRunner.take_draft_token_ids, ()),
    (
        RejectionSampler.forward,
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    (Sampler.forward, ("logits", "sampling_metadata", "predict_bonus_token")),
    (adapters._load_dense_weights, ("linear", "folder", "model_config")),
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


def check_signatures(signatures: Signatures) -> None:
    """Raise `SeamMoved` for a function whose first parameters are not those relied on."""
    for function, expected in signatures:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        if tuple(names[: len(expected)]) != expected:
            raise SeamMoved(f"{function.__qualname__} takes {names}, not {expected}")


def check_seams() -> None:
    """Raise `SeamMoved` unless vLLM has the version, signatures and fields relied on."""
    if vllm.__version__ != VERSION:
        raise SeamMoved(f"vLLM is {vllm.__version__}, the adapter is for {VERSION}")
    check_signatures(SIGNATURES)
    if not hasattr(parallel_state, "_EP"):
        raise SeamMoved("vLLM does not keep its group of ranks for experts any more")
    if not hasattr(ModelConfig, "word_embeddings_untied_by_checkpoint"):
        raise SeamMoved("ModelConfig does not say any more whether a checkpoint unties the head")
    if not hasattr(ModelConfig, "is_chunked_prefill_supported"):
        raise SeamMoved("ModelConfig does not say any more whether a prompt may come in chunks")
