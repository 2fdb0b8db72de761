"""Deletes the files of models that were removed: not before nobody reads them, and not half.

A mark beside the folder says that it is to go, from before the model is removed until the files
are. If the daemon ends meanwhile, the next one finds it, and finishes what was begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from appliance.api.settings import NotSaved

_MARK: Final = ".delete"
_ASIDE: Final = ".gone"

log = logging.getLogger("appliance.daemon")


def intend(folder: Path) -> None:
    """Mark a folder. Raises `NotSaved` for one that cannot be deleted, as far as can be told."""
    for path in (folder.parent, folder):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise NotSaved(f"{folder} cannot be deleted: {path} cannot be written; keep the files")
    try:
        _beside(folder, _MARK).touch()
    except OSError as error:
        raise NotSaved(f"{folder} cannot be deleted: {error.strerror}; keep the files") from error


def take_back(folder: Path) -> None:
    """It stays after all. Whether there is a mark does not matter."""
    with contextlib.suppress(OSError):
        _beside(folder, _MARK).unlink(missing_ok=True)


def set_aside(folder: Path) -> None:
    """Nobody finds the folder any more, nor half of it. Raises `OSError`."""
    aside = _beside(folder, _ASIDE)
    if aside.exists():  # of a deletion that failed
        shutil.rmtree(aside)
    folder.rename(aside)


def delete(folder: Path) -> None:
    """What was set aside, and the mark. Raises `OSError`."""
    shutil.rmtree(_beside(folder, _ASIDE))
    take_back(folder)


def finish(models: Path, wanted: Callable[[Path], bool]) -> None:
    """Delete what an earlier daemon was to delete in the folder `models`, but for what is `wanted`
    again. What cannot be deleted is logged, and tried again by the next one."""
    for kind, put_aside in ((_MARK, True), (_ASIDE, False)):
        for left in sorted(models.glob(f".*{kind}")):
            folder = left.with_name(left.name.removeprefix(".").removesuffix(kind))
            try:
                if put_aside and folder.is_dir():
                    if wanted(folder):
                        take_back(folder)
                        continue
                    set_aside(folder)
                if _beside(folder, _ASIDE).is_dir():
                    delete(folder)
                    log.info("%s was deleted, which an earlier daemon was to do", folder)
                else:  # somebody else did
                    take_back(folder)
            except OSError as error:
                log.error("%s cannot be deleted: %s", folder, error)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}{kind}")
