"""Weights that a file has in MXFP4: floats of 4 bits, times the power of two of their block.

    blocks [32, 5760, 90, 16] uint8  *  scales [32, 5760, 90] uint8  ->  [32, 5760, 2880] bfloat16

Every product is a number of bfloat16, so nothing is rounded to it. Scales of 253 and more can make
products that are too large for it, and 255 is no number by the format's definition: both are
errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from appliance.checkpoints.quantized.microscaled import BLOCK, BLOCK_BYTES
from appliance.errors import CheckpointError

VERSION: Final = 2
"""Of the arithmetic: images that were kept of another one are not read."""
PRODUCTS: Final = torch.bfloat16
"""The type of all products."""
LARGEST_SCALE: Final = 252
"""Up to which every product is finite."""

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Read = Callable[[str, int, int, int], torch.Tensor]
"""Reads bytes: to what use, and of which file, from where, how many."""


class MicroscaledOrigin(NamedTuple):
    """Where the blocks and the scales of a tensor lie: bytes from the start of a file each."""

    name: str
    blocks_file: int
    blocks: int
    scales_file: int
    scales: int
    version: int = VERSION

    def ranges(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """What `count` neighbouring products from number `first` on are made of: the blocks, and
        the scales; of each the file, where they begin in it, and their bytes."""
        start, end = first // BLOCK, -(-(first + count) // BLOCK)
        return [
            (self.blocks_file, self.blocks + start * BLOCK_BYTES, (end - start) * BLOCK_BYTES),
            (self.scales_file, self.scales + start, end - start),
        ]

    def numbers(self, first: int, count: int, read: Read) -> torch.Tensor:
        """`count` neighbouring products from number `first` on. Raises `CheckpointError` for one
        that is no number, or too large for bfloat16."""
        blocks, scales = (
            read(use, *where)
            for use, where in zip(("blocks", "scales"), self.ranges(first, count), strict=True)
        )
        made = multiply(blocks, scales)
        if int(scales.max()) > LARGEST_SCALE and not bool(made.isfinite().all()):
            raise CheckpointError(
                f"{self.name}_scales has the scale {int(scales.max())}, with which a weight is no "
                "number of bfloat16; take another copy of the checkpoint"
            )
        skipped = first % BLOCK
        return made[skipped : skipped + count]


def multiply(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The products of whole blocks, in one dimension: not finite where they are no number of
    bfloat16."""
    pairs = _PAIRS.index_select(0, blocks.flatten().to(torch.int32))
    products = pairs.view(PRODUCTS).view(-1, BLOCK)
    products.mul_(_POWERS.index_select(0, scales.flatten().to(torch.int32))[:, None])
    return products.flatten()


def _pairs() -> torch.Tensor:
    """By byte: both of its floats, in the bits of one element."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    byte = torch.arange(256)
    return (
        torch.stack([values[byte & 15], values[byte >> 4]], 1).to(PRODUCTS).view(torch.int32)[:, 0]
    )


def _powers() -> torch.Tensor:
    """By scale: its power of two. The least, 2^-127, is a number of bfloat16 with leading zeros."""
    powers = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127).to(PRODUCTS)
    powers[255] = float("nan")
    return powers


_PAIRS: Final = _pairs()
_POWERS: Final = _powers()
