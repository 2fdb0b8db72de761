"""Experts of Nomic's encoders on the CPU, which vLLM computes with Triton only.

Such experts have no gate: two matrices each, with GELU between them. What a token's experts give is
weighted by the router's probabilities, which are not made to add up to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn.functional import gelu, linear
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.bert_with_rope import NomicMoE

of_vllm: Final[Callable[..., torch.Tensor]] = NomicMoE.forward


def mend_nomic_experts() -> None:
    """Have them computed without Triton; call before a model is built, and not for a GPU.
    Idempotent."""
    NomicMoE.forward = _forward


def _forward(layer: NomicMoE, hidden_states: torch.Tensor) -> torch.Tensor:
    """`hidden_states` and the result: [tokens, hidden size]."""
    logits, _ = layer.router(hidden_states)
    weights, chosen = logits.float().softmax(dim=-1).topk(layer.top_k)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in range(layer.num_total_experts):
        tokens, places = torch.where(chosen == expert)
        inner = gelu(linear(hidden_states[tokens], layer.w1[expert]))
        given = linear(inner, layer.w2[expert]).float() * weights[tokens, places, None]
        total.index_add_(0, tokens, given)
    result = total.to(hidden_states.dtype)
    if layer.tp_size > 1:
        result = tensor_model_parallel_all_reduce(result)
    return torch.add(result, layer.bias)
