"""Weights that a file has in integers of 4 or 8 bits, as products: (number - zero) * scale.

    qweight [256, 768] int32, scales [16, 768] float16  ->  weight [768, 2048] float32
    weight [768, 2048] int8, weight_scale [768, 1]      ->  the same

Each product is made in float32 and has there the bits of the exact one if scales have 16 bits; what
it is written to rounds it once. Of a layer in 4 bits all words are read at once, as an output's may
lie all over the tensor; a thread keeps them until it comes to the next layer. Of integers that are
elements of their own, only the rows that are needed are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from appliance.checkpoints.quantized import integers
from appliance.checkpoints.quantized.integers import NUMBERS
from appliance.checkpoints.safetensors import TensorEntry

VERSION: Final = 2
"""Of the arithmetic: images that were kept of another one are not read."""
DTYPE: Final = torch.float32
"""Of the products."""

_AWQ_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where each of eight neighbours lies in a word."""
_DTYPES: Final = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
}  # fmt: skip


class Place(NamedTuple):
    """Where a tensor lies, in bytes from the start of a file, and its shape and type."""

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, int]
    dtype: torch.dtype

    def rows(self, top: int, bottom: int) -> Place:
        """Some of its rows, which lie in order."""
        rows, columns = self.shape
        size = self.nbytes // rows
        begins = self.offset + top * size
        return Place(self.file, begins, (bottom - top) * size, (bottom - top, columns), self.dtype)


class IntegersOrigin(NamedTuple):
    """Where the tensors of a layer lie, whose products are ``[out, in]``; `name` is theirs."""

    name: str
    method: str
    shape: tuple[int, int]
    words: Place
    scales: Place
    zeros: Place | None
    each: int = NUMBERS
    """Numbers in a word; 1 if each is an element of its own, which has a sign."""
    version: int = VERSION

    def ranges(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """What any products are made of: of each tensor the file, where it begins, its bytes."""
        return [place[:3] for place in self._places(first, count).values()]

    def numbers(
        self, first: int, count: int, read: Callable[[str, int, int, int], torch.Tensor]
    ) -> torch.Tensor:
        """`count` neighbouring products from number `first` on."""
        found = {
            use: read(use, *place[:3]).view(place.dtype).view(place.shape)
            for use, place in self._places(first, count).items()
        }
        inside = self.shape[1]
        top, bottom = self._rows(first, count)
        if self.each == 1:
            numbers, scales, zeros = found["words"].to(DTYPE), found["scales"].float(), None
        else:
            scales, numbers, zeros = _outputs(self.method, found, top, bottom, self.each)
        grouped = numbers.view(bottom - top, scales.shape[1], -1)
        if self.each > 1:
            middle = 1 << (32 // self.each - 1)  # what is zero where no zeros are stored
            grouped.sub_(middle if zeros is None else zeros[..., None])
        grouped.mul_(scales[..., None])
        skipped = first - top * inside
        return grouped.flatten()[skipped : skipped + count]

    def _rows(self, first: int, count: int) -> tuple[int, int]:
        """The outputs that products are of."""
        inside = self.shape[1]
        return first // inside, -(-(first + count) // inside)

    def _places(self, first: int, count: int) -> dict[str, Place]:
        """What products are made of, by its use."""
        named = {"words": self.words, "scales": self.scales, "zeros": self.zeros}
        found = {use: place for use, place in named.items() if place is not None}
        if self.each > 1:
            return found
        top, bottom = self._rows(first, count)
        return {use: place.rows(top, bottom) for use, place in found.items()}


def _outputs(
    method: str, found: dict[str, torch.Tensor], top: int, bottom: int, each: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of some outputs, each a row: the scales of their groups, their numbers, and the zeros of
    their groups, if these are stored. Eight outputs share a word of AWQ's, and of zeros."""
    words, scales, zeros = found["words"], found["scales"], found.get("zeros")
    first, last = top // NUMBERS, -(-bottom // NUMBERS)
    own = slice(top - first * NUMBERS, bottom - first * NUMBERS)
    if method == integers.AWQ:
        assert zeros is not None, "AWQ stores zeros"
        pairs = _numbers(words[:, first:last]).view(len(words), -1, NUMBERS)
        numbers = pairs.permute(1, 2, 0)[:, _AWQ_PLACES].flatten(0, 1)[own].contiguous()
        zeros = _numbers(zeros[:, first:last]).view(len(zeros), -1, NUMBERS)[:, :, _AWQ_PLACES]
        return scales[:, top:bottom].t().float(), numbers, zeros.flatten(1)[:, own].t()
    if method == integers.GPTQ:
        own_words = words[:, top:bottom].t()
        numbers = _numbers(own_words) if each == NUMBERS else _bytes(own_words)
        return scales[:, top:bottom].t().float(), numbers, None
    if zeros is not None:
        zeros = _numbers(zeros[first:last].t()).view(zeros.shape[1], -1)[:, own].t()
    return scales[top:bottom].float(), _numbers(words[top:bottom]), zeros


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """The four numbers of 8 bits of each word, as `_numbers`."""
    return words.contiguous().flatten().view(torch.uint8).to(DTYPE)


def _numbers(words: torch.Tensor) -> torch.Tensor:
    """The eight numbers of each word as neighbours, the one of the lowest bits first."""
    pairs = words.contiguous().flatten().view(torch.uint8).to(torch.int32)
    return _PAIRS.index_select(0, pairs).view(DTYPE)


def _pairs() -> torch.Tensor:
    """By byte: both of its numbers, in the bits of one element."""
    byte = torch.arange(256)
    return torch.stack([byte & 15, byte >> 4], 1).to(DTYPE).view(torch.int64)[:, 0]


_PAIRS: Final = _pairs()


def origin_of(method: str, layer: integers.Layer, files: dict[str, int]) -> IntegersOrigin:
    """Where the products of a layer come from; `files` has the number of each tensor's file."""

    def place(tensor: TensorEntry) -> Place:
        rows, columns = tensor.shape
        dtype = _DTYPES.get(tensor.dtype, torch.int32)
        return Place(files[tensor.name], tensor.offset, tensor.nbytes, (rows, columns), dtype)

    zeros = None if layer.zeros is None else place(layer.zeros)
    words, scales = place(layer.words), place(layer.scales)
    return IntegersOrigin(layer.name, method, layer.shape, words, scales, zeros, layer.each)
