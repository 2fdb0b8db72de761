"""Rotary embeddings of queries and keys of any shape: plain vLLM computes those with three
dimensions wrongly on a CPU (`test_transformers` has models with them)."""

from __future__ import annotations

import pytest
import torch

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
