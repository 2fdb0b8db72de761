"""Tokens that a checkpoint of Gemma 4 says are never produced, such as those that end an image:
vLLM's whole model leaves them out, but not its language model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM

_init_of_vllm: Final[Callable[..., None]] = Gemma4ForCausalLM.__init__
_logits_of_vllm: Final[Callable[..., Any]] = Gemma4ForCausalLM.compute_logits


def suppress_tokens() -> None:
    """Have the language model leave them out; call before a model is built. Idempotent."""
    Gemma4ForCausalLM.__init__ = _init
    Gemma4ForCausalLM.compute_logits = _logits


def _init(self: Gemma4ForCausalLM, *, vllm_config: Any, prefix: str = "") -> None:
    _init_of_vllm(self, vllm_config=vllm_config, prefix=prefix)
    said = vllm_config.model_config.try_get_generation_config()
    self.suppressed = said.get("suppress_tokens") or []


def _logits(self: Gemma4ForCausalLM, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Of the vocabulary, for each row; None on ranks that have none."""
    logits: torch.Tensor | None = _logits_of_vllm(self, hidden_states)
    if logits is not None and self.suppressed:
        logits[:, self.suppressed] = float("-inf")
    return logits
