"""Drop-ins that the appliance writes: their first line is a checksum of all that follows."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path
from typing import Final

from appliance.platform.checked_file import (
    Damaged,
    copy_of,
    read_checked,
    read_whole,
    write_checked,
)

_BEGINS: Final = b"# checksum: "
_LINE: Final = _BEGINS + b"%08x of what follows; delete this line if you edit the file by hand"
"""Its words are a part of the format: a damaged one could make the file no TOML any more."""

log = logging.getLogger(__name__)


def read_text(path: Path) -> str:
    """The text of a configuration file, or of its copy if it is not as the appliance wrote it. A
    file without a checksum is read as it is. Raises `OSError` and `UnicodeDecodeError`."""
    try:
        data = read_checked(path, lambda data: _check(path, data))
    except Damaged as error:
        log.error("%s: %s; it has no copy, and is read as it is", path, error)
        data = path.read_bytes()
    return data.decode()


def read_whole_text(path: Path) -> str:
    """The text of a file that is to be changed. Raises `Damaged`, `OSError` and
    `UnicodeDecodeError`."""
    return read_whole(path, lambda data: _check(path, data)).decode()


def write_text(path: Path, text: str, mode: int) -> None:
    """Have the file, and its copy, say this behind its checksum. Raises `OSError`."""
    body = text.encode()
    data = _LINE % zlib.crc32(body) + b"\n" + body
    write_checked(path, data, lambda descriptor: os.fchmod(descriptor, mode))


def without_checksum(text: str) -> str:
    """What was to be written."""
    return text.partition("\n")[2] if text.startswith(_BEGINS.decode()) else text


def _check(path: Path, data: bytes) -> bytes:
    first, _, body = data.partition(b"\n")
    if first.startswith(_BEGINS):
        if first != _LINE % zlib.crc32(body):
            raise Damaged("its checksum differs (if you edited it, delete its first line)")
    elif copy_of(path).is_file() and copy_of(path).read_bytes().partition(b"\n")[2] == body:
        raise Damaged("its first line is damaged")
    return data
