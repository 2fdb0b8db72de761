"""What a dashboard hears of a daemon, and whom it hears it from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

Document: TypeAlias = dict[str, Any]
"""A JSON object."""


class Kind(StrEnum):
    """What a message is."""

    STATE = "state"
    """All there is: `unix_seconds`, `missed` (whether it replaces events), `state`."""
    DELTA = "delta"
    """What changed: `unix_seconds`, `patch` (a JSON merge patch of the state)."""
    NOTICE = "notice"
    """Something happened: `number`, `unix_seconds`, `kind`, `facts`."""
    LOST = "lost"
    """Nothing arrives for now: `reason`, and `seconds` until it is tried again."""


class Message(NamedTuple):
    """`at` is the listener's clock, Unix seconds."""

    at: float
    kind: Kind
    data: Document


class PieceKind(StrEnum):
    """What a piece of a streamed answer is."""

    ASKED = "asked"
    """The question goes out."""
    BEGUN = "begun"
    """The answer is open: `request`, what the daemon knows it by."""
    DATA = "data"
    """An event of it, as the API tells it."""
    REMARK = "remark"
    """`text`, for readers of the stream itself."""


class AnswerPiece(NamedTuple):
    """`at` is the listener's clock, Unix seconds."""

    at: float
    part: PieceKind
    data: Document


class DaemonRefused(Exception):
    """The daemon does not do what it was asked, or cannot be reached; the text says why."""


class DaemonSource(Protocol):
    """A daemon, or a recording of one."""

    name: str
    """Where it is, for people."""
    live: bool
    """Whether something can be asked of it."""

    def follow(self) -> AsyncIterator[Message]:
        """All messages from now on. Ends with a recording, never with a daemon."""

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """The JSON that is answered. Raises `DaemonRefused`."""

    def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        """An answer of the OpenAI API as it arrives, to its end. Raises `DaemonRefused`, also if it
        breaks off. Closing the iterator early cancels the request."""
