"""Embeddings for each layer (PLE) of Gemma 3n's language model, which vLLM leaves out where it is
served alone.

vLLM's model of text has them given by the whole model, with images, which looks them up. Without
that, no layer learnt what the token is, and the answers were not those of transformers.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.models.gemma3n import Gemma3nForCausalLM

of_vllm: Final[Callable[..., Any]] = Gemma3nForCausalLM.forward
"""As vLLM has it: right if `per_layer_inputs` are given."""


def mend_per_layer_embeddings() -> None:
    """Have the language model look up what it is not given; call before it computes. Idempotent."""
    Gemma3nForCausalLM.forward = _forward


def _forward(
    self: Gemma3nForCausalLM,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    per_layer_inputs: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Hidden states of tokens, ``[tokens, hidden size]``."""
    if per_layer_inputs is None and input_ids is not None:
        found = self.model.get_per_layer_input_embeddings(input_ids)
        per_layer_inputs = found.view(input_ids.shape[0], self.config.num_hidden_layers, -1)
    return of_vllm(self, input_ids, positions, per_layer_inputs=per_layer_inputs, **others)
