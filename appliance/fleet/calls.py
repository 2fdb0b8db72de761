"""What goes between the front of a fleet and the proxies of its boxes, and which headers go on."""

from __future__ import annotations

from typing import Final, TypeAlias

from appliance.vocabulary import ModelName, Word

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
"""Those of one connection."""
_OF_REQUESTS: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
"""The proxy sends the whole body at once, to another host."""
_OF_ANSWERS: Final = _HOP_BY_HOP | {b"date", b"server"}
"""The server that the client talks to writes these itself."""


class Call(Word, frozen=True, kw_only=True):
    """A request of a client, to be sent to a box."""

    method: str
    target: bytes
    """Path and query, as the client wrote them."""
    headers: Headers = ()
    body: bytes = b""


class Hint(Word, frozen=True, kw_only=True):
    """What a router looks at: the model, the session or prefix, boxes that have refused."""

    model: ModelName = ""
    session: str = ""
    excluded: tuple[str, ...] = ()


class Head(Word, frozen=True, kw_only=True):
    """The status line and headers of a box's answer; its bytes follow."""

    box: str
    status: int
    headers: Headers = ()


class Failed(Word, frozen=True, kw_only=True):
    """The end of an answer that is not whole."""

    box: str
    reason: str
    taken: bool
    """Whether the box may have read the request, so that it must not be sent again."""


Item: TypeAlias = Head | bytes | Failed
"""Of an answer: one head, bytes as they come, and perhaps a failure."""


class Answer(Word, frozen=True, kw_only=True):
    """A whole answer of a box; status 0 if there was none."""

    box: str
    status: int
    headers: Headers = ()
    body: bytes = b""


def request_headers(headers: Headers) -> Headers:
    """Of a request, those that go on to a box: keys, traces and ids among them."""
    return _without(headers, _OF_REQUESTS)


def answer_headers(headers: Headers) -> Headers:
    """Of a box's answer, those that go on to the client."""
    return _without(headers, _OF_ANSWERS)


def _without(headers: Headers, stay: frozenset[bytes]) -> Headers:
    lower = tuple((name.lower(), value) for name, value in headers)
    named = {
        word.strip().lower()
        for name, value in lower
        if name == b"connection"
        for word in value.split(b",")
    }
    return tuple(row for row in lower if row[0] not in stay and row[0] not in named)
