"""The virtual clock: what happens when, in one declared order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """What goes first of what happens at the same time.

    Who waits for bytes finds them; what is over frees its instance before it hears of more, and
    that before a new request asks for one; the policy is changed before the clock is read.
    """

    TRANSFER = 0
    JOB = 1
    ORDER = 2
    ARRIVAL = 3
    SWAP = 4
    TICK = 5


class ScheduledEvent:
    """Something that will happen, unless it is called off."""

    __slots__ = ("action", "seconds")

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self.seconds = seconds
        self.action: Callable[[], None] | None = action

    def call_off(self) -> None:
        """It will not happen; idempotent."""
        self.action = None


class Agenda:
    """A heap ordered by ``(time, rank, seq)``; `seq` counts entries, so nothing is ever a tie."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, ScheduledEvent]] = []
        self._entries = 0

    def at(self, seconds: float, rank: Rank, action: Callable[[], None]) -> ScheduledEvent:
        """Have `action` called at this time, which is not before now."""
        assert seconds >= self.now, "nothing happens in the past"
        entry = ScheduledEvent(seconds, action)
        self._entries += 1
        heapq.heappush(self._heap, (seconds, rank, self._entries, entry))
        return entry

    def step(self, until: float) -> bool:
        """Let the next thing happen; False, with the clock at `until`, if there is none by then."""
        while self._heap and self._heap[0][0] <= until:
            seconds, _, _, entry = heapq.heappop(self._heap)
            action = entry.action
            if action is not None:
                self.now = seconds
                action()
                return True
        self.now = until
        return False
