"""The kernels as C++ functions, built for this process."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from appliance.kernels import loader
from appliance.kernels.exp7 import Bytes, Table
from tests.stand_in import driver

_CANARY: Final = 0xA5


@functools.cache
def kernels() -> ctypes.CDLL:
    """The library of `kernels.cpp`; undefined behaviour in it ends the process."""
    with tempfile.TemporaryDirectory() as directory:
        library = driver.build(
            Path(__file__).with_suffix(".cpp"),
            Path(directory, "kernels.so"),
            "-I",
            str(Path(loader.__file__).parent),
            "-Wno-unknown-pragmas",
            "-fsanitize=undefined",
            "-fno-sanitize-recover=undefined",
            "-static-libubsan",
        )
        return ctypes.CDLL(str(library))


def decode_exp7(
    data: Bytes,
    table: Table,
    nbytes: int,
    launch: tuple[int, int, int] = (3, 70, 0),
    first: int = 0,
) -> Bytes:
    """What the kernel makes of the blocks in `data` from `first` on, `nbytes` in all. A `launch` is
    a grid, threads of a block, and whether the last thread runs first.

    Raises `AssertionError` if anything was written behind them.
    """
    image = _aligned(len(data))
    image[:] = data
    target = _aligned(nbytes + 64)
    target[:] = _CANARY
    kernels().run_decode_exp7(
        *launch,
        *(ctypes.c_void_p(array.ctypes.data) for array in (target, image, table)),
        ctypes.c_longlong(first),
        ctypes.c_longlong(len(table) - first),
    )
    assert (target[nbytes:] == _CANARY).all(), "written behind the end"
    return target[:nbytes]


def _aligned(nbytes: int) -> Bytes:
    """Bytes that begin at a multiple of 16, as on a device."""
    room = np.zeros(nbytes + 16, np.uint8)
    return room[-room.ctypes.data % 16 :][:nbytes]
