"""Counts what clients got of what they were promised, of all models together."""

from __future__ import annotations

from collections.abc import Callable

from appliance.service.autopilot import Promises
from appliance.service.generation import RequestStream
from appliance.service.interface import AskedSlo

NOT_COUNTED = -1
MOST_ANSWERED = 1000
"""Of a key, that are remembered: so many of its requests without an answer may count at once."""


class PromiseCount:
    """All that ever was, so that two of them say what was between: nothing in it ever falls. Every
    call costs O(1), and memory is held for each key.

    What counts is what the policies that decide now are to answer for. So these do not:

    - Requests that came while others decided: these left them behind.
    - Requests with a service level of their own: it would be the client that says what is late.
    - What was cancelled, or failed, before it was due.
    - Requests without any answer, refused or too late, beyond as many as their key had answered
      since the policies were changed: a flood that is refused must not speak for all clients.
    """

    def __init__(self, changes: Callable[[], int]) -> None:
        """`changes` says how often other policies came to decide."""
        self._changes = changes
        self._seen_changes = changes()
        self._tokens = self._late = self._requests = self._missed = self._unanswered = 0
        self._answered: dict[str | None, int] = {}
        """By key: answered requests, less those without an answer that count for them."""

    @property
    def total(self) -> Promises:
        """Up to now."""
        return Promises(
            tokens=self._tokens,
            late=self._late,
            requests=self._requests,
            missed=self._missed,
            unanswered=self._unanswered,
        )

    def arrived(self, stream: RequestStream) -> None:
        """A request is taken in."""
        own = stream.request.slo != AskedSlo()
        stream.policies = NOT_COUNTED if own else self._changes()

    def produced(self, stream: RequestStream, tokens: int, *, late: int) -> None:
        """So many of its tokens came, `late` of them late, or what was pooled; called before they
        are part of it."""
        if not self._counts(stream):
            return
        self._tokens += tokens
        if not stream.output:
            key = stream.request.key
            self._answered[key] = min(MOST_ANSWERED, self._answered.get(key, 0) + 1)
        if late:
            self._late += late
            self._count(stream, missed=True)

    def completed(self, stream: RequestStream) -> None:
        """It has all that was asked for."""
        if self._counts(stream):
            self._count(stream, missed=False)

    def broken(self, stream: RequestStream) -> None:
        """A policy refused it, or its next token is late already. May be said again."""
        if not self._counts(stream):
            return
        if stream.output:
            self._count(stream, missed=True)
        elif not stream.unanswered:
            stream.unanswered = True
            self._unanswered += 1
            key = stream.request.key
            if left := self._answered.get(key, 0):
                self._answered[key] = left - 1
                self._count(stream, missed=True)

    def _counts(self, stream: RequestStream) -> bool:
        changes = self._changes()
        if changes != self._seen_changes:
            self._seen_changes = changes
            self._answered.clear()
        return stream.policies == changes

    def _count(self, stream: RequestStream, *, missed: bool) -> None:
        """Once for each request: one that was missed stays so."""
        if not stream.counted:
            stream.counted = True
            self._requests += 1
            self._missed += missed
