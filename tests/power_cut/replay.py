"""What a disk may hold after a power cut, from the notes of `recorder.c`.

What was synced is there. Of writes to a file that were not synced afterwards any may be there, and
of changes to folders as many as come before some point, as file systems with a journal keep their
order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple, TypeAlias

_SECTOR_BYTES = 512
_Write: TypeAlias = tuple[int, bytes] | int
"""An offset and what was written there, or the size that a file was cut to."""


class Inode:
    """A file: what is on the disk of it, and what was not synced yet."""

    def __init__(self) -> None:
        self.synced = b""
        self.pending: list[_Write] = []

    def sync(self) -> None:
        self.synced = _applied(self.synced, self.pending)
        self.pending = []

    def found(self, draw: random.Random | None) -> bytes:
        """What a cut leaves of it: without `draw`, no more than what was synced."""
        if draw is None:
            return self.synced
        kept: list[_Write] = []
        for write in self.pending:
            if draw.random() < 0.5:
                continue
            if isinstance(write, tuple) and draw.random() < 0.2:
                offset, data = write
                write = offset, data[: draw.randrange(len(data) + 1) & -_SECTOR_BYTES]
            kept.append(write)
        return _applied(self.synced, kept)


class Disk:
    """Files and folders below a root, on the disk and on their way there."""

    def __init__(self, root: PurePath) -> None:
        self._root = root
        self._inodes: dict[int, Inode] = {}
        self._synced: dict[PurePath, Inode | None] = {}
        """By path; None for a folder."""
        self._pending: list[tuple[str, ...]] = []
        """Changes of folders, in order."""
        self._created: dict[str, Inode] = {}

    def apply(self, words: Sequence[str]) -> None:
        """One line of the notes."""
        match words:
            case ["C", number, path]:
                inode = self._inodes[int(number)] = Inode()
                self._created[f"{len(self._created)}"] = inode
                self._pending.append(("C", f"{len(self._created) - 1}", path))
            case ["W", number, offset, data]:
                self._inodes[int(number)].pending.append((int(offset), bytes.fromhex(data)))
            case ["T", number, size]:
                self._inodes[int(number)].pending.append(int(size))
            case ["S", number]:
                self._inodes[int(number)].sync()
            case ["D", path]:
                self._sync_folder(PurePath(path))
            case ["M" | "U", _] | ["R", _, _]:
                self._pending.append(tuple(words))
            case _:
                raise AssertionError(words)

    def _sync_folder(self, folder: PurePath) -> None:
        left = []
        for change in self._pending:
            if PurePath(change[-1]).parent == folder:
                self._change(self._synced, change)
            else:
                left.append(change)
        self._pending = left

    def _change(self, files: dict[PurePath, Inode | None], change: tuple[str, ...]) -> None:
        match change:
            case ("C", number, path):
                files[PurePath(path)] = self._created[number]
            case ("M", path):
                files[PurePath(path)] = None
            case ("U", path):
                files.pop(PurePath(path), None)
            case ("R", old, new) if PurePath(old) in files:
                files[PurePath(new)] = files.pop(PurePath(old))

    def cut(self, folder: Path, draw: random.Random | None) -> None:
        """Put what a power cut leaves into a new folder. Without `draw`, nothing is left of what
        was not synced."""
        files = dict(self._synced)
        kept = 0 if draw is None else draw.randrange(len(self._pending) + 1)
        for change in self._pending[:kept]:
            self._change(files, change)
        folder.mkdir()
        for path in sorted(files):
            inode, target = files[path], folder / path.relative_to(self._root)
            if not target.parent.is_dir():
                continue  # its folder is not on the disk
            if inode is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(inode.found(draw))


class Cut(NamedTuple):
    """The disk at a point, and how many lines of `acks` came before."""

    line: int
    acks: list[str]
    disk: Disk


def cuts(notes: str, root: PurePath) -> Iterator[Cut]:
    """The disk after each line of the notes. It is the same object each time."""
    disk, acks = Disk(root), list[str]()
    for number, line in enumerate(notes.splitlines()):
        words = line.split(" ")
        if words[0] == "A":
            acks += bytes.fromhex(words[1]).decode().splitlines()
        elif not words[-1].endswith("/acks"):
            disk.apply(words)
        yield Cut(number, acks, disk)


def _applied(data: bytes, writes: Sequence[_Write]) -> bytes:
    content = bytearray(data)
    for write in writes:
        if isinstance(write, int):
            del content[write:]
            content.extend(bytes(write - len(content)))
        else:
            offset, new = write
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(new)] = new
    return bytes(content)
