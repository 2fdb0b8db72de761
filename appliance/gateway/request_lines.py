"""The path of a request and the size of its body, read from the first bytes of a connection."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

PEEK_BYTES: Final = 4096
"""A path that does not end within so many bytes is no path that front ends know."""
NOT_HTTP: Final = ""
"""The path of what is no request: the core answers it."""

_METHOD_BYTES: Final = 32
_END_OF_PATH: Final = re.compile(rb"[ ?#\r\n]")
_ORIGIN: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/]*")
"""Before the path of a request to a proxy (RFC 9112, 3.2.2)."""
_LENGTH: Final = re.compile(rb"\r?\ncontent-length:[ \t]*(\d{1,19})", re.IGNORECASE)
_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")


def path_of(begin: bytes) -> str | None:
    """The decoded path of the first request; None while `begin` does not say it yet."""
    method, space, target = begin.lstrip(b"\r\n").partition(b" ")
    if not space:
        wrong = len(method) > _METHOD_BYTES or b"\n" in method or len(begin) >= PEEK_BYTES
        return NOT_HTTP if wrong else None
    end = _END_OF_PATH.search(target)
    if end is None:
        return NOT_HTTP if len(begin) >= PEEK_BYTES else None
    path = target[: end.start()]
    if not path.startswith(b"/"):
        path = _ORIGIN.sub(b"", path, count=1)
    return unquote(path.decode("latin-1"), errors="replace") if path else NOT_HTTP


def body_bytes(begin: bytes) -> int:
    """The size of the first request's body, as far as `begin` says it; else 0."""
    end = _END_OF_HEAD.search(begin)
    found = _LENGTH.search(begin, 0, len(begin) if end is None else end.start())
    return 0 if found is None else int(found[1])
