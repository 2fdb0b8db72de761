"""The bias of an output head, which vLLM leaves out for a model that does not pass it on.

vLLM's Phi-3.5-MoE reads `lm_head.bias` from its checkpoint and computes logits without it, on any
device. A head that has a bias is given it here, whatever the model passes on.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

of_vllm: Final[Callable[..., torch.Tensor | None]] = LogitsProcessor.forward
"""As vLLM has it: right for models that pass on the bias, and for heads without one."""


def mend_biased_heads() -> None:
    """Have logits computed with the bias of the head, if it has one; call before a model is built.
    Idempotent."""
    LogitsProcessor.forward = _forward


def _forward(
    self: LogitsProcessor,
    lm_head: torch.nn.Module,
    hidden_states: torch.Tensor,
    embedding_bias: torch.Tensor | None = None,
    *args: Any,
    **further: Any,
) -> torch.Tensor | None:
    """Logits of `hidden_states`, ``[tokens, hidden size]``, as vLLM's own does, and the bias."""
    if embedding_bias is None:
        embedding_bias = getattr(lm_head, "bias", None)
    return of_vllm(self, lm_head, hidden_states, embedding_bias, *args, **further)
