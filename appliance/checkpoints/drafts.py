"""Which models may have drafts: tokens that are guessed, and checked by the next step."""

from __future__ import annotations

from typing import Final

import msgspec

from appliance.checkpoints.architectures.chat_sounds import HEARS
from appliance.checkpoints.architectures.unequal_layers import TWO_SIZES
from appliance.checkpoints.families import UnsupportedModel, keeps_state
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.quantized.quantization import said
from appliance.vocabulary import Task

NGRAM: Final = "ngram"
MTP: Final = "mtp"
EAGLE: Final = "eagle"
EAGLE3: Final = "eagle3"
METHODS: Final = (NGRAM, MTP, EAGLE, EAGLE3)
IN_A_FOLDER: Final = frozenset({EAGLE, EAGLE3})
"""Methods whose heads lie in a folder of their own."""
MOST_DRAFTED: Final = 16
"""Tokens of one draft."""
LONGEST_LOOKUP: Final = 32


class Speculation(msgspec.Struct, frozen=True):
    """How a model's tokens are guessed, at most so many `tokens`: by a head of its own (`mtp`), by
    one that lies in `path` (`eagle`, `eagle3`), or those that followed where the last ones stood
    before. Of these, at least `prompt_lookup_min` must have stood there, and at most
    `prompt_lookup_max` are looked for: vLLM's words."""

    tokens: int
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    method: str = NGRAM
    path: str = ""

    @property
    def has_head(self) -> bool:
        """Whether a head guesses, and it is said where that is."""
        return self.method == MTP or (self.method in IN_A_FOLDER and bool(self.path))


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
    `images` (or sounds) at most."""
    found = _why_not(config, task, on_cpu=on_cpu, ranks=ranks, images=images, adapters=adapters)
    if found:
        raise UnsupportedModel(f"{config.path}: {found}", OTHERWISE)


def _why_not(
    config: ModelConfig, task: Task, *, on_cpu: bool, ranks: int, images: int, adapters: bool
) -> str:
    name = config.architecture
    if task is Task.TRANSCRIPTION:
        return f"drafts were not tried with what {name} makes of sound"
    if task is not Task.GENERATE:
        return f"{name} generates no text here, so there is nothing to draft"
    if keeps_state(config):
        return (
            f"layers of {name} keep a state, which tokens that are refused would spoil: it cannot "
            "have drafts"
        )
    if config.model_type in TWO_SIZES:
        return f"drafts were not tried with layers that keep KV of two sizes, as {name} has"
    if said(config) is not None:
        return "drafts were not tried with quantized weights"
    if not on_cpu:
        return "drafts were tried on the CPU only"
    if ranks > 1:
        return "drafts were not tried on several ranks"
    if images:
        kind = "sounds" if name in HEARS else "images"
        return f"drafts were not tried with {kind} in prompts (`{kind}` is {images})"
    if adapters:
        return "drafts were not tried with LoRA adapters: a model may have one or the other"
    return ""
