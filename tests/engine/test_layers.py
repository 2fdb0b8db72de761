"""Layers of vLLM that are mended, and what the reasons are for models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import CONFIGS
from tests.engine.house import make_house
from tests.engine.shrunken import make_shrunken

TOKENS, EXPERTS, CHOSEN = 20, 8, 3


@pytest.mark.parametrize(
    ("scores", "biased", "scaled"),
    [("sigmoid", True, 2.5), ("sigmoid", False, 1.0), ("softmax", True, 1.0)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_without_groups(
    scores: str, biased: bool, scaled: float, renormalize: bool
) -> None:
    """A bias decides which experts a token has, not how much they weigh. Should vLLM's router do so
    by itself one day, the mend can go."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from appliance.engines.vllm.layers import routing

    routing.mend_expert_routing()
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, EXPERTS, generator=numbers)
    bias = torch.randn(EXPERTS, generator=numbers) if biased else None
    router = CPURouter(
        CHOSEN,
        EXPERTS,
        renormalize=renormalize,
        scoring_func=scores,
        routed_scaling_factor=scaled,
        e_score_correction_bias=bias,
    )
    own = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    expected = (own if bias is None else own + bias).topk(CHOSEN).indices.sort().values
    weights = own.gather(1, expected)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)

    found = sorted_by_expert(router._compute_routing(logits, logits, None))

    assert torch.equal(found[1], expected)
    torch.testing.assert_close(found[0], weights * scaled)
    try:
        plain = sorted_by_expert(routing.of_vllm(router, logits, logits, None))
    except AssertionError:
        return
    assert not torch.equal(plain[1], expected), "vLLM's router takes a bias by now"


def sorted_by_expert(routed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = routed
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    order = chosen.argsort()
    return weights.gather(1, order), chosen.gather(1, order).long()


def test_a_head_has_its_bias() -> None:
    """Whether or not a model passes it on."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from appliance.engines.vllm.layers import heads

    class Head(torch.nn.Module):
        """Of what a head is asked for."""

        def __init__(self, bias: torch.Tensor | None) -> None:
            super().__init__()
            self.bias = bias

    heads.mend_biased_heads()
    with set_current_vllm_config(VllmConfig()):
        processor = LogitsProcessor(4)
    asked = []
    processor._get_logits = lambda states, head, bias, *_: asked.append(bias) or states
    states, bias = torch.zeros(1, 4), torch.ones(4)
    for head, passed in ((Head(bias), None), (Head(bias), bias), (Head(None), None)):
        processor(head, states, passed)

    assert asked[0] is asked[1] is bias
    assert asked[2] is None


def test_ernie_changes_no_rotary_embedding_of_another_model(tmp_path: Path) -> None:
    """Those of the process are by their numbers, of which the flag that ERNIE changes is one."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    house = make_house()
    for name in ("llama-3.1-8b-instruct", "ernie-4.5-0.3b-pt"):
        house.build(name, make_shrunken(tmp_path, name, CONFIGS[name]), dtype="float32")

    assert _ROPE_DICT
    for numbers, embedding in _ROPE_DICT.items():
        if hasattr(embedding, "is_neox_style"):
            assert embedding.is_neox_style == numbers[3]


def test_vllm_has_no_kernel_for_bounded_experts() -> None:
    """Why Step 3.5 is refused on CPUs."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert CPUUnquantizedExperts._supports_activation(MoEActivation.SILU)
    assert not CPUUnquantizedExperts._supports_activation(MoEActivation.SWIGLUSTEP)


def test_vllm_does_not_load_the_experts_of_dbrx(tmp_path: Path) -> None:
    """Why it is refused: they have another name in the model than where vLLM looks for them."""
    path = make_shrunken(tmp_path, "dbrx-instruct", CONFIGS["dbrx-instruct"])

    with pytest.raises(KeyError, match="w13_weight"):
        make_house().build("dbrx", path, dtype="float32")
