"""Rotary embeddings of queries and keys of any shape, and models against transformers that plain
vLLM computes wrongly (three dimensions of queries on a CPU, Gemma 3n's text alone, those of
`test_layers`), or whose layers share keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance.engines.vllm.messages import decode_output
from tests.configs import CONFIGS
from tests.engine.house import Sampling, make_house, sequence
from tests.engine.shrunken import make_shrunken

SLABS = 48
SIZE, HEADS, TOKENS = 64, 4, 40


@pytest.mark.parametrize("rotated", [SIZE, SIZE // 2])
@pytest.mark.parametrize("neox", [True, False])
def test_queries_of_three_dimensions(neox: bool, rotated: int) -> None:
    """A part of each head as well as whole ones, next to a key or to none, as vLLM's own code in
    Python computes them. Should its kernel do so by itself one day, the mend can go."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from appliance.engines.vllm.layers import rotary

    rotary.mend_rotary_embeddings()
    with set_current_vllm_config(VllmConfig()):
        embedding = rotary.RotaryEmbedding(SIZE, rotated, 512, 1e4, neox, torch.float32)
    positions = torch.arange(TOKENS) * 7 % 300
    numbers = torch.Generator().manual_seed(1)
    wide = torch.randn(TOKENS, HEADS, 3 * SIZE, generator=numbers)
    latent = torch.randn(TOKENS, 9 * SIZE, generator=numbers)
    whole = torch.randn(TOKENS, HEADS, SIZE, generator=numbers)
    for query, key in (
        (wide[..., 2 * SIZE :], latent[:, 8 * SIZE :].unsqueeze(1)),
        (whole, whole + 1),
        (whole, None),
        (whole.flatten(1), latent[:, : 2 * SIZE]),
    ):
        expected = embedding.forward_native(positions, query.clone(), key)
        found = embedding.forward_cpu(positions, query.clone(), None if key is None else key + 0)
        assert found[0].shape == query.shape
        for one, other in zip(found, expected, strict=True):
            assert (one is None) is (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    wrong, _ = rotary.of_vllm(embedding, positions, whole.clone(), None)
    right, _ = embedding.forward_native(positions, whole, None)
    assert (wrong - right).abs().max() > 1, "vLLM's kernel takes three dimensions by now"


@pytest.mark.parametrize(
    "name",
    [
        "glm-4.7-flash",
        "lfm2-1.2b",
        "ernie-4.5-21b-a3b-pt",
        "minimax-m2-bf16",
        "phi-3.5-moe-instruct",
        "gemma-3n-e2b-text",
        "gemma-4-e4b-text",
    ],
)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Of the first token behind a prompt, and of one that is decoded."""
    import transformers

    path = make_shrunken(tmp_path, name, CONFIGS[name])
    engine = make_house().build(name, path, dtype="float32")
    engine.begin_load().wait()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=20)
    for length in (64, 203):
        words = [3 + i * 7 % 500 for i in range(length)]
        engine.add(sequence(name, "r", tuple(words), sampling))
        produced = [*engine.prefill("r", SLABS), *engine.step(["r"], SLABS)]
        assert len(produced) == 2
        for one in produced:
            scores = decode_output(one.detail).new_logprobs
            with torch.no_grad():
                expected = model(torch.tensor([words])).logits[0, -1].log_softmax(-1)
            tokens, found = scores.logprob_token_ids[0], scores.logprobs[0]
            assert one.token == int(expected.argmax())
            torch.testing.assert_close(
                torch.as_tensor(found), expected[torch.as_tensor(tokens)], atol=1e-3, rtol=0
            )
            words.append(one.token)
    engine.retire()
