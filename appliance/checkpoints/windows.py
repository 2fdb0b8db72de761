"""Layers that attend to a window of their context: how long it is, which they are, and what a
request keeps for them.

Such a layer keeps the last tokens of a request only. `config.json` says which layers do, or leaves
it to the defaults of the model's type.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from appliance.checkpoints.architectures.mimo import MIMO, WINDOW
from appliance.checkpoints.model_config import ModelConfig

STEP_TOKENS: Final = 2048
"""Tokens of prompts that an engine computes in a step, at most."""


class Windowed(NamedTuple):
    """Layers that attend to a window."""

    layers: int
    window: int
    """In tokens, with the one that attends."""


def window_blocks(window: int, block_tokens: int) -> int:
    """The most blocks that layers which attend to `window` tokens need of a request: those of the
    tokens before the next one in its window, wherever blocks begin, and that of the next."""
    return -(-(window - 1) // block_tokens) + 1


def windowed(config: ModelConfig, layers: int, kinds: list[str] | None) -> Windowed:
    """Which of a model's `layers` attend to a window; `kinds` is what the file says that each is.
    Where that is not known, all do, as what is said of a model's size is said to be the least."""
    type_ = config.model_type
    if type_ in CHUNKED:
        return _chunked(config, layers)
    usual = _TYPES.get(type_, _Usual())
    key = WINDOW if type_ == MIMO else "sliding_window"
    length = config.text.get(key, usual.window)
    switch = config.get("use_sliding_window")
    if switch is False or (switch is None and type_ in _SWITCHED):
        return Windowed(0, 0)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        return Windowed(0, 0)
    length += type_ == "cohere2"  # there the token itself is not counted
    if kinds:
        return Windowed(kinds[:layers].count("sliding_attention"), length)
    pattern = config.first("sliding_window_pattern", "_sliding_window_pattern") or usual.period
    if isinstance(pattern, str) and pattern:
        return Windowed(sum(pattern[i % len(pattern)] == "L" for i in range(layers)), length)
    full = layers // pattern if isinstance(pattern, int) and pattern > 0 else 0
    return Windowed(layers - full, length)


def usual_period(type_: str) -> int:
    """One in so many layers attends to all tokens, if a file of this type does not say which do."""
    return _TYPES[type_].period


def _chunked(config: ModelConfig, layers: int) -> Windowed:
    """Layers that attend to chunks keep a window as long as one: those with rotary embeddings."""
    length = config.text.get("attention_chunk_size", _CHUNK)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        return Windowed(0, 0)
    rotates = config.get("no_rope_layers")
    if isinstance(rotates, list) and rotates:  # which says of each layer whether it does
        return Windowed(sum(bool(one) for one in rotates[:layers]), length)
    interval = config.get("no_rope_layer_interval")
    interval = interval if isinstance(interval, int) and interval > 0 else _ROTATED
    return Windowed(layers - layers // interval, length)


CHUNKED: Final = frozenset({"llama4_text"})
"""Types of which layers attend to chunks of their context."""
CHUNK_MULTIPLE: Final = 32
"""Tokens that a chunk is to be a multiple of: those of a block of KV."""
_CHUNK: Final = 8192
_ROTATED: Final = 4
"""One in so many layers has no rotary embeddings, and attends to all tokens."""


class _Usual(NamedTuple):
    """What transformers takes where a file does not say it."""

    period: int = 0
    """One in so many layers attends to all tokens; none, if 0."""
    window: int | None = None


_TYPES: Final = {
    "afmoe": _Usual(4, 1024),
    "cohere2": _Usual(4, 4096),
    "cwm": _Usual(4, 8192),
    "exaone4": _Usual(4, 4096),
    "exaone_moe": _Usual(4, 4096),
    "gemma2": _Usual(2, 4096),
    "gemma3_text": _Usual(6, 4096),
    "gemma3n_text": _Usual(5, 512),
    "gemma4_text": _Usual(6, 512),
    "gpt_oss": _Usual(2, 128),
    "ministral": _Usual(0, 4096),
    "mistral": _Usual(0, 4096),
    "olmo3": _Usual(4, 4096),
}
_SWITCHED: Final = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
"""Types whose layers have windows only if the file says `use_sliding_window`."""
