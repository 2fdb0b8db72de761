"""What Ollama's clients are shown of a checkpoint's files: its template, sampling and shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.parsers.templates import chat_template
from appliance.errors import CheckpointError

_SAMPLING: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Ollama's names, by those of ``generation_config.json``."""

_SHAPE: Final = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""Ollama's names, by those of ``config.json``."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """In Ollama's words; what the files do not tell is left out."""

    template: str = ""
    """The chat template, as Jinja; Ollama's are Go's."""
    sampling: dict[str, float] = {}
    shape: dict[str, int] = {}


def read_checkpoint(folder: str) -> Checkpoint:
    """What is found in `folder`. Files that are missing or damaged tell nothing: what is shown of
    them must not keep a client from a model that is served."""
    path = Path(folder)
    generation = _read(path / "generation_config.json")
    return Checkpoint(
        template=chat_template(path),
        sampling={
            name: generation[key]
            for key, name in _SAMPLING.items()
            if isinstance(generation.get(key), int | float)
        },
        shape=_shape(path),
    )


def _shape(path: Path) -> dict[str, int]:
    """Of the language model, where the checkpoint has others, too."""
    try:
        config = read_model_config(path)
    except (CheckpointError, OSError, UnicodeDecodeError):
        return {}
    found = {name: config.get(key) for key, name in _SHAPE.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
