"""Models that make text of sound: an encoder reads the sound, and a decoder attends to what it made
of it (cross attention) while it writes."""

from __future__ import annotations

from typing import Final

from appliance.checkpoints.model_config import ModelConfig

TRANSCRIBERS: Final = frozenset({"WhisperForConditionalGeneration"})
"""Architectures that make text of sound, and nothing else: `tests/engine/test_whisper.py` serves
them."""


def encoder_tokens(config: ModelConfig) -> int:
    """Tokens that the encoder makes of any sound, which it reads as one of the longest; 0 for other
    models. Raises `CheckpointError` for what is no number."""
    if config.architecture not in TRANSCRIBERS:
        return 0
    return config.integer("max_source_positions")


def why_not_served(config: ModelConfig, *, ranks: int = 1, cuda: bool = False) -> str:
    """Why the model cannot be served by so many `ranks`, on a GPU if `cuda`; empty if it can, and
    for other models."""
    if config.architecture not in TRANSCRIBERS:
        return ""
    if cuda:
        return f"{config.architecture} is served on the CPU only by this version"
    if ranks > 1:
        return f"{config.architecture} is not served by several ranks yet"
    return ""
