"""Attention of MiMo-V2 on the CPU, whose values are shorter than its keys. vLLM has it in Triton
only (`TRITON_ATTN_DIFFKV`), and ends in the first step.

Values are made as long as keys with zeros, and what comes of these is cut off: the numbers before
them are those of attention without. A token takes the memory of two keys.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import mimo_v2


class PaddedAttention(Attention):  # type: ignore[misc]
    """vLLM's layer of attention, by the backend of the CPU."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *,
        head_size_v: int,
        attn_backend: Any = None,
        **others: Any,
    ) -> None:
        """With values of `head_size_v` numbers, and at most `head_size`. Of several sizes, the
        backend that vLLM chose (`attn_backend`) is not used."""
        if head_size_v > head_size:
            raise ValueError(f"values of {head_size_v} numbers are longer than keys of {head_size}")
        self.own_size = head_size_v
        super().__init__(num_heads, head_size, scale, **others)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        """Of ``[tokens, heads * size]`` each; the result's size is that of values."""
        own, size = self.own_size, self.head_size
        values = value.view(-1, self.num_kv_heads, own)
        padded = pad(values, (0, size - own)).flatten(1)
        found: torch.Tensor = super().forward(query, key, padded, *others)
        return found.view(-1, self.num_heads, size)[..., :own].flatten(1)


def pad_values() -> None:
    """Have MiMo-V2 built with it; call before a model is, and not for a GPU. Idempotent."""
    mimo_v2.Attention = PaddedAttention
