"""What a dialect on top of OpenAI's has to say: the request in OpenAI's words, and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import msgspec


class Translation(Protocol):
    """Of one request for a model of another server."""

    path: str
    """OpenAI's endpoint, which that server is asked in place of the client's."""
    fields: dict[str, msgspec.Raw]
    """Of the body there, without `model`."""
    ignored: tuple[str, ...]
    """Fields of the client's that nothing there obeys."""
    media_type: bytes
    """Of a stream."""
    placed: bytes
    """The whole answer, if that server is not to be asked; else empty."""

    def whole(self, said: dict[str, Any]) -> bytes:
        """The answer in one piece, of one as in `appliance.frontend.remote.said`. Raises
        `BadAnswer`."""

    def stream(self, chunks: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
        """A stream, of one as there. It has no end where `chunks` end without theirs."""


def raw(fields: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    """Fields as they are in a body; None is as good as left out."""
    return {
        name: msgspec.Raw(msgspec.json.encode(value))
        for name, value in fields.items()
        if value is not None
    }
