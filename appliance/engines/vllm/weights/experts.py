"""Expert weights of mixtures, in the order in which vLLM's CPU kernels read them.

vLLM packs them after it has loaded them, into parameters of the same size. No recipe of copies says
where an element goes, so the packing itself is noted, and done when the weights are read: one
expert at a time, each of which vLLM packs for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

PREPACK: Final = "prepack_moe_weight"


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """How weights ``[experts, out, in]`` are packed; `isa` as vLLM names it. A row is an expert."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    isa: str

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.piece_bytes

    @property
    def piece_rows(self) -> int:
        return 1

    @property
    def piece_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """Equal for packed bytes that are read alike."""
        return f"experts {self.isa}"

    def pack(self, weight: torch.Tensor, place: Callable[[int, int], None]) -> None:
        """Pack whole experts; `place` gets the address of the packed bytes and their number."""
        experts = weight.view(-1, *self.shape[1:])
        output = torch.empty_like(experts)
        torch.ops._C.prepack_moe_weight(experts, output, self.isa)
        place(output.data_ptr(), output.nbytes)
