"""Which models may have drafts: tokens that are guessed, and checked by the next step."""

from __future__ import annotations

from typing import Final

import msgspec

from appliance.checkpoints.families import UnsupportedModel, keeps_state
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.quantized.quantization import quantization
from appliance.vocabulary import Task

METHOD: Final = "ngram"
"""The only method there is."""
MOST_DRAFTED: Final = 16
"""Tokens of one draft."""
LONGEST_LOOKUP: Final = 32


class Speculation(msgspec.Struct, frozen=True):
    """How a model's tokens are guessed: those that followed where the last ones stood before, at
    most so many `tokens`. At least `prompt_lookup_min` must have stood there, and at most
    `prompt_lookup_max` are looked for: vLLM's words."""

    tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


OTHERWISE: Final = "leave speculate out"


def check_drafts(
    config: ModelConfig,
    task: Task,
    *,
    on_cpu: bool,
    ranks: int,
    images: int = 0,
    adapters: bool = False,
) -> None:
    """Raise `UnsupportedModel` for a model that may not have drafts. Its prompts have so many
    `images` at most."""
    found = _why_not(config, task, on_cpu=on_cpu, ranks=ranks, images=images, adapters=adapters)
    if found:
        raise UnsupportedModel(f"{config.path}: {found}", OTHERWISE)


def _why_not(
    config: ModelConfig, task: Task, *, on_cpu: bool, ranks: int, images: int, adapters: bool
) -> str:
    name = config.architecture
    if task is not Task.GENERATE:
        return f"{name} generates no text here, so there is nothing to draft"
    if keeps_state(config):
        return (
            f"layers of {name} keep a state, which tokens that are refused would spoil: it cannot "
            "have drafts"
        )
    if quantization(config) is not None:
        return "drafts were not tried with quantized weights"
    if not on_cpu:
        return "drafts were tried on the CPU only"
    if ranks > 1:
        return "drafts were not tried on several ranks"
    if images:
        return f"drafts were not tried with images in prompts (`images` is {images})"
    if adapters:
        return "drafts were not tried with LoRA adapters: a model may have one or the other"
    return ""
