"""Models whose layers differ in the keys and values that they keep: the last layers may read those
of a layer before them, and layers that attend to all tokens may have other heads than those that
attend to a window (Gemma 3n and 4, MiMo-V2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from appliance.checkpoints.architectures import mimo
from appliance.checkpoints.model_config import CONFIG, MOST, MOST_LAYERS, ModelConfig
from appliance.checkpoints.safetensors import TensorEntry
from appliance.checkpoints.windows import usual_period
from appliance.errors import CheckpointError

_GEMMA_4: Final = "gemma4_text"
TWO_SIZES: Final = frozenset({_GEMMA_4, mimo.MIMO})
"""Types whose layers that attend to all tokens have other heads than those with windows."""
_SHARING: Final = frozenset({_GEMMA_4, "gemma3n_text"})
"""Types whose last layers may read what others keep."""
UNEQUAL: Final = TWO_SIZES | _SHARING
"""These, and types whose last layers read what others keep."""
_GLOBAL_HEAD_DIM: Final = 512
"""What transformers takes where a file of these does not say it."""
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_OWN: Final = "per_layer_config"
_NUMBER: Final = "num_key_value_heads"
_SIZE: Final = "head_dim"
_DIGITS: Final = 9
"""No layer has a number as long."""
_KEYS: Final = ".k_proj.weight"
_VALUES: Final = ".v_proj.weight"
_KEPT: Final = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.")


class Heads(NamedTuple):
    """Heads for keys and values."""

    number: int
    size: int


def sharing_layers(config: ModelConfig) -> int:
    """How many of the last layers keep nothing, but read what a layer before them keeps. Raises
    `CheckpointError` if that leaves no layer, and for what transformers does not take."""
    shared = config.get("num_kv_shared_layers")
    if shared is None:
        if config.model_type in _SHARING:  # transformers has a number where the file has no key
            raise CheckpointError(
                f"{config.path / CONFIG}: num_kv_shared_layers is null; write a number, or take "
                "the file as it was published"
            )
        return 0
    layers = config.integer("num_hidden_layers")
    if type(shared) is not int or not 0 <= shared < layers:
        raise CheckpointError(
            f"{config.path / CONFIG}: num_kv_shared_layers is {shared!r}, of {layers} layers"
        )
    return shared


def kept_kinds(config: ModelConfig, listed: list[str] | None, layers: int) -> list[str] | None:
    """The kinds of those of a model's `layers` that keep keys and values of their own, if the file
    has `listed` all kinds or its type says them. Raises `CheckpointError` for kinds that are not
    known of each layer, and for layers that read another one than vLLM has them read."""
    first = layers - sharing_layers(config)
    if config.model_type in UNEQUAL:
        listed = _all_kinds(config, listed, layers)
        _check_sharing(config, listed, first)
    return listed[:first] if listed else None


def _all_kinds(config: ModelConfig, listed: list[str] | None, layers: int) -> list[str]:
    """As transformers takes them: the last layer of Gemma 4 attends to all tokens, whatever the
    file says."""
    if config.model_type == mimo.MIMO:
        listed = mimo.kinds(config, layers)
    if listed is None:
        period = usual_period(config.model_type)
        numbers = range(1, min(layers, MOST_LAYERS) + 1)
        listed = [_SLIDING if number % period else _FULL for number in numbers]
    if len(listed) != layers or not {_FULL, _SLIDING}.issuperset(listed):
        raise CheckpointError(
            f"{config.path / CONFIG}: layer_types must say {_FULL} or {_SLIDING} of each of "
            f"{layers} layers"
        )
    return [*listed[:-1], _FULL] if config.model_type == _GEMMA_4 else listed


def _check_sharing(config: ModelConfig, kinds: list[str], first: int) -> None:
    """Raise `CheckpointError` unless the last layer of its kind that keeps something is where vLLM
    looks for it, for each layer from number `first` on. In Gemma 3n it looks in two places."""
    if first == len(kinds):
        return
    if config.model_type in TWO_SIZES:
        right = set(kinds[first:]).issubset(kinds[:first])
        wanted = "a layer of each kind that is among the last ones"
    else:
        right = kinds[max(0, first - 2) : first] == [_SLIDING, _FULL]
        wanted = f"{_SLIDING} and then {_FULL} at their end"
    if not right:
        raise CheckpointError(
            f"{config.path / CONFIG}: the last {len(kinds) - first} layers (num_kv_shared_layers) "
            f"read what those before them keep, which must have {wanted}"
        )


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


def heads_of_kinds(
    config: ModelConfig, usual: Heads, kept: Sequence[str] | None, layers: int
) -> tuple[Heads, Heads]:
    """Of layers that attend to all tokens, and of those that attend to a window. `kept` are the
    kinds of those of all `layers` that keep something. Raises `CheckpointError` for layers of one
    kind that differ."""
    if config.model_type not in TWO_SIZES or kept is None:
        return usual, usual
    if config.model_type == mimo.MIMO:  # values are padded to the size of keys
        number = config.integer("swa_num_key_value_heads")
        return usual, Heads(number, config.integer("swa_head_dim"))
    if _OWN not in config.text:
        has_number = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")
        number = config.integer("num_global_key_value_heads") if has_number else usual.number
        size = config.integer("global_head_dim", default=_GLOBAL_HEAD_DIM)
        return Heads(number, size), usual
    own = _own_heads(config, usual, layers)
    full, sliding = (
        {own.get(number, usual) for number, found in enumerate(kept) if found == kind}
        for kind in (_FULL, _SLIDING)
    )
    if max(len(full), len(sliding)) > 1:
        raise CheckpointError(f"{config.path / CONFIG}: {_OWN} has heads of several sizes")
    (of_full,), (in_window,) = full or sliding, sliding or full
    return of_full, in_window


def _own_heads(config: ModelConfig, usual: Heads, layers: int) -> dict[int, Heads]:
    """By number, of layers of which the file has a table of their own. If it says null, there are
    none, and transformers does not look at the keys for full layers either."""
    own = config.text[_OWN]
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{config.path / CONFIG}: {_OWN} is no table of layers")
    found = {}
    for key, values in own.items():
        if not (key.isascii() and key.isdecimal() and len(key) < _DIGITS and int(key) < layers):
            raise CheckpointError(f"{config.path / CONFIG}: {_OWN} has {key!r}, of {layers} layers")
        found[int(key)] = _heads(config, values, usual)
    return found


def _heads(config: ModelConfig, own: Any, usual: Heads) -> Heads:
    """Of one layer."""
    if isinstance(own, dict) and own.keys() <= {_NUMBER, _SIZE}:
        heads = Heads(own.get(_NUMBER, usual.number), own.get(_SIZE, usual.size))
        if all(type(number) is int and 0 < number < MOST for number in heads):
            return heads
    raise CheckpointError(
        f"{config.path / CONFIG}: {_OWN} says of a layer {own!r}, not {_NUMBER} and {_SIZE}"
    )
