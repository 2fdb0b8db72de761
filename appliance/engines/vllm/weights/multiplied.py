"""Weights that a file has in floats of 8 bits: each is multiplied by the factor of its block.

    weight [4096, 4096] F8_E4M3  *  factors [32, 32] float32, of blocks [128, 128]  ->  float32

The product is exact but for one rounding in float32; what it is written to rounds it once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized import floats, quantization
from appliance.checkpoints.safetensors import TensorEntry, WeightFile
from appliance.errors import CheckpointError

VERSION: Final = 1
"""Of the arithmetic: images that were kept of another one are not read."""


class FactorsOrigin(NamedTuple):
    """Where the factors of a weight lie, and the weight itself: `start` bytes from the start of its
    own file, with rows of `columns`."""

    file: int
    offset: int
    kind: str
    shape: tuple[int, int]
    block: tuple[int, int]
    start: int
    columns: int
    version: int = VERSION

    def needed(self, offset: int, count: int) -> tuple[int, int]:
        """The factors, from the first to before the last one, in whole rows of them, of `count`
        neighbouring numbers that lie `offset` bytes from the start of the weight's file."""
        first, high = offset - self.start, self.columns * self.block[0]
        last = first + count - 1
        return first // high * self.shape[1], (last // high + 1) * self.shape[1]

    def multiply(self, numbers: torch.Tensor, offset: int, factors: torch.Tensor) -> torch.Tensor:
        """The products, in float32, of neighbouring `numbers` that lie `offset` bytes from the
        start of the weight's file, with the `factors` that are `needed` for them."""
        first = offset - self.start
        last = first + numbers.numel() - 1
        top, bottom = first // self.columns, last // self.columns + 1
        blocks = torch.arange(top, bottom) // self.block[0] - top // self.block[0]
        rows = factors.float().view(-1, self.shape[1])[blocks]
        wide = rows[:, torch.arange(self.columns) // self.block[1]].flatten()
        skipped = first - top * self.columns
        return numbers.float().mul_(wide[skipped : skipped + numbers.numel()])


def find(files: Sequence[WeightFile]) -> dict[str, FactorsOrigin]:
    """The factors of each such weight, by its name, if the checkpoint of these files has any.
    Raises `CheckpointError` for a weight without."""
    if not any(True for _ in _weights(files)):
        return {}
    found = quantization.multiplied(read_model_config(files[0].path.parent))
    if found is None or not floats.is_of(found):
        return {}
    known = {tensor.name: tensor for file in files for tensor in file.tensors}
    numbers = {tensor.name: n for n, file in enumerate(files) for tensor in file.tensors}
    origins = {}
    for tensor in _weights(files):
        factors = floats.factors(found, tensor, known)
        if factors is None:
            raise CheckpointError(f"{tensor.name} has no factors of the right shape")
        rows, columns = tensor.shape
        scale, block = factors.tensor, (factors.rows, factors.columns)
        origins[tensor.name] = FactorsOrigin(
            numbers[scale.name],
            scale.offset,
            scale.dtype,
            (-(-rows // block[0]), -(-columns // block[1])),
            block,
            tensor.offset,
            columns,
        )
    return origins


def _weights(files: Iterable[WeightFile]) -> Iterable[TensorEntry]:
    return (t for file in files for t in file.tensors if t.dtype == floats.FLOAT)
