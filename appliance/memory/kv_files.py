"""KV caches in files of a folder of their own: one for each request, checked when it is read.

A file holds the blocks of a request one after another. Its length and checksum are kept in memory,
so whatever happens to a file is found out, and no file means anything to the next process: it
deletes them all. Files are written and read past the page cache where the file system allows it
(`O_DIRECT`), as the page cache would take as much memory as they free; elsewhere their pages are
given back at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from appliance.errors import KvFolderError
from appliance.memory.host_tier import HostTier
from appliance.vocabulary import RequestId

SUFFIX: Final = ".kv"
LOCK: Final = "lock"
PROBE: Final = "probe"
PAGE_BYTES: Final = 4096
"""`O_DIRECT` wants addresses and lengths to be multiples of this, or of less."""
MOST_BLOCKS: Final = 256
"""So many are written or read by one call; the kernel allows 1,024."""


class KvDamaged(Exception):
    """A file does not hold what was written to it."""


class KvFile(NamedTuple):
    """What is known of a file that was written."""

    path: Path
    nbytes: int
    checksum: int


class KvFiles:
    """The files of live requests. Used by one thread at a time; each call waits for the disk."""

    def __init__(self, folder: Path, host: HostTier) -> None:
        """Makes the folder, locks it, and deletes the files of an earlier process.

        Raises `KvFolderError`.
        """
        self.folder = folder
        self._host = host
        self._files: dict[RequestId, KvFile] = {}
        self._written = 0
        """Files so far; each has its number for a name."""
        self._lock = -1
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(folder / LOCK, flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.glob(f"*{SUFFIX}"):
                path.unlink()
            self.direct = _takes_direct(folder / PROBE)
        except OSError as error:
            self.close()
            if error.errno == errno.EWOULDBLOCK:
                raise KvFolderError(
                    f"{folder} is used by another process; give each daemon a folder of its own"
                ) from error
            raise KvFolderError(f"{folder} cannot be used: {error.strerror}") from error

    def write(self, request: RequestId, offsets: Sequence[int], block_bytes: int) -> int:
        """Write the blocks at these places of the host tier, the KV of a request that has no file.
        Returns their bytes. Raises `OSError` if the disk refuses; then there is no file."""
        path = self.folder / f"{self._written}{SUFFIX}"
        self._written += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        direct = self._may_be_direct(offsets, block_bytes)
        checksum, at = 0, 0
        try:
            with _opened(path, flags, direct=direct) as fd:
                for blocks in self._views(offsets, block_bytes):
                    checksum = _checksum(blocks, checksum)
                    at += _move_all(os.pwritev, fd, blocks, at)
                if not direct:
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._files[request] = KvFile(path, at, checksum)
        return at

    def read(self, request: RequestId, offsets: Sequence[int], block_bytes: int) -> int:
        """Read the KV of a request to these places of the host tier, and delete its file. Returns
        its bytes.

        Raises `OSError` or `KvDamaged` if it is not what was written; it is deleted nevertheless,
        and the places hold anything.
        """
        file = self._files[request]
        checksum, at = 0, 0
        try:
            direct = self._may_be_direct(offsets, block_bytes)
            with _opened(file.path, os.O_RDONLY, direct=direct) as fd:
                if os.fstat(fd).st_size != file.nbytes:
                    raise KvDamaged(f"{file.path} does not have the length that was written")
                for blocks in self._views(offsets, block_bytes):
                    at += _move_all(os.preadv, fd, blocks, at)
                    checksum = _checksum(blocks, checksum)
            if checksum != file.checksum:
                raise KvDamaged(f"{file.path} does not hold what was written")
        finally:
            self.delete(request)
        return at

    def delete(self, request: RequestId) -> None:
        """Delete the file of a request, if it has one."""
        file = self._files.pop(request, None)
        if file is not None:
            with contextlib.suppress(OSError):  # what is left goes when the next process begins
                file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all files, and leave the folder to others."""
        for request in list(self._files):
            self.delete(request)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _may_be_direct(self, offsets: Sequence[int], block_bytes: int) -> bool:
        return self.direct and not any([n % PAGE_BYTES for n in (block_bytes, *offsets)])

    def _views(self, offsets: Sequence[int], block_bytes: int) -> Iterator[list[memoryview]]:
        """The blocks, as many at a time as one call takes."""
        for first in range(0, len(offsets), MOST_BLOCKS):
            some = offsets[first : first + MOST_BLOCKS]
            yield [self._host.view(offset, block_bytes) for offset in some]


def _takes_direct(path: Path) -> bool:
    """Whether the file system of the path can be written past the page cache. Raises `OSError` if
    it cannot be written at all."""
    try:
        _write_page(path, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _write_page(path, direct=False)
        return False
    return True


def _write_page(path: Path, *, direct: bool) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page, _opened(path, flags, direct=direct) as fd:
            os.pwrite(fd, page, 0)
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path, flags: int, *, direct: bool) -> Iterator[int]:
    """A descriptor of the file, past the page cache if it is to be."""
    past = os.O_DIRECT if direct else 0
    fd = os.open(path, flags | past | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _checksum(blocks: Sequence[memoryview], before: int) -> int:
    for block in blocks:
        before = zlib.crc32(block, before)
    return before


def _move_all(
    move: Callable[[int, list[memoryview], int], int], fd: int, blocks: list[memoryview], at: int
) -> int:
    """Write or read whole blocks at a place of the file, in as many calls as that takes. Returns
    their bytes. Raises `OSError` if the file ends before."""
    total, left = 0, blocks
    while left:
        moved = move(fd, left, at + total)
        if not moved:
            raise OSError(errno.EIO, "the file ended too early")
        total += moved
        left = _behind(left, moved)
    return total


def _behind(blocks: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of blocks of which so many bytes were moved."""
    for number, block in enumerate(blocks):
        if nbytes < len(block):
            return [block[nbytes:], *blocks[number + 1 :]]
        nbytes -= len(block)
    return []
