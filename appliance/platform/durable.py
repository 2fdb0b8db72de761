"""What survives a power cut: files and folders that were written to the disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """What was written to a file, or which files a folder has, is on the disk. A file that was
    created, renamed or replaced survives a power cut once its folder is, too. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_replaced(path: Path) -> None:
    """A file that has just been replaced survives a power cut. If its folder cannot be synced that
    is logged only: the file is replaced, and callers must not be made to think that it is not."""
    try:
        sync(path.parent)
    except OSError as error:
        log.warning("%s: may be lost in a power cut: %s", path, error.strerror)
