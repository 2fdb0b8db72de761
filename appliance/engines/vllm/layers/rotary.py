"""Rotary embeddings on the CPU, where vLLM computes those of some models wrongly.

vLLM's kernel takes the stride of the last dimension but one for that from token to token. It is
right for ``[tokens, heads * size]``; some models pass ``[tokens, heads, size]`` (GLM-4.7-Flash,
LFM2), whose tokens were then rotated as if they were heads. So the kernel is given two dimensions.

Processes of plain vLLM that outputs are compared with do the same, and differ from the published
vLLM in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

Rotated = tuple[torch.Tensor, torch.Tensor | None]

of_vllm: Final[Callable[..., Rotated]] = RotaryEmbedding.forward_cpu
"""As vLLM has it: right for two dimensions."""


def mend_rotary_embeddings() -> None:
    """Have rotary embeddings of any shape computed rightly on the CPU; call before a model is
    built. Has no effect on a GPU. Idempotent."""
    RotaryEmbedding.forward_cpu = _rotate


def _rotate(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
) -> Rotated:
    """`query` and `key`, ``[tokens, heads * size]`` or ``[tokens, heads, size]``, rotated by the
    tokens' `positions`. As in vLLM, they may be changed in place."""
    tokens = positions.numel()
    flat = query.reshape(tokens, -1)
    if key is None:
        of_vllm(self, positions, flat, None)
        return flat.view(query.shape), None
    flat_key = key.reshape(tokens, -1)
    of_vllm(self, positions, flat, flat_key)
    return flat.view(query.shape), flat_key.view(key.shape)
