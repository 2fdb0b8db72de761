"""Events of the daemon for its followers: a ring buffer of the newest notices.

A follower keeps a number, not a queue. A follower that falls further behind than the ring reaches
is notified to take a snapshot instead, so a slow follower costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from itertools import islice

import msgspec

CAPACITY = 1000
BATCH = 100
"""Notices that are handed out at once, at most."""


class NoticeKind(StrEnum):
    """What can happen."""

    REQUEST_ARRIVED = "request_arrived"
    REQUEST_ENDED = "request_ended"
    REQUEST_REJECTED = "request_rejected"
    MODEL_SWITCHED = "model_switched"
    MODEL_LOADED = "model_loaded"
    MODEL_EVICTED = "model_evicted"
    MODEL_FAILED = "model_failed"
    MODEL_LOAD_REQUESTED = "model_load_requested"
    MODEL_EVICT_REQUESTED = "model_evict_requested"
    MODEL_CHANGED = "model_changed"
    ADAPTERS_CHANGED = "adapters_changed"
    MODEL_ADDED = "model_added"
    MODEL_REMOVING = "model_removing"
    MODEL_REMOVED = "model_removed"
    INSTANCE_UP = "instance_up"
    INSTANCE_LOST = "instance_lost"
    INSTANCE_QUARANTINED = "instance_quarantined"
    INSTANCE_RELEASED = "instance_released"
    POLICIES_CHOSEN = "policies_chosen"
    CONFIG_RELOADED = "config_reloaded"
    AUTOPILOT = "autopilot"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened: `number` counts up, `facts` say what it concerns."""

    number: int
    unix_seconds: float
    kind: NoticeKind
    facts: dict[str, object]


class EventLog:
    """Written by the daemon, followed by any number of readers on the same event loop."""

    def __init__(
        self, capacity: int = CAPACITY, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self.newest = int(unix_clock() * 1e6)
        """The number of the newest notice. It begins with the time, so that a number from before a
        restart is behind the ring."""
        self._ring: deque[Notice] = deque(maxlen=capacity)
        self._unix_clock = unix_clock
        self._followers: set[asyncio.Event] = set()
        self._closed = False

    def tell(self, kind: NoticeKind, **facts: object) -> None:
        """It happened now. O(followers)."""
        self.newest += 1
        self._ring.append(
            Notice(number=self.newest, unix_seconds=self._unix_clock(), kind=kind, facts=facts)
        )
        self._wake()

    def close(self) -> None:
        """Nothing more will happen: everybody hears what there is, and no more."""
        self._closed = True
        self._wake()

    async def follow(self, after: int | None) -> AsyncIterator[list[Notice] | None]:
        """All that happens after the notice of this number, in batches. None replaces what was
        missed, and comes first without a number: the state as it is then takes its place."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            while True:
                news.clear()
                if after is None or not self.newest - len(self._ring) <= after <= self.newest:
                    after = self.newest
                    yield None
                elif batch := self._behind(after):
                    after = batch[-1].number
                    yield batch
                elif self._closed:
                    return
                else:
                    await news.wait()
        finally:
            self._followers.discard(news)

    def _behind(self, number: int) -> list[Notice]:
        first = len(self._ring) - (self.newest - number)
        return list(islice(self._ring, first, first + BATCH))

    def _wake(self) -> None:
        for news in self._followers:
            news.set()
