"""Layers of vLLM that are mended, and what the reasons are for models that are refused."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.engines.vllm.messages import decode_output
from appliance.errors import CheckpointError
from tests.configs import CONFIGS
from tests.engine.house import Sampling, make_house, sequence
from tests.engine.shrunken import NEVER_SAID, VOCAB, make_shrunken

GEMMA_4 = "gemma-4-e4b-text"
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


@pytest.mark.parametrize("cpu", [True, False])
def test_plain_processes_are_mended(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    """On GPUs, too, where nothing is imported that is for CPUs."""
    from vllm.platforms import current_platform

    from appliance.engines.vllm.layers import extension, mends

    mended: list[str] = []
    for name in ("mend_layers", "mend_cpu_layers"):
        monkeypatch.setattr(mends, name, partial(mended.append, name))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: cpu)
    try:
        importlib.reload(extension)
    finally:
        monkeypatch.undo()
        importlib.reload(extension)

    assert mended == ["mend_cpu_layers" if cpu else "mend_layers"]


def test_tokens_that_are_never_said(tmp_path: Path) -> None:
    """A checkpoint of Gemma 4 that names none of its vocabulary is not built: a step that met it
    would end the process, with all other models. These go on, and say none of theirs."""
    path = make_shrunken(tmp_path, GEMMA_4, CONFIGS[GEMMA_4])
    house = make_house()
    engine = house.build(GEMMA_4, path, dtype="float32")
    engine.begin_load().wait()
    (Path(path) / "generation_config.json").write_text(f'{{"suppress_tokens": [5, {VOCAB}]}}')
    with pytest.raises(CheckpointError, match=f"suppress_tokens has {VOCAB}"):
        house.build("other", path, dtype="float32")

    asked = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
    engine.add(sequence(GEMMA_4, "r", (3, 4, 5), asked))
    produced = engine.prefill("r", 48)
    while engine.knows("r"):
        produced += engine.step(["r"], 48)

    for one in produced:
        scores = decode_output(one.detail).new_logprobs
        assert all(token % NEVER_SAID for token in scores.logprob_token_ids[0])
    engine.retire()


def test_vllm_has_no_kernel_for_bounded_experts() -> None:
    """Why Step 3.5 is refused on CPUs."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert CPUUnquantizedExperts._supports_activation(MoEActivation.SILU)
    assert not CPUUnquantizedExperts._supports_activation(MoEActivation.SWIGLUSTEP)


def test_vllm_has_no_attention_on_cpus_with_values_shorter_than_keys() -> None:
    """Why values of MiMo-V2 are padded. Once vLLM's build has a kernel, this fails, and the mend
    (`padded_values`) can go."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_diffkv,
    )

    kernel: Any = AttentionBackendEnum.FLASH_ATTN_DIFFKV.get_class()
    assert not kernel.is_supported_on_current_device(192, 128, has_sinks=True)
    keys, values, one = torch.zeros(1, 2, 192), torch.zeros(1, 2, 128), torch.ones(1)
    cache, slots = torch.zeros(2, 32, 2, 192 + 128), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AttributeError, match="no attribute 'next_power_of_2'"):
        triton_reshape_and_cache_flash_diffkv(keys, values, cache, slots, "auto", one, one)


def test_padded_values_are_no_longer_than_keys() -> None:
    from appliance.engines.vllm.layers.padded_values import PaddedAttention

    with pytest.raises(ValueError, match="values of 256 numbers are longer than keys of 192"):
        PaddedAttention(4, 192, 1.0, head_size_v=256)


def test_vllm_does_not_load_the_experts_of_dbrx(tmp_path: Path) -> None:
    """Why it is refused: they have another name in the model than where vLLM looks for them."""
    path = make_shrunken(tmp_path, "dbrx-instruct", CONFIGS["dbrx-instruct"])

    with pytest.raises(KeyError, match="w13_weight"):
        make_house().build("dbrx", path, dtype="float32")
