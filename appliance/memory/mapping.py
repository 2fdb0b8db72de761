"""mmap(2) and munmap(2) at chosen addresses, which Python's ``mmap`` module does not offer.

Every error is an `OSError` whose text starts with the name of its errno.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

NO_ACCESS: Final = 0
READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
SHARED: Final = mmap.MAP_SHARED
POPULATE: Final = mmap.MAP_POPULATE
_MAP_FIXED: Final = 0x10
# Linux on x86-64 and arm64; Python has no name for either.
_MAP_NORESERVE: Final = 0x4000
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


def reserve(nbytes: int) -> int:
    """Address of a new range that nothing backs and nobody may touch."""
    return _mmap(None, nbytes, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE, -1, 0)


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


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses of this process; other Python threads run meanwhile."""
    ctypes.memmove(destination, source, nbytes)


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
