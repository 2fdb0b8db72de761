"""Tokens that a checkpoint of Gemma 4 says are never produced: vLLM's whole model leaves them out,
but not its language model alone.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM

from appliance.checkpoints.architectures.suppressed_tokens import suppressed_tokens
from appliance.checkpoints.model_config import read_model_config

init_of_vllm: Final[Callable[..., None]] = Gemma4ForCausalLM.__init__
logits_of_vllm: Final[Callable[..., Any]] = Gemma4ForCausalLM.compute_logits


def suppress_tokens() -> None:
    """Have the language model leave them out; call before a model is built. Idempotent."""
    Gemma4ForCausalLM.__init__ = _init
    Gemma4ForCausalLM.compute_logits = _logits


def _init(self: Gemma4ForCausalLM, *, vllm_config: Any, prefix: str = "") -> None:
    """Raises `CheckpointError` for what is no token: a step that met it would end the process."""
    init_of_vllm(self, vllm_config=vllm_config, prefix=prefix)
    found = suppressed_tokens(read_model_config(Path(vllm_config.model_config.model)))
    self.suppressed = torch.tensor(found, dtype=torch.long) if found else None


def _logits(self: Gemma4ForCausalLM, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Of the vocabulary, for each row; None on ranks that have none."""
    logits: torch.Tensor | None = logits_of_vllm(self, hidden_states)
    if logits is not None and self.suppressed is not None:
        logits.index_fill_(1, self.suppressed, float("-inf"))
    return logits
