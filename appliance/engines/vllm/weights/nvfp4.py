"""Weights that a file has in NVFP4: floats of 4 bits, times a factor of 16 and a factor of all.

    weight [4096, 2048] uint8  *  weight_scale [4096, 256] float8  *  weight_scale_2  ->  float32

Factors are multiplied with each other first, as vLLM does; each of both products is rounded in
float32, and what they are written to rounds once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from appliance.checkpoints.quantized import nvfp4
from appliance.checkpoints.quantized.nvfp4 import BLOCK, BLOCK_BYTES

VERSION: Final = 1
"""Of the arithmetic: images that were kept of another one are not read."""
PRODUCTS: Final = torch.float32
"""The type of all products."""

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Read = Callable[[str, int, int, int], torch.Tensor]
"""Reads bytes: to what use, and of which file, from where, how many."""


class Nvfp4Origin(NamedTuple):
    """Where the tensors of a layer lie: a file, and bytes from its start, each."""

    name: str
    numbers_at: tuple[int, int]
    factors_at: tuple[int, int]
    whole_at: tuple[int, int]
    divides: bool
    """Whether all are divided by the last, and not multiplied with it."""
    version: int = VERSION

    def ranges(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """What `count` neighbouring products from number `first` on are made of: of each tensor the
        file, where it begins, its bytes."""
        start, end = first // BLOCK, -(-(first + count) // BLOCK)
        (file, offset), (factors, at), (whole, place) = self[1:4]
        return [
            (file, offset + start * BLOCK_BYTES, (end - start) * BLOCK_BYTES),
            (factors, at + start, end - start),
            (whole, place, 4),
        ]

    def numbers(self, first: int, count: int, read: Read) -> torch.Tensor:
        """`count` neighbouring products from number `first` on."""
        pairs, factors, whole = (
            read(use, *where)
            for use, where in zip(
                ("numbers", "factors", "whole"), self.ranges(first, count), strict=True
            )
        )
        scale = whole.view(torch.float32)
        made = multiply(pairs, factors, 1.0 / scale if self.divides else scale)
        skipped = first % BLOCK
        return made[skipped : skipped + count]


def multiply(pairs: torch.Tensor, factors: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The products of whole blocks, in one dimension, with one `scale` for all of them."""
    values = _PAIRS.index_select(0, pairs.flatten().to(torch.int32)).view(PRODUCTS)
    own = factors.flatten().view(torch.float8_e4m3fn).float().mul_(scale)
    return values.view(-1, BLOCK).mul_(own[:, None]).flatten()


def _pairs() -> torch.Tensor:
    """By byte: both of its floats, the one of the lower bits first, in the bits of one element."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.int64)[:, 0]


_PAIRS: Final = _pairs()


def origin_of(layer: nvfp4.Layer, files: dict[str, int]) -> Nvfp4Origin:
    """Where the products of a layer come from; `files` has the number of each tensor's file."""
    numbers, factors, whole = (
        (files[tensor.name], tensor.offset)
        for tensor in (layer.numbers, layer.factors, layer.whole)
    )
    return Nvfp4Origin(layer.name, numbers, factors, whole, layer.divides)
