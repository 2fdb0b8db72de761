"""Whose request runs next: a bounded number at once, and owners of batches take turns. Sans-IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class BatchTurn(NamedTuple):
    """A request of a batch that may run."""

    batch: str
    request: int


class _Queue:
    def __init__(self, owner: str, requests: Iterable[int]) -> None:
        self.owner = owner
        self.waiting = deque(requests)
        self.not_before = 0.0


class Turns:
    """The requests that wait to run, of all batches.

    An owner's batches are served in the order in which they came, one after the other; after each
    request it is another owner's turn. What was put back makes its whole batch wait.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running: set[BatchTurn] = set()
        self._queues: dict[str, _Queue] = {}
        self._owners: deque[str] = deque()

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._running)

    def add(self, batch: str, owner: str, requests: Iterable[int]) -> None:
        """A batch came, with those of its requests that are to run."""
        self._queues[batch] = _Queue(owner, requests)
        if owner not in self._owners:
            self._owners.append(owner)

    def remove(self, batch: str) -> None:
        """No more of its requests are to begin. Those that run are still to be `ended`."""
        queue = self._queues.pop(batch, None)
        if queue is not None and not any(q.owner == queue.owner for q in self._queues.values()):
            self._owners.remove(queue.owner)

    def next(self, now: float) -> BatchTurn | None:
        """The request that runs now; None if none may. It is to be `ended`, or `put_back`."""
        if len(self._running) >= self._at_once:
            return None
        for _ in range(len(self._owners)):
            owner = self._owners[0]
            self._owners.rotate(-1)
            for batch, queue in self._queues.items():
                if queue.owner == owner and queue.waiting and queue.not_before <= now:
                    turn = BatchTurn(batch, queue.waiting.popleft())
                    self._running.add(turn)
                    return turn
        return None

    def ended(self, turn: BatchTurn) -> None:
        """It does not run any more, and will not again."""
        self._running.discard(turn)

    def put_back(self, turn: BatchTurn, not_before: float) -> None:
        """It could not run: it is its batch's next one, at a later time."""
        self._running.discard(turn)
        queue = self._queues.get(turn.batch)
        if queue is not None:
            queue.waiting.appendleft(turn.request)
            queue.not_before = max(queue.not_before, not_before)

    def next_time(self, now: float) -> float | None:
        """When to ask again though nothing ends before; None if that would be in vain."""
        if len(self._running) >= self._at_once:
            return None
        later = (q.not_before for q in self._queues.values() if q.waiting and q.not_before > now)
        return min(later, default=None)
