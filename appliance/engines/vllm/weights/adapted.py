"""Matrices to which the adapter of a task is added as they are read (Jina's embeddings v3).

    original [4096, 1024] bfloat16 + factor * left [4096, 4] @ right [4, 1024]  ->  weight bfloat16

Each sum is made in float32 and rounded to the type of the stored matrix, as vLLM does it, whatever
rows are made at a time. The adapters of other tasks are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from appliance.checkpoints.architectures.task_adapters import AdaptedMatrix
from appliance.checkpoints.safetensors import TensorEntry

VERSION: Final = 1
"""Of the arithmetic: images that were kept of another one are not read."""
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Rows(NamedTuple):
    """A matrix that lies row by row `offset` bytes from the start of a file."""

    file: int
    offset: int
    columns: int
    dtype: torch.dtype

    def range(self, top: int, bottom: int) -> tuple[int, int, int]:
        """The file, where rows `top` to before `bottom` begin in it, and their bytes."""
        row = self.columns * self.dtype.itemsize
        return self.file, self.offset + top * row, (bottom - top) * row


class AdaptedOrigin(NamedTuple):
    """Where a matrix lies, and the parts of one task's adapter; `name` is that of their sum."""

    name: str
    original: Rows
    left: Rows
    right: Rows
    factor: float
    version: int = VERSION

    def ranges(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """What `count` neighbouring sums from number `first` on are made of: of each tensor the
        file, where it begins, its bytes."""
        return [*self._ranges(first, count).values()]

    def numbers(
        self, first: int, count: int, read: Callable[[str, int, int, int], torch.Tensor]
    ) -> torch.Tensor:
        """`count` neighbouring sums from number `first` on."""
        found = {
            use: read(f"adapted {use}", *place) for use, place in self._ranges(first, count).items()
        }
        original, left, right = (
            found[use].view(rows.dtype).view(-1, rows.columns).float()
            for use, rows in self._parts.items()
        )
        added = torch.zeros_like(original)
        for column, row in zip(left.t(), right, strict=True):  # a rank is a few of them
            added += column[:, None] * row
        made = added.mul_(self.factor).add_(original).to(self.original.dtype)
        skipped = first - first // self.original.columns * self.original.columns
        return made.flatten()[skipped : skipped + count]

    @property
    def _parts(self) -> Mapping[str, Rows]:
        return {"original": self.original, "left": self.left, "right": self.right}

    def _ranges(self, first: int, count: int) -> dict[str, tuple[int, int, int]]:
        columns, rank = self.original.columns, self.left.columns
        top, bottom = first // columns, -(-(first + count) // columns)
        return {
            "original": self.original.range(top, bottom),
            "left": self.left.range(top, bottom),
            "right": self.right.range(0, rank),
        }


def dtype_of(matrix: AdaptedMatrix) -> torch.dtype:
    """Of the sums: that of the stored matrix."""
    return _DTYPES[matrix.original.dtype]


def origin_of(
    matrix: AdaptedMatrix, task: int, factor: float, files: Mapping[str, int]
) -> AdaptedOrigin:
    """Where the matrix with the adapter of task number `task` comes from; `files` has the number of
    each tensor's file."""

    def rows(tensor: TensorEntry, skipped: int) -> Rows:
        each = math.prod(tensor.shape[-2:]) * _DTYPES[tensor.dtype].itemsize
        start = tensor.offset + skipped * each
        return Rows(files[tensor.name], start, tensor.shape[-1], _DTYPES[tensor.dtype])

    return AdaptedOrigin(
        matrix.name,
        rows(matrix.original, 0),
        rows(matrix.left, task),
        rows(matrix.right, task),
        factor,
    )
