"""Counts what clients got of what they were promised, of all models together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from appliance.service.autopilot import Promises
from appliance.service.generation import RequestStream
from appliance.service.interface import AskedSlo

NOT_COUNTED = -1
MOST_KEYS = 1000
"""That are remembered: of more, those that were active last."""
LEAST_PERIOD_SECONDS = 1.0
UNANSWERED_OF_A_STRANGER = 5
"""Of a key that has no answers, so many requests without one are reported after a change."""


@dataclass(slots=True)
class _Key:
    """What became of a key's requests. A period is as long as a watch, or ends with a change."""

    answered: int = 0
    """In this period."""
    before: int = 0
    """In the period before."""
    missed: int = 0
    """In this period, that had no answer and count."""
    reported: int = 0
    """Since the change of policies, that had no answer and are in `Promises.unanswered`."""

    @property
    def may_miss(self) -> int:
        """So many requests without an answer count in a period."""
        return max(self.answered, self.before)


class PromiseCount:
    """All that ever was, so that two of them say what was between: no counter in it ever falls.
    A call costs O(1), but the first of a period, which costs O(`MOST_KEYS`).

    What counts is what the policies that decide now are to answer for. So these do not:

    - Requests that came while others decided: these left them behind.
    - Requests with a service level of their own: it would be the client that says what is late.
    - What was cancelled, or failed, before it was due.
    - Requests without any answer, refused or too late, beyond as many as their key had answered in
      this period, or in the one before: a flood that is refused must not speak for all clients.
      The one before is needed to see a policy that starves a key: it answers nothing of it.
    """

    def __init__(self, changes: Callable[[], int], watch_seconds: Callable[[], float]) -> None:
        """`changes` says how often other policies came to decide, `watch_seconds` how long
        changes are watched now."""
        self._changes = changes
        self._watch_seconds = watch_seconds
        self._seen_changes = changes()
        self._since: float | None = None
        """When this period began."""
        self._tokens = self._late = self._requests = self._missed = self._unanswered = 0
        self._keys: OrderedDict[str | None, _Key] = OrderedDict()
        """Those that were active last are last."""

    def total(self, live: Iterable[RequestStream]) -> Promises:
        """Up to now, with requests that are under way. O(live)."""
        return Promises(
            tokens=self._tokens,
            late=self._late,
            requests=self._requests,
            missed=self._missed,
            unanswered=self._unanswered,
            on_time=sum(
                bool(stream.output) and not stream.counted and self._counts(stream)
                for stream in live
            ),
        )

    def arrived(self, stream: RequestStream) -> None:
        """A request is taken in."""
        self._begin_period(stream.arrived)
        own = stream.request.slo != AskedSlo()
        stream.policies = NOT_COUNTED if own else self._seen_changes

    def produced(self, stream: RequestStream, tokens: int, *, late: int) -> None:
        """So many of its tokens came, `late` of them late, or what was pooled; called before they
        are part of it."""
        if not self._counts(stream):
            return
        self._tokens += tokens
        if not stream.output:
            self._key(stream).answered += 1
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
            key = self._key(stream)
            # Of what was answered before, as many again may have been missed then.
            if key.reported < 2 * key.may_miss + UNANSWERED_OF_A_STRANGER:
                key.reported += 1
                self._unanswered += 1
            if key.missed < key.may_miss:
                key.missed += 1
                self._count(stream, missed=True)

    def _begin_period(self, now: float) -> None:
        """If the one before is over by time, or by a change of policies."""
        if self._since is None:
            self._since = now
        length = max(LEAST_PERIOD_SECONDS, self._watch_seconds())
        over, changes = int((now - self._since) / length), self._changes()
        for _ in range(min(over, 2)):  # after two without a request, nothing is left of it
            for key in self._keys.values():
                key.before, key.answered, key.missed = key.answered, 0, 0
        if changes != self._seen_changes:
            self._seen_changes = changes
            for key in self._keys.values():
                # This period may have been short.
                key.before, key.answered, key.missed, key.reported = key.may_miss, 0, 0, 0
            self._since = now
        elif over:
            self._since = now

    def _key(self, stream: RequestStream) -> _Key:
        name = stream.request.key
        key = self._keys.setdefault(name, _Key())
        self._keys.move_to_end(name)
        if len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)
        return key

    def _counts(self, stream: RequestStream) -> bool:
        return stream.policies == self._changes()

    def _count(self, stream: RequestStream, *, missed: bool) -> None:
        """Once for each request: one that was missed stays so."""
        if not stream.counted:
            stream.counted = True
            self._requests += 1
            self._missed += missed
