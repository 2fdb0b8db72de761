"""Measures how fast files are read from a disk: a bounded part of them, past the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from appliance.memory.weight_cache.pipeline import THREADS

CHUNK_BYTES: Final = 8 << 20
MOST_BYTES: Final = 1 << 30
MOST_SECONDS: Final = 1.5
PATTERN: Final = "*.safetensors"


class DiskRate(NamedTuple):
    """What was read, in bytes a second, and the share of it that the page cache had kept; None if
    the file system does not tell."""

    read: float
    read_bytes: int
    cached: float | None


class _Chunk(NamedTuple):
    descriptor: int
    offset: int
    nbytes: int


def file_systems(folders: Iterable[Path]) -> dict[Path, list[Path]]:
    """The weights of models in these folders, the largest files first, by the first folder of each
    file system. What cannot be read is left out."""
    found: dict[int, tuple[Path, list[tuple[int, Path]]]] = {}
    for folder in folders:
        for path in folder.glob(PATTERN):
            try:
                status = path.stat()
            except OSError:
                continue
            if status.st_size and os.access(path, os.R_OK):
                _, files = found.setdefault(status.st_dev, (folder, []))
                files.append((status.st_size, path))
    return {
        folder: [path for _, path in sorted(files, reverse=True)]
        for folder, files in found.values()
    }


def measure_disk(
    files: Sequence[Path],
    most_bytes: int = MOST_BYTES,
    seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskRate:
    """Read from the beginning of these files, in several threads as weights are, so many bytes or
    seconds at most. The page cache is to drop them before, and afterwards. Raises `OSError`.
    """
    descriptors = []
    try:
        chunks: list[_Chunk] = []
        for path in files:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            # What is not on the disk yet cannot be dropped.
            with contextlib.suppress(OSError):
                os.fdatasync(descriptors[-1])
            left = most_bytes - sum(chunk.nbytes for chunk in chunks)
            size = min(left, os.fstat(descriptors[-1]).st_size)
            chunks += _chunks(descriptors[-1], size)
            if size == left:
                break
        for chunk in chunks:
            _drop(chunk)
        kept = [_is_cached(chunk) for chunk in chunks]
        began = clock()
        done = _read(chunks, began + seconds, clock)
        took = clock() - began
        for chunk in chunks[:done]:
            _drop(chunk)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    nbytes = sum(chunk.nbytes for chunk in chunks[:done])
    known = [one for one in kept[:done] if one is not None]
    return DiskRate(nbytes / took, nbytes, sum(known) / done if len(known) == done else None)


def _chunks(descriptor: int, nbytes: int) -> Iterator[_Chunk]:
    for start in range(0, nbytes, CHUNK_BYTES):
        yield _Chunk(descriptor, start, min(CHUNK_BYTES, nbytes - start))


def _read(chunks: Sequence[_Chunk], end: float, clock: Callable[[], float]) -> int:
    """Read chunks in order until then, at least the first; how many were."""
    lock, taken = threading.Lock(), iter(range(len(chunks)))
    done: list[int] = []
    errors: list[OSError] = []

    def work() -> None:
        buffer = bytearray(CHUNK_BYTES)
        try:
            while not errors:
                with lock:
                    number = None if done and clock() >= end else next(taken, None)
                    if number is None:
                        return
                    done.append(number)
                chunk = chunks[number]
                view = memoryview(buffer)[: chunk.nbytes]
                if os.preadv(chunk.descriptor, [view], chunk.offset) != chunk.nbytes:
                    raise OSError(errno.EIO, "a file became shorter while it was read")
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(THREADS, len(chunks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(done)


def _drop(chunk: _Chunk) -> None:
    """What was read of it goes from the page cache, unless another process has it mapped."""
    descriptor, offset, nbytes = chunk
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _is_cached(chunk: _Chunk) -> bool | None:
    """Whether its first byte can be had without the disk; None if the file system does not say."""
    try:
        os.preadv(chunk.descriptor, [bytearray(1)], chunk.offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
