"""What survives a power cut: files and folders that were written to the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

NEW = ".new-"
"""How the name of a file begins that is not whole yet: a kill may leave it behind."""

log = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """What was written to a file, or which files a folder has, is on the disk. A file that was
    created, renamed or replaced survives a power cut once its folder is, too. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, if it is not there, so that it survives a power cut. Raises `OSError`."""
    if not path.is_dir():
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def replace(
    path: Path, chunks: Iterable[bytes], prepare: Callable[[int], None] = lambda _: None
) -> int:
    """Put a file there, whole or not at all. Answers its size in bytes.

    It is a new file of mode 0600, never one that another user put there; `prepare` may give its
    descriptor another mode or owner. It is on the disk, but its folder is still to be synced.
    Raises `OSError`, and what `chunks` raise.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{NEW}{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
            prepare(stream.fileno())
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return size


def sync_replaced(path: Path) -> None:
    """A file that has just been replaced survives a power cut. If its folder cannot be synced that
    is logged only: the file is replaced, and callers must not be made to think that it is not."""
    try:
        sync(path.parent)
    except OSError as error:
        log.warning("%s: may be lost in a power cut: %s", path, error.strerror)
