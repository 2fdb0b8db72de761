"""Several boxes as a source of the dashboard: its state is a row for each of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from tui.messages import AnswerPiece, DaemonRefused, Document, Kind, Message


class Watch(Protocol):
    """Asks boxes every second. The dashboard is started with one."""

    name: str
    """Which boxes, for people."""

    def follow(self) -> AsyncIterator[list[Document] | str]:
        """The rows of all boxes whenever there is news, or why there are none now. A row has
        `box`, `url` (empty if that is not known), `state`, `reason`; and the fields of
        ``GET /api/load``, if it says its load."""


class FleetSource:
    """Implements `DaemonSource`. Of the state, `boxes` are the rows by name, and `models` names
    all models that were met, for their colours."""

    live = True

    def __init__(self, watch: Watch, clock: Callable[[], float] = time.time) -> None:
        self.name = watch.name
        self._watch = watch
        self._clock = clock
        self._models: Document = {}

    async def follow(self) -> AsyncIterator[Message]:
        async for found in self._watch.follow():
            at = self._clock()
            if isinstance(found, str):
                yield Message(at, Kind.LOST, {"reason": found, "seconds": 0.0})
                continue
            for row in found:
                for model in row.get("catalogue", ()):
                    self._models.setdefault(model, {})
            boxes = {row["box"]: row for row in found}
            state = {"boxes": boxes, "models": dict(self._models)}
            data = {"unix_seconds": at, "missed": False, "state": state}
            yield Message(at, Kind.STATE, data)

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        raise DaemonRefused("a fleet answers nothing itself: open the dashboard of a box")

    async def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        raise DaemonRefused("a fleet answers nothing itself: open the dashboard of a box")
        yield  # it is a generator
