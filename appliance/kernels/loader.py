"""The kernels, compiled for the device at hand by NVRTC, through CuPy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from appliance.kernels.exp7 import VALUES

BLOCKS: Final = "blocks.cu"
FINGERPRINT: Final = "fingerprint.cu"
EXP7: Final = "exp7.cu"
OPTIONS: Final = ("-std=c++17",)
_THREADS: Final = 256
_BLOCKS_PER_PROCESSOR: Final = 4
_EXP7_VALUES: Final = 32
"""Numbers that a thread decodes at a time."""


def source(name: str) -> str:
    """The text of a kernel file of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class Kernels:
    """The kernels on CuPy's current device; addresses are plain integers, streams raw handles.

    They run in the order of their stream; only `fingerprint` waits for its result.
    """

    def __init__(self) -> None:
        """Compiles; CuPy keeps what it compiled on disk. Raises `ImportError` without CuPy."""
        self._cupy: Any = importlib.import_module("cupy")
        blocks = self._cupy.RawModule(code=source(BLOCKS), options=OPTIONS)
        self._gather = blocks.get_function("gather_blocks")
        self._scatter = blocks.get_function("scatter_blocks")
        module = self._cupy.RawModule(code=source(FINGERPRINT), options=OPTIONS)
        self._fingerprint = module.get_function("fingerprint")
        module = self._cupy.RawModule(code=source(EXP7), options=OPTIONS)
        self._decode_exp7 = module.get_function("decode_exp7")
        attributes = self._cupy.cuda.Device().attributes
        self._most = attributes["MultiProcessorCount"] * _BLOCKS_PER_PROCESSOR

    def gather_blocks(
        self,
        packed: int,
        base: int,
        blocks: Sequence[int],
        places: Sequence[int],
        *,
        planes: int,
        block_bytes: int,
        plane_stride: int,
        block_stride: int,
        packed_stride: int,
        stream: int = 0,
    ) -> None:
        """Copy blocks of every plane to packed places; strides in bytes, see `blocks.cu`.

        Raises `ValueError` unless every block has a place.
        """
        strides = (block_bytes, plane_stride, block_stride, packed_stride)
        self._move(self._gather, packed, base, blocks, places, planes, strides, stream)

    def scatter_blocks(
        self,
        base: int,
        packed: int,
        blocks: Sequence[int],
        places: Sequence[int],
        *,
        planes: int,
        block_bytes: int,
        plane_stride: int,
        block_stride: int,
        packed_stride: int,
        stream: int = 0,
    ) -> None:
        """Copy packed places to blocks of every plane; the reverse of `gather_blocks`."""
        strides = (block_bytes, plane_stride, block_stride, packed_stride)
        self._move(self._scatter, base, packed, blocks, places, planes, strides, stream)

    def fingerprint(self, address: int, nbytes: int, stream: int = 0) -> int:
        """64 bits that tell whether a range has changed; see `fingerprint.cu`.

        Raises `ValueError` for an address that is not a multiple of 8.
        """
        if address % 8:
            raise ValueError(f"a fingerprint begins at a multiple of 8, not at {address:#x}")
        with self._cupy.cuda.ExternalStream(stream):
            total = self._cupy.zeros(1, dtype=self._cupy.uint64)
            grid = self._grid(-(-nbytes // (8 * _THREADS)))
            arguments = (self._pointer(address), self._cupy.int64(nbytes), total)
            self._fingerprint(grid, (_THREADS,), arguments)
            return int(total[0])

    def decode_exp7(
        self, to: int, image: int, entries: int, first: int, count: int, stream: int = 0
    ) -> None:
        """Decode `count` blocks of an image from `first` on, in order, to `to`; see `exp7.cu`.

        The table of entries lies on the device, too, and was checked by the caller. Raises
        `ValueError` for addresses that are not multiples of 16.
        """
        for address in (to, image, entries):
            if address % 16:
                raise ValueError(f"blocks lie at multiples of 16, not at {address:#x}")
        with self._cupy.cuda.ExternalStream(stream):
            arguments = (
                *map(self._pointer, (to, image, entries)),
                *map(self._cupy.int64, (first, count)),
            )
            grid = self._grid(count * VALUES // (_EXP7_VALUES * _THREADS))
            self._decode_exp7(grid, (_THREADS,), arguments)

    def _move(
        self,
        kernel: Any,
        to: int,
        start: int,
        blocks: Sequence[int],
        places: Sequence[int],
        planes: int,
        strides: tuple[int, int, int, int],
        stream: int,
    ) -> None:
        if len(blocks) != len(places):
            raise ValueError(f"{len(blocks)} blocks in {len(places)} places")
        if not blocks:
            return
        int64 = self._cupy.int64
        with self._cupy.cuda.ExternalStream(stream):
            indices = self._cupy.asarray([blocks, places], dtype=int64)
            arguments = (
                self._pointer(to),
                self._pointer(start),
                indices[0],
                indices[1],
                int64(len(blocks)),
                int64(planes),
                *map(int64, strides),
            )
            kernel(self._grid(len(blocks) * planes), (_THREADS,), arguments)

    def _pointer(self, address: int) -> Any:
        # CuPy takes 8-byte numbers for pointers, too; the type says which way it is meant.
        return self._cupy.uint64(address)

    def _grid(self, wanted: int) -> tuple[int]:
        return (max(1, min(wanted, self._most)),)
