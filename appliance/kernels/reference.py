"""What the kernels do, in PyTorch, on whatever device the tensors are; the fingerprint, fast."""

from __future__ import annotations

from typing import Final

import torch

_CHUNK_WORDS: Final = 1 << 15
"""Words mixed at one go: their intermediate values stay in a CPU's cache."""
_MASK: Final = (1 << 64) - 1


def gather_blocks(
    packed: torch.Tensor,
    base: torch.Tensor,
    blocks: torch.Tensor,
    places: torch.Tensor,
    planes: int,
    block_bytes: int,
    plane_stride: int,
    block_stride: int,
    packed_stride: int,
) -> None:
    """As the kernel: uint8 tensors that begin where `packed` and `base` point, int64 indices."""
    inside = _inside(base, blocks, planes, block_bytes, plane_stride, block_stride)
    packed[_inside(packed, places, planes, block_bytes, block_bytes, packed_stride)] = base[inside]


def scatter_blocks(
    base: torch.Tensor,
    packed: torch.Tensor,
    blocks: torch.Tensor,
    places: torch.Tensor,
    planes: int,
    block_bytes: int,
    plane_stride: int,
    block_stride: int,
    packed_stride: int,
) -> None:
    """As the kernel, see `gather_blocks`."""
    inside = _inside(base, blocks, planes, block_bytes, plane_stride, block_stride)
    base[inside] = packed[_inside(packed, places, planes, block_bytes, block_bytes, packed_stride)]


def fingerprint(data: torch.Tensor) -> int:
    """The 64-bit fingerprint of a contiguous tensor's bytes; little-endian, as the kernel's."""
    raw = data.reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    total = 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        total += _mixed(words[start : start + _CHUNK_WORDS], start)
    if raw.numel() > whole:
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - whole] = raw[whole:]
        total += _mixed(last.view(torch.int64), whole // 8)
    return total & _MASK


def _mixed(words: torch.Tensor, first: int) -> int:
    """The sum of the words' mixes. int64 wraps around in PyTorch, as uint64 does in C."""
    x = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    x.mul_(_signed(0x9E3779B97F4A7C15)).bitwise_xor_(words)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # A shift to the right brings the sign along; C's brings zeros.
        x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            x.mul_(_signed(factor))
    return int(x.sum())


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _inside(
    whole: torch.Tensor,
    indices: torch.Tensor,
    planes: int,
    nbytes: int,
    plane_stride: int,
    index_stride: int,
) -> torch.Tensor:
    """Positions in `whole` of every byte of these blocks, by block, plane and byte."""
    device = whole.device
    return (
        indices.to(device)[:, None, None] * index_stride
        + torch.arange(planes, device=device)[None, :, None] * plane_stride
        + torch.arange(nbytes, device=device)
    )
