"""The id that a client, its answer and its errors know a request by: ``x-request-id``."""

from __future__ import annotations

import uuid

from litestar.datastructures import Headers, MutableScopeHeaders
from litestar.types import Message, Scope

_LONGEST = 128


def request_id(scope: Scope) -> str:
    """The client's ``x-request-id`` if it can be given back, or one of our own; always the same
    one for the same request."""
    state = scope.setdefault("state", {})
    if (known := state.get("request_id")) is None:
        known = Headers.from_scope(scope).get("x-request-id", "")
        if not (known.isascii() and known.isprintable() and 0 < len(known) <= _LONGEST):
            known = uuid.uuid4().hex
        state["request_id"] = known
    return str(known)


async def name_answer(message: Message, scope: Scope) -> None:
    """Put the request's id into the headers of its answer, also under Anthropic's name."""
    if message["type"] != "http.response.start":
        return
    headers = MutableScopeHeaders.from_message(message)
    headers["x-request-id"] = headers["request-id"] = request_id(scope)
