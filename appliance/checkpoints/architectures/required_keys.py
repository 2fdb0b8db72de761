"""Keys that ``config.json`` of some types must have: vLLM computes these models with one value of
a key only, or what layers keep of a request follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from appliance.checkpoints.model_config import ANOTHER, ModelConfig

_VALUES: Final[Mapping[str, Mapping[str, bool]]] = {
    "bloom": {"tie_word_embeddings": True},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}
"""By type, what vLLM's code takes for granted. transformers takes a key that is left out as false,
but for embeddings of BLOOM."""
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "lfm2_moe": ("layer_types",),
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size"),
    "zamba2": ("layers_block_type", "n_mamba_heads"),
}
"""By type, keys without which layers would be taken for those of another kind of model.
transformers has defaults for them: those of one published model."""


def what_lacks(config: ModelConfig) -> tuple[str, str] | None:
    """What is wrong with such a key of the file, and the remedy."""
    name = config.architecture
    for key, needed in _VALUES.get(config.model_type, {}).items():
        if bool(config.get(key)) != needed:
            return (
                f"vLLM computes {name} with {key} = {str(needed).lower()} only, which config.json "
                "does not have",
                ANOTHER,
            )
    for key in _SIZES.get(config.model_type, ()):
        if config.get(key) is None:
            return (
                f"config.json has no {key}, from which follows what layers of {name} keep",
                f"add {key} as the model was trained with",
            )
    return None
