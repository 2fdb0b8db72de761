"""Frames from the daemon, sorted by when they take effect."""

from __future__ import annotations

import queue
import threading

from appliance.vocabulary import (
    Preempt,
    Release,
)
from appliance.worker import frames


class Wake:
    """In the mailbox: a transfer ended, there is something to reap."""


class Mailbox:
    """Frames from the daemon, sorted by when they take effect."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[frames.Down | Wake] = queue.SimpleQueue()
        self.guides: queue.SimpleQueue[frames.PrepareGuide] = queue.SimpleQueue()
        """For another thread than the one that computes."""
        self.slabs_asked = threading.Event()
        """Likewise; set again or not, it is one question."""
        self._lock = threading.Lock()
        self._releases: list[Release] = []
        self._ahead: set[str] = set()
        self._preempted = 0

    def wake(self) -> None:
        """Have the worker look around, if it waits for a command. Called from any thread."""
        self.commands.put(Wake())

    def put(self, message: frames.Down) -> None:
        if isinstance(message, Release):
            with self._lock:
                self._releases.append(message)
                self._ahead.add(message.request)
            self.commands.put(message)
        elif isinstance(message, Preempt):
            self._preempted = max(self._preempted, message.turn)
        elif isinstance(message, frames.PrepareGuide):
            self.guides.put(message)
        elif isinstance(message, frames.ReportSlabs):
            self.slabs_asked.set()
        else:
            self.commands.put(message)

    def preempted(self, turn: int) -> bool:
        """Whether this turn (or a later one) was preempted."""
        return turn <= self._preempted

    def released(self, request: str) -> bool:
        """Whether a release of this request waits further down the queue."""
        return request in self._ahead

    def reached(self, release: Release) -> None:
        """The release was met in the queue: what follows may concern the request anew."""
        with self._lock:
            self._ahead.discard(release.request)

    def take_releases(self) -> list[Release]:
        """The releases that came since the last call."""
        if not self._releases:
            return []
        with self._lock:
            releases, self._releases = self._releases, []
        return releases
