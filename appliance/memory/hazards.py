"""Which transfer has to come after which: hazards between transfers over places.

A *place* is whatever two transfers can meet in: a slab of the host tier, a block of a model's KV,
the weights of a model. Pure bookkeeping; a stream does the waiting.

Of the three rules for swapping KV (Aegaeon, §5.3) these are the two between transfers, in general
form; the first, compute after its KV is in, is `Transfer.wait`:

    reads P    after the transfer that writes P now, never if that fails            (rule 2)
    writes P   after those that write or read P now, failed or not                 (rule 3)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from appliance.memory.transfers import Transfer


class TransferWaits(NamedTuple):
    """What a transfer waits for, see `appliance.memory.streams.Stream.run`."""

    needs: tuple[Transfer, ...]
    after: tuple[Transfer, ...]


class _Use:
    """Who uses a place: the last to write it, and those who read what that one writes."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer: Transfer | None = None
        self.readers: set[Transfer] = set()


class TransferBook:
    """The places of all transfers that are not known to be over. Not thread-safe.

    `enter` and `leave` take time in proportion to the places of the transfer and what it waits
    for. What a transfer that failed left at its places is undefined. Until it leaves the book,
    transfers that read them fail with it; then its owner knows, and decides what happens there.
    """

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use] = {}
        self._places: dict[Transfer, tuple[tuple[Hashable, ...], tuple[Hashable, ...]]] = {}

    def __len__(self) -> int:
        """Transfers in it."""
        return len(self._places)

    def enter(
        self, transfer: Transfer, reads: Iterable[Hashable], writes: Iterable[Hashable]
    ) -> TransferWaits:
        """Put a transfer behind all that are in the book already; what it must wait for."""
        reads, writes = tuple(reads), tuple(writes)
        needs = {use.writer for place in reads if (use := self._uses.get(place))}
        after: set[Transfer | None] = set()
        for place in writes:
            if use := self._uses.get(place):
                after.add(use.writer)
                after |= use.readers
        for place in reads:
            self._uses.setdefault(place, _Use()).readers.add(transfer)
        for place in writes:
            use = self._uses.setdefault(place, _Use())
            use.writer = transfer
            use.readers = set()
        self._places[transfer] = (reads, writes)
        return TransferWaits(
            needs=tuple(t for t in needs if t is not None),
            after=tuple(t for t in after - needs if t is not None),
        )

    def leave(self, transfer: Transfer) -> None:
        """Forget a transfer that is over. Raises `KeyError` if it is not in the book."""
        reads, writes = self._places.pop(transfer)
        for place in (*reads, *writes):
            use = self._uses.get(place)
            if use is None:
                continue
            use.readers.discard(transfer)
            if use.writer is transfer:
                use.writer = None
            if use.writer is None and not use.readers:
                del self._uses[place]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a place is kept for a transfer that is not in the book."""
        for place, use in self._uses.items():
            users = use.readers | ({use.writer} if use.writer is not None else set())
            if not users or not users <= self._places.keys():
                raise AssertionError(f"{place!r} is kept for transfers that are gone")
