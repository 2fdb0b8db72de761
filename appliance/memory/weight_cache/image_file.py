"""Files that hold images of weights as an engine computes with them, in a folder of their own.

    magic | key | digests of the units | gap | the image | end of the file
                                             ^ a multiple of `PAGE_BYTES`

The key is a line of JSON that says what the image was made from, and how. A file is what is wanted
if it begins with the bytes that one written now would begin with, and if every unit of the image
has its digest. There is one file per checkpoint, type and rank, so there are never more than a
catalogue asks for. While one is written it has another name, and a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from appliance.checkpoints.adapters import AdapterRoom
from appliance.checkpoints.safetensors import WeightFile

SUFFIX: Final = ".packed"
UNWHOLE: Final = ".part"
MAGIC: Final = b"appliance: packed weights 1\n"
PAGE_BYTES: Final = 4096
UNIT_BYTES: Final = 1 << 20
"""What is read and has a digest: every call has its price, but it should stay in a cache."""
DIGEST_BYTES: Final = 8


class ImageRefused(Exception):
    """The file is not the image that is wanted, or not whole."""


class Head(msgspec.Struct, frozen=True):
    """All of a file but the image itself, which has `nbytes` bytes."""

    key: bytes
    nbytes: int

    @classmethod
    def of(cls, made_from: Mapping[str, object], nbytes: int) -> Head:
        """`made_from` is whatever decides the image's bytes, in JSON's types."""
        key = {"bytes": nbytes, "unit_bytes": UNIT_BYTES, **made_from}
        return cls(json.dumps(key, sort_keys=True).encode(), nbytes)

    @property
    def start(self) -> bytes:
        """What the file begins with."""
        return MAGIC + self.key + b"\n"

    @property
    def units(self) -> int:
        return -(-self.nbytes // UNIT_BYTES)

    @property
    def image_offset(self) -> int:
        """Where the image begins in the file."""
        end = len(self.start) + self.units * DIGEST_BYTES
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.image_offset + self.nbytes

    def begins(self, path: Path) -> bool:
        """Whether the file is there and claims to be this image."""
        try:
            with path.open("rb") as stream:
                return stream.read(len(self.start)) == self.start
        except OSError:
            return False

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[WeightFile, int, bytes]]:
        """The file at `path`, a descriptor of it, and the digests of its units, one after another.

        Raises `FileNotFoundError`, other `OSError`s, and `ImageRefused`.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if os.pread(fd, len(self.start), 0) != self.start:
                raise ImageRefused("it was made from other files, or in another way")
            if status.st_size != self.file_bytes:
                raise ImageRefused(f"it has {status.st_size} bytes, not {self.file_bytes}")
            digests = os.pread(fd, self.units * DIGEST_BYTES, len(self.start))
            file = WeightFile(path, status.st_size, status.st_mtime_ns, status.st_ino, ())
            yield file, fd, digests
        finally:
            os.close(fd)


def image_name(
    checkpoint: str,
    dtype: str,
    rank: int,
    ranks: int,
    adapters: Iterable[str] = (),
    room: AdapterRoom | None = None,
    embedding_task: str = "",
) -> str:
    """What the file of one rank's image is called, whatever is in it: one for each place. Paths of
    `adapters` that are in it, too, make it another place, and so do `room` for others, and the task
    of which it has the adapter."""
    parts = [checkpoint, dtype, rank, ranks, *adapters]
    if room is not None:
        parts.append([room.slots, room.rank])
    if embedding_task:
        parts.append({"embedding_task": embedding_task})
    place = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"{Path(checkpoint).name[:64]}-{place[:16]}{SUFFIX}"


def digest(views: Iterable[memoryview]) -> bytes:
    """Of the bytes of one unit, in any number of parts that end with a page, but for the last.

    Sums of the 64-bit words of every page, hashed: as fast as memory is read. It finds what disks
    and file systems do to files, a flipped bit or a page that is another one's; it is no defence
    against a user who changes the file on purpose.
    """
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for view in views:
        pages, rest = divmod(len(view), PAGE_BYTES)
        if pages:
            words: np.ndarray[Any, Any] = np.ndarray((pages, PAGE_BYTES // 8), "<u8", view)
            hashed.update(np.add.reduce(words, axis=1).data)
        if rest:
            hashed.update(view[-rest:])
    return hashed.digest()


def unwhole(path: Path) -> Path:
    """The name of an image while it is written."""
    return path.with_name(path.name + UNWHOLE)


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """A descriptor of the file at `path`, made if it is not there, locked by this process;
    None if another one has it locked. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd if _is_ours(fd, path) else None
    finally:
        os.close(fd)


def prepare_folder(folder: Path, wanted: Collection[str]) -> None:
    """Make the folder if it is not there, and remove images that are not `wanted`, by name, and
    unfinished ones that are not being written. Other files are left alone. Raises `OSError`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in filter(Path.is_file, folder.iterdir()):
        if path.name.endswith(SUFFIX + UNWHOLE):
            with locked(path) as fd:
                if fd is not None:
                    path.unlink()
        elif path.name.endswith(SUFFIX) and path.name not in wanted and _is_image(path):
            path.unlink()


def _is_image(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _is_ours(fd: int, path: Path) -> bool:
    """Lock an open file; False if another process has, or if the name is another file's by now."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_ino == path.stat().st_ino
    return False
