"""What a view asks for besides the state: when it is due, and the answer. No clock, no I/O.

Only the view on the screen asks: again and again, and at once when something happened that makes
an answer old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """Something to be asked while a view is on the screen."""

    method: str
    path: str
    every_seconds: float
    renewed_by: tuple[str, ...] = ()
    """Kinds of events after which it is asked at once."""


class Polled(NamedTuple):
    """The newest `document`, None before there was one; and why the last time had none, if so."""

    document: Any = None
    refused: str = ""


class Poller:
    """Each path is asked once at a time. An answer that was old before it came is asked again."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        self._under_way: set[str] = set()

    def due(self, asks: Iterable[Ask], now: float) -> list[Ask]:
        """Those to be asked now; the caller calls `ended` for each."""
        found = []
        for ask in asks:
            before = self._asked_at.get(ask.path)
            old = before is None or now - before >= ask.every_seconds
            if old and ask.path not in self._under_way:
                self._asked_at[ask.path] = now
                self._under_way.add(ask.path)
                found.append(ask)
        return found

    def ended(self, ask: Ask) -> None:
        """It was answered, or refused."""
        self._under_way.discard(ask.path)

    def outdate(self, asks: Iterable[Ask]) -> None:
        """What was answered to these, and will be to those under way, is old."""
        for ask in asks:
            self._asked_at.pop(ask.path, None)
