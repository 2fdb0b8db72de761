"""mmap(2), munmap(2), madvise(2) and mlock(2) at chosen addresses, as Python does not offer them.

Every error is an `OSError` whose text starts with the name of its errno.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

NO_ACCESS: Final = 0
READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
SHARED: Final = mmap.MAP_SHARED
POPULATE: Final = mmap.MAP_POPULATE
HUGE_BYTES: Final = 2 << 20
"""A huge page of x86-64, and of arm64 with pages of 4 KiB."""
STREAMED_BYTES: Final = 1 << 20
"""From this size on a copy need not come to rest in a cache: it is not read again soon."""
_MAP_FIXED: Final = 0x10
# Linux on x86-64 and arm64; Python has no name for either.
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_STREAMED: Final = "glibc.cpu.x86_non_temporal_threshold"
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """That of a process that is to copy weights: what it inherits, and how large copies are made.

    glibc writes past the cache only what is larger than most of it, by the size that it sees: a
    virtual machine sees that of a whole socket. Pieces of weights then are copied at half the
    speed, as each line is read before it is overwritten. Can be set at a process's start only; a
    C library that does not know the name, or a user who set it, is left alone.
    """
    tunables = inherited.get("GLIBC_TUNABLES", "")
    if _STREAMED in tunables:
        return dict(inherited)
    mine = f"{_STREAMED}={STREAMED_BYTES}"
    return {**inherited, "GLIBC_TUNABLES": f"{tunables}:{mine}" if tunables else mine}


def reserve(nbytes: int, alignment: int = mmap.PAGESIZE) -> int:
    """Address of a new range that nothing backs and that may not be touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE
    if alignment <= mmap.PAGESIZE or nbytes < 1:
        return _mmap(None, nbytes, NO_ACCESS, flags, -1, 0)
    # The system aligns to pages only: take more, give back what is before and behind.
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    start = _mmap(None, size + alignment, NO_ACCESS, flags, -1, 0)
    address = -(-start // alignment) * alignment
    if address > start:
        release(start, address - start)
    if start + alignment > address:
        release(address + size, start + alignment - address)
    return address


def vacate(address: int, nbytes: int) -> None:
    """Make part of a reserved range what it was when `reserve` returned it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, nbytes, NO_ACCESS, flags, -1, 0)


def map_file(fd: int, offset: int, nbytes: int, *, at: int | None = None, flags: int = 0) -> int:
    """Map a file read-write and shared, at a reserved address if one is given."""
    fixed = 0 if at is None else _MAP_FIXED
    return _mmap(at, nbytes, READ_WRITE, SHARED | fixed | flags, fd, offset)


def release(address: int, nbytes: int) -> None:
    """Give an address range back to the system."""
    if _libc.munmap(address, nbytes) != 0:
        raise _error("munmap", nbytes)


def make_huge(address: int, nbytes: int) -> bool:
    """Have whole huge pages behind a mapped file's range, empty or not; whether the kernel did.

    What it refuses stays as it was. Done at once, not left to a later scan, so it does not depend
    on what ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` says, short of ``deny``.
    """
    if address % HUGE_BYTES or nbytes % HUGE_BYTES or nbytes < 1:
        return False
    if _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE) != 0:
        return False
    for start in range(address, address + nbytes, HUGE_BYTES):
        # A range with no page at all cannot be collapsed. One is read in, the rest need not be.
        ctypes.c_char.from_address(start).value  # noqa: B018
    return bool(_libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0)


def populate(address: int, nbytes: int) -> None:
    """Have memory behind a mapped range as if it had been written to; content stays."""
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        raise _error("madvise", nbytes)


def lock(address: int, nbytes: int) -> None:
    """Keep a mapped range in memory for as long as it is mapped."""
    if _libc.mlock(address, nbytes) != 0:
        raise _error("mlock", nbytes)


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses of this process; other Python threads run meanwhile."""
    ctypes.memmove(destination, source, nbytes)


def copy_rows(
    destination: int,
    source: int,
    nbytes: int,
    rows: int,
    destination_pitch: int,
    source_pitch: int,
) -> None:
    """Copy rows of `nbytes` bytes that lie a pitch apart; other Python threads run meanwhile.

    Pitches are those of `appliance.memory.streams.Copy`.
    """
    _rows(destination, nbytes, rows, destination_pitch)[...] = _rows(
        source, nbytes, rows, source_pitch
    )


def _rows(address: int, nbytes: int, rows: int, pitch: int) -> np.ndarray[Any, Any]:
    # Words rather than bytes where they fit: several times faster for rows of a few KiB. Not one
    # element per row, which would be as fast: numpy holds the interpreter for few elements.
    word = 8 if nbytes % 8 == 0 else 1
    span = view(address, (rows - 1) * pitch + nbytes)
    return np.ndarray((rows, nbytes // word), f"u{word}", span, 0, (pitch, word))


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address. The caller keeps them mapped for as long as the view lives."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    result: int | None = _libc.mmap(address, nbytes, prot, flags, fd, offset)
    if result is None or result == _FAILED:
        raise _error("mmap", nbytes)
    return result


def _error(call: str, nbytes: int) -> OSError:
    code = ctypes.get_errno()
    name = errno.errorcode.get(code, str(code))
    return OSError(code, f"{name} from {call} of {nbytes} bytes: {os.strerror(code)}")
