"""Safetensors files on disk: what their headers say, reading them, and noticing other ones.

A file is described once, when an engine is built. It is read much later, and again and again, so
every descriptor is compared with that description before its bytes are believed, and after.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.checkpoints.checksums import read_sums
from appliance.checkpoints.other_formats import refuse_pointer
from appliance.errors import CheckpointError

BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of an element of every type that safetensors knows."""


_INDEX: Final = "model.safetensors.index.json"
_VARIANTS: Final = "model.safetensors.index.*.json"
_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
_MAX_NAME: Final = 256
"""Characters of a tensor's name: names are compared with patterns that a checkpoint has."""


class TensorEntry(NamedTuple):
    """One tensor: `nbytes` bytes, row by row, `offset` bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file as it was when its header was read."""

    path: Path
    nbytes: int
    mtime_ns: int
    inode: int
    tensors: tuple[TensorEntry, ...]

    @contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor of this very file. Raises `CheckpointError` if it is another one by now,
        or is when the block ends: another process wrote to it."""
        fd = _open(self.path)
        try:
            self._compare(fd)
            yield fd
            self._compare(fd)
        finally:
            os.close(fd)

    def read_into(self, fd: int, buffers: Iterable[memoryview], offset: int) -> None:
        """Fill the buffers (of bytes), one after the other, with what lies from `offset` on.

        Other Python threads run meanwhile. Raises `CheckpointError` where the file ends too early
        or the disk fails.
        """
        views = list(buffers)
        while views:
            with io_errors(self.path):
                got = os.preadv(fd, views, offset)
            if not got:
                raise CheckpointError(
                    f"{self.path} is truncated: it ends before byte {offset} of {self.nbytes}; "
                    "put the whole file back"
                )
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views:
                views[0] = views[0][got:]

    def read_ahead(self, fd: int, offset: int, nbytes: int) -> None:
        """Have the system read these bytes from the disk, unless they seem to be in memory.

        Announcing bytes that are there costs a quarter of the time of reading them; trying the
        first of them without waiting costs next to nothing.
        """
        try:
            os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        except OSError:
            with io_errors(self.path):
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _compare(self, fd: int) -> None:
        with io_errors(self.path):
            status = os.fstat(fd)
        if status.st_size < self.nbytes:
            raise CheckpointError(
                f"{self.path} is truncated: {status.st_size} bytes of {self.nbytes}; "
                "put the whole file back"
            )
        found = (status.st_size, status.st_mtime_ns, status.st_ino)
        if found != (self.nbytes, self.mtime_ns, self.inode):
            raise CheckpointError(
                f"{self.path} was replaced while it was served: restart the daemon"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, by name; with an index, those it names.

    Without one, those of another variant do not count: an index of its own names them (that of
    Whisper large v3 in 32 bits).

    Raises `CheckpointError` if there is none, or one that the index names is missing.
    """
    files = sorted(directory.glob("*.safetensors"))
    index = directory / _INDEX
    if index.exists():
        named = _named(index)
        if missing := sorted(named - {file.name for file in files}):
            raise CheckpointError(f"{directory} lacks {missing[0]}, which {index.name} names")
        files = [file for file in files if file.name in named]
    else:
        others = {name for other in directory.glob(_VARIANTS) for name in _named(other)}
        files = [file for file in files if file.name not in others]
    if not files:
        raise CheckpointError(f"{directory} has no *.safetensors file")
    return files


def _named(index: Path) -> set[str]:
    """The files that an index names."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is corrupt: it has no weight_map") from error


def read_header(path: Path) -> WeightFile:
    """Describe a file from its header: the JSON behind an 8-byte little-endian length.

    Raises `CheckpointError` when the header is damaged, the file is not as long as it says, or it
    is no regular file.
    """
    refuse_pointer(path)
    with io_errors(path), open(_open(path), "rb") as stream:
        status = os.fstat(stream.fileno())
        size = status.st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes hold no header")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path} is truncated or corrupt: its header wants {length} bytes"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
        end = max((stop for _, stop in spans.values()), default=0)
        wanted = 8 + length + end
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError
    ) as error:  # fmt: skip
        raise CheckpointError(f"{path} is corrupt: its header cannot be read") from error
    if wanted != size:
        raise CheckpointError(
            f"{path} is truncated or corrupt: {size} bytes, its header wants {wanted}"
        )
    tensors = [_entry(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor.offset)
    return WeightFile(path, size, status.st_mtime_ns, status.st_ino, tuple(tensors))


def verify_sums(directory: Path) -> None:
    """Compare the files that ``SHA256SUMS`` lists with their checksums, if it is there.

    Raises `CheckpointError` for one that differs, is missing, or lies outside of the directory.
    """
    with io_errors(directory):
        checksums = read_sums(directory)
    for checksum in checksums:
        with io_errors(checksum.file):
            checksum.check()


def _open(path: Path) -> int:
    """A descriptor of a regular file. Opening a FIFO would wait for its writer, maybe for good."""
    with io_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    if not regular:
        os.close(fd)
        raise CheckpointError(f"{path} is no regular file: put the file itself there")
    return fd


@contextmanager
def io_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that names the file and the errno."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "an unknown error")
        raise CheckpointError(
            f"{path} cannot be read: {code} ({error.strerror}); check the disk and the permissions"
        ) from error


def _entry(path: Path, name: str, entry: Any, data: int) -> TensorEntry:
    """A tensor of a header whose data begins `data` bytes into the file."""
    if len(name) > _MAX_NAME:
        raise CheckpointError(
            f"{path} has a tensor {name[:80]}..., a name of {len(name)} characters; at most "
            f"{_MAX_NAME} are read: rename it"
        )
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
        nbytes = -(-math.prod(shape) * BITS.get(dtype, 0) // 8)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is corrupt: a tensor has no dtype or shape") from error
    if dtype not in BITS:
        raise CheckpointError(f"{path} has tensors of the unknown type {dtype}")
    if start < 0 or stop - start != nbytes or any(size < 0 for size in shape):
        raise CheckpointError(
            f"{path} is corrupt: {name} has {stop - start} bytes for {dtype} {list(shape)}"
        )
    return TensorEntry(name, dtype, shape, data + start, nbytes)
