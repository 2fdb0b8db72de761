"""Weights of short convolutions, in the order in which vLLM's CPU kernels for linear attention read
them: packed when they are read, as experts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

CONVOLUTION_PACK: Final = "causal_conv1d_weight_pack"
UNPACKED: Final = "_cpu_unpacked_conv_weight"
"""Where vLLM keeps a second copy, for drafts, of which there are none."""


@dataclass(frozen=True, slots=True)
class ConvolutionPacking:
    """How weights ``[channels, width]`` are packed, all in one piece."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.piece_bytes

    @property
    def piece_rows(self) -> int:
        return self.shape[0]

    @property
    def piece_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """Equal for packed bytes that are read alike."""
        return "convolution"

    def pack(self, weight: torch.Tensor, place: Callable[[int, int], None]) -> None:
        """Pack the weights; `place` gets the address of the packed bytes and their number."""
        output = torch.ops._C.causal_conv1d_weight_pack(weight.view(self.shape))
        place(output.data_ptr(), output.nbytes)


def forget_unpacked(model: torch.nn.Module) -> None:
    """Drop vLLM's second copies, which would be outside of the arena."""
    for module in model.modules():
        vars(module).pop(UNPACKED, None)
