"""A small disk for the daemon's state, which can be filled: a file system of its own where this
process may mount one, else a limit for the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

MIB = 1 << 20
STEP_BYTES = 1 << 16


class Disk(Protocol):
    """Where the daemon's state is."""

    how: str
    """What makes it full."""

    def fill(self, pid: int) -> None:
        """No byte more can be written by the process. Raises `ProcessLookupError`."""

    def free(self, pid: int) -> None:
        """There is room again."""


class Mounted:
    """A file system in memory, at a folder. It fills for every process, as a real one."""

    how = "a file system of its own (tmpfs)"

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, pid: int) -> None:
        with self._ballast.open("wb") as stream:
            size = 0
            for step in (MIB, STEP_BYTES, 4096):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(stream.fileno(), size, step)
                        size += step

    def free(self, pid: int) -> None:
        self._ballast.unlink(missing_ok=True)


class Limited:
    """No file of the daemon may grow (`RLIMIT_FSIZE`): that is EFBIG where a full disk is ENOSPC,
    and ends every process that does not expect it."""

    how = "a limit for the size of files (RLIMIT_FSIZE)"

    def fill(self, pid: int) -> None:
        self._limit(pid, 1)

    def free(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            self._limit(pid, resource.RLIM_INFINITY)

    def _limit(self, pid: int, size_bytes: int) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


@contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Disk]:
    """A disk of so much at an empty folder, gone afterwards with all that is on it."""
    if not _mount(folder, size_mib):
        yield Limited()
        return
    try:
        yield Mounted(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(folder: Path, size_mib: int) -> bool:
    """Whether this process may, and did."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "chaos", str(folder)]
    with suppress(FileNotFoundError):
        return not subprocess.run(command, capture_output=True, check=False).returncode
    return False
