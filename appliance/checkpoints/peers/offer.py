"""Files of a checkpoint that a box offers to others: their names, sizes and SHA-256.

They are those that a pull takes (`sources.is_taken`), so no pickle and no code, and none that lies
outside of the checkpoint's folder. All of it waits for the disk.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from appliance.checkpoints.checksums import read_sums
from appliance.checkpoints.sources import DirectorySource, chosen
from appliance.errors import CheckpointError, PullError

_PIECE_BYTES: Final = 1 << 20
MAX_KNOWN: Final = 100_000
"""Digests that are remembered."""


class NotOffered(PullError):
    """A checkpoint, or a file of it, that is not given to others as it lies there."""


class State(NamedTuple):
    """A file as it was: another one, or one that was written to, has another."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class OfferedFile(NamedTuple):
    """A file by its name in the checkpoint, and where it lies."""

    name: str
    path: Path
    state: State
    listed: str = ""
    """Its SHA-256 by the checkpoint's ``SHA256SUMS``."""

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    @property
    def modified(self) -> int:
        """Unix seconds."""
        return self.state.modified_ns // 1_000_000_000

    def open(self) -> BinaryIO:
        """Raises `NotOffered` if it is not what was listed any more, `OSError`."""
        # A pipe may have taken its place by now, and would be waited for.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or State.of(found) != self.state:
                raise NotOffered(f"{self.name} has changed meanwhile; ask again")
        except BaseException:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb", buffering=0)


def offered(folder: Path) -> dict[str, OfferedFile]:
    """The files of a checkpoint, by name.

    Raises `NotOffered` if one is a link that leads out of the folder, `PullError` for what no pull
    would take, `OSError`.
    """
    top = folder.resolve(strict=True)
    taken, _ = chosen("the checkpoint", DirectorySource(top).listing())
    sums = _listed(top)
    return {name: _offered(top, name, sums.get(name, "")) for name in sorted(taken)}


def _offered(top: Path, name: str, listed: str) -> OfferedFile:
    path = (top / name).resolve(strict=True)
    if not path.is_relative_to(top):
        raise NotOffered(
            f"{name} is a link that leads out of the checkpoint's folder, so it is not offered; "
            "serve a copy, which `appliance pull FOLDER --name NAME` makes of what links lead to"
        )
    return OfferedFile(name, path, State.of(path.stat()), listed)


def _listed(top: Path) -> dict[str, str]:
    try:
        sums = read_sums(top)
    except CheckpointError:
        return {}  # a pull reports it
    return {one.file.relative_to(top).as_posix(): one.expected for one in sums}


class Digests:
    """SHA-256 of files, each found once for a state of it. Those of ``SHA256SUMS`` are taken from
    there: a file that differs from it is damaged, and a pull finds that out."""

    def __init__(self) -> None:
        self._found: dict[State, str] = {}

    def of(self, file: OfferedFile) -> str | None:
        """None until it is found."""
        return file.listed or self._found.get(file.state)

    def find(self, files: Iterable[OfferedFile]) -> None:
        """Read those that are not known. One that changes, or cannot be read, is left out: it is
        found when its new state is asked for."""
        for file in files:
            if self.of(file) is None and (digest := _digest(file)):
                while len(self._found) >= MAX_KNOWN:
                    del self._found[next(iter(self._found))]
                self._found[file.state] = digest


def _digest(file: OfferedFile) -> str:
    digest = hashlib.sha256()
    try:
        with file.open() as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
            unchanged = State.of(os.fstat(stream.fileno())) == file.state
    except (OSError, NotOffered):
        return ""
    return digest.hexdigest() if unchanged else ""
