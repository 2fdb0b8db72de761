"""How a token's experts are chosen on the CPU, where vLLM computes it wrongly for some models.

vLLM's CPU router knows a correction bias and sigmoid scores only where experts are in groups.
Without groups it leaves out the bias (ERNIE 4.5, which then chooses other experts), and ends with
an assertion at sigmoid scores (MiniMax-M2). One group of all experts chooses as none does, so such
models are routed as if they had one.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.router import cpu_router

Routed = tuple[torch.Tensor, torch.Tensor]
"""Of each token: the weights of its experts, float32, and their numbers, int32."""

of_vllm: Final[Callable[..., Routed]] = cpu_router.CPURouter._compute_routing
"""As vLLM has it: right for groups, for scores by softmax without a bias, and for what a model
computes by itself."""


def mend_expert_routing() -> None:
    """Have experts without groups chosen rightly on the CPU; call before a model is built. Has no
    effect on a GPU. Idempotent."""
    cpu_router.CPURouter._compute_routing = _route


def _route(
    self: cpu_router.CPURouter,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    **further: Any,
) -> Routed:
    """The experts of each token; `router_logits` are ``[tokens, experts]``."""
    bias, scores = self.e_score_correction_bias, self.scoring_func
    grouped = self.use_grouped_topk or self.custom_routing_function is not None
    wrong = scores == "sigmoid" or (scores == "softmax" and bias is not None)
    if grouped or not wrong:
        return of_vllm(self, hidden_states, router_logits, indices_type, **further)
    routed: Routed = cpu_router._grouped_topk(
        gating_output=router_logits,
        topk=self.top_k,
        renormalize=self.renormalize,
        num_expert_group=1,
        topk_group=1,
        scoring_func=scores,
        # As on a GPU, where only the router with a bias multiplies by it.
        routed_scaling_factor=1.0 if bias is None else self.routed_scaling_factor,
        e_score_correction_bias=bias,
    )
    return routed
