"""What a ``config.json`` has to say of Mistral Large 3 (`MistralLarge3ForCausalLM`).

It is published in Mistral's own format. vLLM computes it as a DeepSeek V3 whose queries are scaled
by their position, from a file that says what vLLM makes of Mistral's (``params.json``).
Transformers reads such a file as DeepSeek's, and would take its values for what is left out.
"""

from __future__ import annotations

import math
from typing import Final

from appliance.checkpoints.model_config import ANOTHER, ModelConfig

ARCHITECTURE: Final = "MistralLarge3ForCausalLM"

_TYPE: Final = "deepseek_v3"
_SCALING: Final = "llama_4_scaling"
_OF_TRANSFORMERS: Final = "llama_4_scaling_beta"
"""How transformers says it of Mistral 4, within `rope_parameters`: vLLM does not read it there."""
_NEEDED: Final = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "scoring_func"),
    "max_position_embeddings",
)


def what_lacks(config: ModelConfig) -> tuple[str, str] | None:
    """What is wrong with such a file, and the remedy."""
    rope = config.first("rope_parameters", "rope_scaling")
    moved = isinstance(rope, dict) and _OF_TRANSFORMERS in rope
    if moved and config.model_type == _TYPE and config.get(_SCALING) is None:
        return f"it has {_OF_TRANSFORMERS}, which vLLM reads as {_SCALING} only", _remedy()
    if config.architecture != ARCHITECTURE:
        return None
    if config.model_type != _TYPE:
        return f"{ARCHITECTURE} has the type {config.model_type!r}: only {_TYPE} is served", ANOTHER
    for key in _NEEDED:
        if key not in config.whole:
            return (
                f"config.json has no {key}, for which DeepSeek V3's would be taken",
                f"add {key} as the model was trained with",
            )
    said = config.get(_SCALING)
    values = said if isinstance(said, dict) else {}
    if not all(
        _is_positive(values.get(key)) for key in ("original_max_position_embeddings", "beta")
    ):
        return f"{_SCALING} is {said!r}, by which queries of {ARCHITECTURE} are scaled", _remedy()
    return None


def _remedy() -> str:
    return f'add "{_SCALING}" with original_max_position_embeddings and beta, as params.json has it'


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
