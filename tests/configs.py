"""Configurations of published models (`model_configs.json`: shapes and flags from their public
documentation), and which of them are refused, with words of the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CONFIGS: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("model_configs.json").read_text()
)
"""By name."""

NOT_ON_CPU: Final = {
    "falcon-mamba-7b": r"no kernel on CPUs for Mamba 1 \(selective_scan_fwd\)",
    "jamba-v0.1": r"no kernel on CPUs for Mamba 1 \(selective_scan_fwd\)",
    "kimi-linear-48b-a3b": "no kernel on CPUs for Kimi Delta Attention",
    "mamba-2.8b-hf": r"no kernel on CPUs for Mamba 1 \(selective_scan_fwd\)",
    "step-3.5-flash-bf16": "swiglu_limits.*no kernel on CPUs",
}
"""Refused on the CPU only, with words of the reason."""

REFUSED: Final = {
    "bamba-9b-v2": "BambaForCausalLM any more: 0.23.0 was the last",
    "minimax-text-01": "MiniMaxText01ForCausalLM any more: 0.23.0 was the last",
    "plamo-2-8b": "Plamo2ForCausalLM any more: 0.26.0 was the last",
    "dbrx-instruct": "experts that vLLM 0.32 does not load",
    "longcat-flash-chat": "attends twice in each layer",
    "dots.llm1.inst": "Dots1ForCausalLM any more: 0.23.0 was the last",
    "internlm3-8b-instruct": "only be read with code",
    "ling-mini-2.0": "only be read with code",
    "llama-3.3-nemotron-super-49b-v1": "only be read with code",
    "mpt-7b": "MPTForCausalLM any more: 0.28.0 was the last",
    "persimmon-8b-chat": "PersimmonForCausalLM any more: 0.25.0 was the last",
    "solar-pro-preview-instruct": "only be read with code",
    "exaone-3.5-7.8b": "only be read with code",
    "internlm2-chat-7b": "only be read with code",
    "mistral-7b-instruct-v0.3-quantized.w8a16": "no kernel on CPUs that multiplies 8 bits",
    "llama-3.1-8b-bnb-4bit": "quantized",
    "qwen2.5-omni-7b": "reads images and sound, which is not supported yet; no test",
    "granite-speech-3.3-8b": "ConditionalGeneration reads sound, which is not supported yet",
    "jina-embeddings-v2-base-en": "no architecture",
    "modernbert-base": "no architecture",
    "all-mpnet-base-v2": "no architecture",
    "jina-reranker-v3": "not computed here",
}
"""By name, words of the reason."""

_MLA: Final[dict[str, Any]] = {
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}
SPARSE: Final[dict[str, dict[str, Any]]] = {
    "deepseek-v3.2-bf16": {
        **_MLA,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "index_n_heads": 64,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "glm-5": {
        **_MLA,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}
"""Models that choose which tokens to read, by name: shapes and flags of the published files, but
for their weights in 8 bits."""
