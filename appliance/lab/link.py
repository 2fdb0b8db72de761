"""A link that bytes travel on: transfers queue in lanes, and the lanes share the rate evenly.

As in a worker (`appliance.memory.swapper`) each kind of transfer has a stream of its own: a stream
does one after the other, and streams that share a direction of the bus take turns piece by piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from appliance.lab.agenda import Agenda, Entry, Rank

DONE_BYTES = 0.5
"""Below this nothing is left: what rounding leaves over of sizes and rates."""


class Transfer:
    """`nbytes` bytes on their way; the times are those of the clock, once they are known."""

    __slots__ = ("began", "ended", "left", "nbytes", "queued", "then")

    def __init__(self, nbytes: int, now: float, then: Callable[[Transfer], None]) -> None:
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.queued = now
        self.began: float | None = None
        self.ended: float | None = None
        self.then = then

    @property
    def seconds(self) -> float:
        """From its first byte to its last."""
        assert self.began is not None, "it has not begun"
        assert self.ended is not None, "it is not over"
        return self.ended - self.began

    @property
    def queued_seconds(self) -> float:
        assert self.began is not None, "it has not begun"
        return self.began - self.queued


class Link:
    """One direction of a bus, or a disk. O(lanes) for each transfer that begins or ends."""

    def __init__(self, agenda: Agenda, bytes_per_second: float) -> None:
        self._agenda = agenda
        self._rate = bytes_per_second
        self._lanes: dict[str, deque[Transfer]] = {}
        self._since = 0.0
        self._next: Entry | None = None

    def start(self, lane: str, nbytes: int, then: Callable[[Transfer], None]) -> Transfer:
        """Put a transfer in line; `then` is called with it when all of its bytes are there."""
        self._catch_up()
        transfer = Transfer(nbytes, self._agenda.now, then)
        self._lanes.setdefault(lane, deque()).append(transfer)
        self._go_on()
        return transfer

    def cancel(self, lane: str, transfer: Transfer) -> None:
        """Stop a transfer, under way or in line. Nobody is told."""
        self._catch_up()
        self._lanes[lane].remove(transfer)
        self._go_on()

    def _catch_up(self) -> None:
        """Count what has moved since the last look."""
        now = self._agenda.now
        heads = [line[0] for line in self._lanes.values() if line]
        moved = (now - self._since) * self._rate / max(1, len(heads))
        for head in heads:
            head.left -= moved
        self._since = now

    def _go_on(self) -> None:
        """The first of every lane moves; look again when one of them is there."""
        now = self._agenda.now
        if self._next is not None:
            self._next.call_off()
            self._next = None
        heads = [line[0] for line in self._lanes.values() if line]
        for head in heads:
            if head.began is None:
                head.began = now
        if heads:
            least = max(0.0, min(head.left for head in heads))
            arrival = now + least * len(heads) / self._rate
            self._next = self._agenda.at(arrival, Rank.TRANSFER, self._arrived)

    def _arrived(self) -> None:
        self._next = None
        self._catch_up()
        # The one this was planned for has nothing left, whatever rounding says.
        heads = [line[0] for line in self._lanes.values() if line]
        least = min(head.left for head in heads)
        over = [head for head in heads if head.left <= max(least, DONE_BYTES)]
        for line in self._lanes.values():
            if line and line[0] in over:
                line.popleft()
        self._go_on()
        for transfer in over:
            transfer.ended = self._agenda.now
            transfer.then(transfer)
