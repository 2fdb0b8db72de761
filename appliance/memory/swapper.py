"""The swapper: weights and KV that move during compute, one stream for each kind of transfer.

`start` puts a transfer in line, behind whatever else still reads or writes its places. What is to
happen when it is over (blocks that a swap out read become free, places in the host tier that a swap
in read become free) is its `then`. `reap` runs those of all that have ended: Aegaeon's move lists
and their reaper (§5.3). So nothing that decides or computes ever waits for the end of a transfer
only to reuse the memory under it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from appliance.memory.hazards import TransferBook
from appliance.memory.streams import Copy, Stream
from appliance.memory.transfers import Transfer, TransferKind

Then = Callable[[Transfer], None]


class _Started(NamedTuple):
    then: Then | None = None
    copies: Sequence[Copy] = ()
    """Those that are known beforehand; weights are copied as they come."""


class Swapper:
    """All transfers of one instance. One thread uses it; the streams have theirs.

    `on_end`, if any, is called from a stream's thread whenever a transfer is over and `reap` has
    something to do. It must return at once.
    """

    def __init__(
        self,
        stream: Callable[[str], Stream],
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """`stream` makes the streams: `Vmm.stream`. Raises what it raises."""
        self.on_end = on_end
        self._clock = clock
        self._streams: dict[TransferKind, Stream] = {}
        try:
            for kind in TransferKind:
                self._streams[kind] = stream(f"swap-{kind}")
        except BaseException:
            for made in self._streams.values():
                made.close()
            raise
        self._book = TransferBook()
        self._pending: dict[Transfer, _Started] = {}  # in the order of `start`
        self._ended: deque[Transfer] = deque()  # filled by the streams' threads

    @property
    def pending(self) -> int:
        """Transfers started and not reaped."""
        return len(self._pending)

    def start(
        self,
        kind: TransferKind,
        owner: str,
        copies: Iterable[Copy],
        *,
        nbytes: int,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
        then: Then | None = None,
    ) -> Transfer:
        """Have `copies`, `nbytes` bytes in all, done on the stream of this kind; returns at once.

        `reads` and `writes` name the places it touches. It waits for transfers started before it
        that write what it reads (and fails if they fail), or that read or write what it writes.
        `then` is called with it by `reap` once it is over, well or not; by then nothing of it
        touches its places any more. Raises `RuntimeError` once the swapper is closed.
        """
        transfer = Transfer(kind, owner, nbytes, self._clock())
        transfer.on_end = self._note
        order = self._book.enter(transfer, reads, writes)
        known = copies if isinstance(copies, Sequence) else ()
        self._pending[transfer] = _Started(then, known)
        try:
            self._streams[kind].run(transfer, copies, after=order.after, needs=order.needs)
        except RuntimeError:
            del self._pending[transfer]
            self._book.leave(transfer)
            raise
        return transfer

    def follow(self, transfer: Transfer) -> None:
        """Count a transfer in that another thread carries out, and that is not begun: it is reaped,
        settled and traced like those of `start`."""
        transfer.on_end = self._note
        self._book.enter(transfer, (), ())
        self._pending[transfer] = _Started()

    def reap(self) -> list[Transfer]:
        """Let go of the transfers that have ended since the last call: their `then`s run here.

        Takes time in proportion to those; none waits.
        """
        reaped: list[Transfer] = []
        while self._ended:
            transfer = self._ended.popleft()
            if transfer in self._pending:
                reaped.append(transfer)
                self._let_go(transfer)
        return reaped

    def under_way(self) -> list[tuple[Transfer, Sequence[Copy]]]:
        """The transfers that are not over, with their copies as far as those were known beforehand.
        May be called from any thread."""
        # One step of the interpreter: nothing is started or reaped within it.
        pending = list(self._pending.items())
        return [(transfer, started.copies) for transfer, started in pending if not transfer.done]

    def is_over(self, transfer: Transfer) -> bool:
        """Whether it has ended and was reaped."""
        return transfer not in self._pending

    def settle(self, transfers: Iterable[Transfer] | None = None) -> None:
        """Return when these transfers (all, if None) are over and reaped.

        How they ended is in each one's `error`; that they failed is not raised.
        """
        for transfer in list(self._pending if transfers is None else transfers):
            transfer.join()
            if transfer in self._pending:
                self._let_go(transfer)
        self.reap()

    def close(self) -> None:
        """Cancel what is under way, and return when all of it is over and reaped; idempotent."""
        for transfer in self._pending:
            transfer.cancel()
        for stream in self._streams.values():
            stream.close()
        self.settle()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the book holds anything but the pending transfers."""
        self._book.check_integrity()
        if len(self._book) != len(self._pending):
            raise AssertionError(f"{len(self._book)} in the book, {len(self._pending)} pending")

    def _let_go(self, transfer: Transfer) -> None:
        then = self._pending.pop(transfer).then
        self._book.leave(transfer)
        if then is not None:
            then(transfer)

    def _note(self, transfer: Transfer) -> None:
        """On a stream's thread."""
        self._ended.append(transfer)
        if self.on_end is not None:
            self.on_end()
