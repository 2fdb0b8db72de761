"""Models whose layers differ in the keys and values that they keep: the last layers may read those
of a layer before them, and layers that attend to all tokens may have other heads than those that
attend to a window (Gemma 3n and 4)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from appliance.checkpoints.model_config import CONFIG, MOST, ModelConfig
from appliance.checkpoints.safetensors import TensorEntry
from appliance.errors import CheckpointError

TWO_SIZES: Final = frozenset({"gemma4_text"})
"""Types whose layers that attend to all tokens have heads of their own."""
_GLOBAL_HEAD_DIM: Final = 512
"""What transformers takes where a file of these does not say it."""
_FULL: Final = "full_attention"
_KEYS: Final = ".k_proj.weight"
_VALUES: Final = ".v_proj.weight"
_KEPT: Final = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.")


class Heads(NamedTuple):
    """Heads for keys and values."""

    number: int
    size: int


def sharing_layers(config: ModelConfig) -> int:
    """How many of the last layers keep nothing, but read what a layer before them keeps. Raises
    `CheckpointError` if that leaves no layer."""
    shared = config.get("num_kv_shared_layers") or 0
    if not shared:
        return 0
    layers = config.integer("num_hidden_layers")
    if not isinstance(shared, int) or not 0 <= shared < layers:
        raise CheckpointError(
            f"{config.path / CONFIG}: num_kv_shared_layers is {shared!r}, of {layers} layers"
        )
    return shared


def is_of_sharing_layer(name: str, first: int) -> bool:
    """Whether a tensor is for keys and values of a layer that reads another one's, as those from
    number `first` on do: published files have some, and engines leave them out."""
    found = _KEPT.match(name)
    return found is not None and int(found[1]) >= first


def keys_as_values(config: ModelConfig, kept: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Of the tensors of a model that are kept, those of keys that are values as well, where a file
    has one tensor for both: an engine has two."""
    if not config.get("attention_k_eq_v"):
        return []
    names = {tensor.name for tensor in kept}
    return [
        tensor
        for tensor in kept
        if tensor.name.endswith(_KEYS) and tensor.name.removesuffix(_KEYS) + _VALUES not in names
    ]


def with_last_full(config: ModelConfig, kinds: list[str]) -> list[str]:
    """The kinds of layers as transformers takes them: the last one of Gemma 4 attends to all
    tokens, whatever the file says."""
    return [*kinds[:-1], _FULL] if config.model_type in TWO_SIZES else kinds


def heads_of_full_layers(config: ModelConfig, usual: Heads) -> Heads:
    """Of layers that attend to all tokens; `usual` are those of the others. Raises
    `CheckpointError` for layers of one kind that differ."""
    if config.model_type not in TWO_SIZES:
        return usual
    own = config.get("per_layer_config")
    if own is None:
        has_number = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")
        number = config.integer("num_global_key_value_heads") if has_number else usual.number
        return Heads(number, config.integer("global_head_dim", default=_GLOBAL_HEAD_DIM))
    if not isinstance(own, dict):
        raise CheckpointError(f"{config.path / CONFIG}: per_layer_config is no table of layers")
    found = {_heads(config, one, usual) for one in own.values()} or {usual}
    if len(found) > 1:
        raise CheckpointError(
            f"{config.path / CONFIG}: per_layer_config has heads of several sizes"
        )
    return found.pop()


def _heads(config: ModelConfig, own: Any, usual: Heads) -> Heads:
    """Of one layer."""
    if isinstance(own, dict):
        heads = Heads(own.get("num_key_value_heads", usual.number), own.get("head_dim", usual.size))
        if all(type(number) is int and 0 < number < MOST for number in heads):
            return heads
    raise CheckpointError(f"{config.path / CONFIG}: per_layer_config says of a layer {own!r}")
