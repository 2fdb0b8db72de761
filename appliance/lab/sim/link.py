"""Links that bytes travel on: transfers queue in lanes, and the lanes share the rate evenly.

As in a worker (`appliance.memory.swapper`) each kind of transfer has a stream of its own: a stream
does one after the other, and streams that share a direction of the bus take turns piece by piece.
Links under one root share its rate evenly, too, as far as they are in use; a link may be under
several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from appliance.lab.sim.event_queue import Agenda, Rank, ScheduledEvent

DONE_BYTES = 0.5
"""Below this nothing is left: what rounding leaves over of sizes and rates."""


class LinkTransfer:
    """`nbytes` bytes on their way; the times are those of the clock, once they are known."""

    __slots__ = ("began", "ended", "left", "nbytes", "queued", "then")

    def __init__(self, nbytes: int, now: float, then: Callable[[LinkTransfer], None]) -> None:
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


class Carrier(Protocol):
    """What carries transfers: a link, or a link with what relays for it."""

    def start(self, lane: str, nbytes: int, then: Callable[[LinkTransfer], None]) -> LinkTransfer:
        """Put a transfer in line; `then` is called with it when all of its bytes are there."""
        ...

    def cancel(self, lane: str, transfer: LinkTransfer) -> None:
        """Stop a transfer, under way or in line, without a notice."""
        ...


class Root:
    """What links share: each that is in use gets at most an even share of `bytes_per_second`.

    Only where that is less than a link's own rate does it matter; then a link that begins to be in
    use, or is not any more, costs O(lanes) for every other one that is, else O(1).
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._used: dict[Link, None] = {}
        self._fastest = 0.0
        """The largest own rate of a link."""
        self._dealt = 0.0

    @property
    def share(self) -> float:
        """Of each link that is in use."""
        return self._rate / max(1, len(self._used))

    def enter(self, link: Link) -> None:
        """A link begins to be in use."""
        self._used[link] = None
        self._fastest = max(self._fastest, link.own_rate)
        self._deal()

    def leave(self, link: Link) -> None:
        """It is not any more."""
        del self._used[link]
        self._deal()

    def _deal(self) -> None:
        share = min(self.share, self._fastest)
        if share != self._dealt:
            self._dealt = share
            for link in self._used:
                link.take_shares()


class Link:
    """One direction of a bus, or a disk. O(lanes) for each transfer that begins or ends."""

    def __init__(self, agenda: Agenda, bytes_per_second: float, *roots: Root) -> None:
        self._agenda = agenda
        self.own_rate = self._rate = bytes_per_second
        self._roots = roots
        self._used = False
        self._lanes: dict[str, deque[LinkTransfer]] = {}
        self._since = 0.0
        self._next: ScheduledEvent | None = None

    def start(self, lane: str, nbytes: int, then: Callable[[LinkTransfer], None]) -> LinkTransfer:
        """Put a transfer in line; `then` is called with it when all of its bytes are there."""
        self._catch_up()
        transfer = LinkTransfer(nbytes, self._agenda.now, then)
        self._lanes.setdefault(lane, deque()).append(transfer)
        self._go_on()
        return transfer

    def cancel(self, lane: str, transfer: LinkTransfer) -> None:
        """Stop a transfer, under way or in line, without a notice."""
        self._catch_up()
        self._lanes[lane].remove(transfer)
        self._go_on()

    def take_shares(self) -> None:
        """From now on no more than its share of each root, and no more than its own rate."""
        rate = min(self.own_rate, *[root.share for root in self._roots])
        if rate != self._rate:
            self._catch_up()
            self._rate = rate
            self._plan()

    def _catch_up(self) -> None:
        """Count what has moved since the last look."""
        now = self._agenda.now
        heads = [line[0] for line in self._lanes.values() if line]
        moved = (now - self._since) * self._rate / max(1, len(heads))
        for head in heads:
            head.left -= moved
        self._since = now

    def _go_on(self) -> None:
        """The first of every lane moves; links that share a root are notified if that is new."""
        used = any(self._lanes.values())
        if used != self._used:
            for root in self._roots:
                (root.enter if used else root.leave)(self)
            if used and self._roots:
                self.take_shares()
        self._used = used
        self._plan()

    def _plan(self) -> None:
        """Look again when the first transfer of a lane is there."""
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
