"""Tokens that a checkpoint of Gemma 4 says are never produced, such as those that end an image."""

from __future__ import annotations

import json
from typing import Final

from appliance.checkpoints.model_config import ModelConfig
from appliance.errors import CheckpointError

_FILE: Final = "generation_config.json"
_FIELD: Final = "suppress_tokens"
_TYPES: Final = frozenset({"gemma4_text"})
"""Types of language models of which vLLM leaves such tokens out."""


def suppressed_tokens(config: ModelConfig) -> list[int]:
    """Their numbers; none of another type of model. Raises `CheckpointError` for a file that cannot
    be read, and for what is no token of the vocabulary."""
    file = config.path / _FILE
    if config.model_type not in _TYPES or not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    tokens = found.get(_FIELD)
    if tokens is None:
        return []
    vocabulary = config.integer("vocab_size")
    if not isinstance(tokens, list):
        raise CheckpointError(f"{file}: {_FIELD} is {tokens!r}, which is no list of tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise CheckpointError(
                f"{file}: {_FIELD} has {token!r}, which is none of {vocabulary} tokens"
            )
    return tokens
