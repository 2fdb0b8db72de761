"""Small files that say their own checksum and have a copy, which is used when they are damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from appliance.platform.durable import replace, sync_replaced

MAX_BYTES = 16 << 20

T = TypeVar("T")

log = logging.getLogger(__name__)


class Damaged(Exception):
    """A file does not hold what was written to it."""


def copy_of(path: Path) -> Path:
    """Where the copy of a file is."""
    return path.with_name(f"{path.name}.copy")


def read_whole(path: Path, check: Callable[[bytes], T], max_bytes: int = MAX_BYTES) -> T:
    """What `check` makes of the file, which gets one byte more than `max_bytes` at most. Raises
    `OSError`, and `Damaged` if `check` does.

    A copy that is behind the file goes, as it would bring back what was removed from it: also if
    the file was edited by hand, or is gone.
    """
    try:
        data = _read(path, max_bytes)
    except FileNotFoundError:
        _drop_copy(path)
        raise
    found = check(data)
    with suppress(OSError):
        if _read(copy_of(path), max_bytes) != data:
            _drop_copy(path)
    return found


def read_checked(path: Path, check: Callable[[bytes], T], max_bytes: int = MAX_BYTES) -> T:
    """The same, or what `check` makes of the copy if the file is damaged. Raises `Damaged` if there
    is no copy that is whole."""
    try:
        return read_whole(path, check, max_bytes)
    except Damaged as error:
        try:
            found = check(_read(copy_of(path), max_bytes))
        except (OSError, Damaged):
            raise error from None
        log.error("%s: %s; its copy %s is used", path, error, copy_of(path).name)
        return found


def write_checked(path: Path, data: bytes, prepare: Callable[[int], None] = lambda _: None) -> None:
    """Replace the file, and then its copy, each whole or not at all; `prepare` may give a
    descriptor another mode or owner. Raises `OSError` if the file is as before. That there is no
    copy is in the log only."""
    replace(path, [data], prepare)
    sync_replaced(path)
    try:
        replace(copy_of(path), [data], prepare)
        sync_replaced(copy_of(path))
    except OSError as error:
        log.warning("%s has no copy that is up to date: %s", path, error.strerror)
        _drop_copy(path)


def _drop_copy(path: Path) -> None:
    """A process that may not do so leaves that to one that may."""
    with suppress(OSError):
        copy_of(path).unlink(missing_ok=True)


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes + 1)
