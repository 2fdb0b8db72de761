"""Deletes the files of removed models: completely, and only when no process reads them any more.

    FOLDER, marked (.FOLDER.delete) --rename--> .FOLDER.gone --> nothing

A mark next to the folder says that it is to go, from before the model is removed until it is
set aside. If the daemon ends meanwhile, the next one finds either, and finishes what was begun. The
mark is of that folder as it was: not of another one that got its name since, nor of one to which
files were added since. If the folder is needed again, `take_back` removes the mark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from appliance.errors import NotSaved

_MARK: Final = ".delete"
_ASIDE: Final = ".gone"

log = logging.getLogger("appliance.daemon")


def intend(folder: Path) -> None:
    """Mark a folder. Raises `NotSaved` for one that cannot be deleted, as far as can be known."""
    for path in (folder.parent, folder):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise NotSaved(f"{folder} cannot be deleted: {path} cannot be written; keep the files")
    try:
        known = _known(folder) if folder.is_dir() else ""
        _beside(folder, _MARK).write_text(known, encoding="ascii")
    except OSError as error:
        raise NotSaved(f"{folder} cannot be deleted: {error.strerror}; keep the files") from error


def take_back(folder: Path) -> None:
    """It stays after all. Whether there is a mark does not matter."""
    with contextlib.suppress(OSError):
        _beside(folder, _MARK).unlink(missing_ok=True)


def set_aside(folder: Path) -> None:
    """Rename the folder, so that no reader finds it or a part of it, and remove the mark. Raises
    `OSError`, also if it is not what was marked."""
    aside = _beside(folder, _ASIDE)
    if aside.exists():  # of a deletion that failed
        shutil.rmtree(aside)
    if not is_marked(folder):
        raise OSError("it was changed or asked for since it was to be deleted")
    folder.rename(aside)
    take_back(folder)


def delete(folder: Path) -> None:
    """What was set aside. Raises `OSError`."""
    shutil.rmtree(_beside(folder, _ASIDE))


def finish(models: Path, wanted: Callable[[Path], bool]) -> None:
    """Delete what an earlier daemon was to delete in the folder `models`, but for what is `wanted`
    again, or not as it was. What cannot be deleted is logged, and tried again by the next one."""
    for kind in (_ASIDE, _MARK):
        for left in sorted(models.glob(f".*{kind}")):
            folder = left.with_name(left.name.removeprefix(".").removesuffix(kind))
            try:
                if kind == _ASIDE or _is_set_aside(folder, wanted):
                    delete(folder)
                    log.info("%s was deleted: an earlier daemon had marked it", folder)
            except OSError as error:
                log.error("%s cannot be deleted: %s", folder, error)


def _is_set_aside(folder: Path, wanted: Callable[[Path], bool]) -> bool:
    """Set aside what is still to go; else there is no mark any more. Raises `OSError`."""
    if folder.is_dir() and not wanted(folder):
        if is_marked(folder):
            set_aside(folder)
            return True
        log.warning("%s stays: it was changed since it was to be deleted", folder)
    take_back(folder)
    return False


def is_marked(folder: Path) -> bool:
    """Whether the folder is to be deleted, and is as it was then. Raises `OSError`, without a
    folder `FileNotFoundError`."""
    known = _known(folder)
    try:
        return _beside(folder, _MARK).read_text(encoding="ascii") == known
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _known(folder: Path) -> str:
    """By what it is known again. Inodes are given anew, so when it was changed is part of it."""
    found = folder.stat()
    return f"{found.st_ino} {found.st_ctime_ns}"


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}{kind}")
