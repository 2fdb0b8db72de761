"""The server errors that docs/api.md lists, and whether an answer is one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

_PAGE: Final = Path(__file__).parents[2] / "docs" / "api.md"
_ROW: Final = re.compile(r"^\| `(\w+)` \| (5\d\d) \|", re.MULTILINE)
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
_LENGTH: Final = re.compile(rb"^content-length: (\d+)\r$", re.IGNORECASE | re.MULTILINE)

DEFECTS: Final = frozenset({"front_end_lost", "internal_error", "model_failed", "model_not_served"})
"""What is listed and must not happen all the same: the target's front ends and models work."""

_MESSAGES: Final = {
    "model_draining": "is being drained",
    "no_instance": "is quarantined",
    "shutting_down": "shutting down",
    "starting": "no front end can take the request",
}
"""What the messages of dialects without codes say, for those that a target can answer."""


class Answer(NamedTuple):
    """An answer as it came over a connection."""

    status: int
    body: bytes | None
    """None: it was not read to its end, or its length was not announced."""


@cache
def codes() -> dict[str, int]:
    """The status of each code that is listed."""
    return {code: int(status) for code, status in _ROW.findall(_PAGE.read_text(encoding="utf-8"))}


def answers(got: bytes) -> Iterator[Answer]:
    """All answers in the bytes of a connection."""
    for line in _STATUS.finditer(got):
        head, ended, rest = got[line.end() :].partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        whole = ended and length is not None and len(rest) >= int(length[1])
        yield Answer(int(line[1]), rest[: int(length[1])] if whole and length else None)


def is_undocumented(answer: Answer) -> bool:
    """Whether it is a server error that no client has to expect. Of one that was cut off only the
    status can tell."""
    if answer.status < 500:
        return False
    listed = {code: status for code, status in codes().items() if code not in DEFECTS}
    if answer.status not in listed.values():
        return True
    if answer.body is None:
        return False
    try:
        told = json.loads(answer.body)
    except ValueError:
        return True
    is_readiness = answer.status == 503 and told.get("ok") is False and "reasons" in told
    return not is_readiness and listed.get(_code(told.get("error"))) != answer.status


def _code(error: Any) -> str:
    """The code of an error; where a dialect has none, the one that its message is of."""
    if isinstance(error, dict) and error.get("code"):
        return str(error["code"])
    message = error.get("message", "") if isinstance(error, dict) else str(error)
    return next((code for code, words in _MESSAGES.items() if words in message), "")
