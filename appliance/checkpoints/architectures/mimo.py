"""MiMo-V2: which layers attend to a window, how large the heads of either kind are, and what its
``config.json`` must say. Layers with windows have heads for keys and values of their own.

vLLM reads keys that transformers has not, or has defaults for; it takes other settings for granted.
"""

from __future__ import annotations

from typing import Any, Final

from appliance.checkpoints.model_config import ANOTHER, CONFIG, ModelConfig
from appliance.errors import CheckpointError

MIMO: Final = "mimo_v2_flash"
"""Its type."""
WINDOW: Final = "sliding_window_size"
"""The key for the length of a window that vLLM reads."""
_KINDS: Final = "hybrid_layer_pattern"
_EXPERTS: Final = "moe_layer_freq"
_NEEDED: Final = (
    _KINDS,
    _EXPERTS,
    "layernorm_epsilon",
    "partial_rotary_factor",
    "rope_theta",
    "swa_rope_theta",
    WINDOW,
    "v_head_dim",
    "swa_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_v_head_dim",
)
"""Keys that vLLM needs, or would take a default for that is of no published model."""
_COMPUTED: Final[dict[str, tuple[Any, ...]]] = {
    "add_full_attention_sink_bias": (None, False),
    "n_shared_experts": (None, 0),
    "routed_scaling_factor": (None, 1.0),
    "scoring_func": (None, "sigmoid"),
}
"""Keys with the values that vLLM computes, whatever the file says."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def what_lacks(config: ModelConfig) -> tuple[str, str] | None:
    """What is wrong with a file of this type, and the remedy. Raises `CheckpointError` for a size
    that is no positive integer."""
    if config.model_type != MIMO:
        return None
    name = config.architecture
    for key in _NEEDED:
        if config.text.get(key) is None:
            return f"config.json has no {key}, which vLLM needs for {name}", f"add {key}"
    for key, values in _COMPUTED.items():
        found = config.text.get(key)
        if found not in values:
            return f"vLLM does not compute {name} with {key} = {found!r}", ANOTHER
    if not isinstance(config.text[_EXPERTS], list):  # vLLM would build no layer with experts
        return f"{_EXPERTS} is no list that says of each layer whether it has experts", ANOTHER
    window, other = config.integer(WINDOW), config.text.get("sliding_window")
    if other not in (None, window):
        return (
            f"sliding_window is {other!r} and {WINDOW} is {window!r}: vLLM reads the second only",
            "have both say how many tokens a window has",
        )
    for long, short in (("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim")):
        if config.integer(short) > config.integer(long):
            return f"values ({short}) are longer than keys ({long})", ANOTHER
    return None


def kinds(config: ModelConfig, layers: int) -> list[str]:
    """What each of so many layers attends to. Raises `CheckpointError` if the file does not say."""
    found = config.text.get(_KINDS)
    if (
        not isinstance(found, list)
        or len(found) < layers
        or any(one not in (0, 1) for one in found)
    ):
        raise CheckpointError(
            f"{config.path / CONFIG}: {_KINDS} must say 0 or 1 of each of {layers} layers"
        )
    return [_SLIDING if one else _FULL for one in found[:layers]]
