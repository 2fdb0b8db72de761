"""Pieces of an image, made by a few threads at once, that land in the order in which they lie."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from appliance.memory.transfers import Transfer, TransferCancelled

THREADS: Final = 8


class Piece(Protocol):
    """`nbytes` bytes of the image, at `offset`."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Piece)
P_contra = TypeVar("P_contra", bound=Piece, contravariant=True)


class Bench(Protocol[P_contra]):
    """What one thread works with."""

    def announce(self, piece: P_contra) -> None:
        """This piece will be made before long: have the system read ahead what it is made of."""

    def make(self, piece: P_contra) -> None:
        """Put the piece in its place."""


def make_pieces(
    pieces: Sequence[P],
    transfer: Transfer,
    bench: Callable[[], Bench[P]],
    cpus: Collection[int],
) -> None:
    """Have all pieces made, by threads on these processors; `bench` is called in each of them.

    A piece lands when all before it have, so a wait for the first layers is a wait for nothing
    else. What has landed before does not land again. Raises `TransferCancelled`, and the first
    error of a thread; none of them touches the image any more then.
    """
    work = _Work(pieces, transfer)
    threads = [
        threading.Thread(target=_make, args=(work, bench, cpus), daemon=True)
        for _ in range(min(THREADS, len(cpus), len(pieces)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if work.error is not None:
        raise work.error
    assert work.over, "pieces were left over"


def process_cpus() -> frozenset[int]:
    """The CPUs that any thread of this process may run on.

    vLLM ties the thread that builds an engine to one of them, and threads inherit that.
    """
    cpus: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            cpus |= os.sched_getaffinity(int(thread.name))
        except ProcessLookupError:
            pass  # it ended
    return frozenset(cpus)


def _make(work: _Work[P], bench: Callable[[], Bench[P]], cpus: Collection[int]) -> None:
    """What one thread does: pieces, until there are none left."""
    try:
        # A machine that took CPUs away since then makes this slower, not impossible.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)  # of this thread
        mine = bench()
        while (taken := work.take()) is not None:
            piece, later = taken
            if later is not None:
                mine.announce(later)
            mine.make(piece)
            work.done(piece)
    except BaseException as error:
        work.fail(error)


class _Work(Generic[P]):
    """The pieces of one image, handed out in order; they land in order, too."""

    def __init__(self, pieces: Sequence[P], transfer: Transfer) -> None:
        self.error: BaseException | None = None
        ahead = itertools.islice(pieces, 2 * THREADS, None)
        self._pieces = iter(itertools.zip_longest(pieces, ahead))
        self._order = iter(pieces)
        self._next = next(self._order, None)
        self._made: set[int] = set()
        self._transfer = transfer
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether every piece was made."""
        return self._next is None

    def take(self) -> tuple[P, P | None] | None:
        """The next piece, unless something failed, and a later one for the system to read ahead.

        Raises `TransferCancelled`.
        """
        if self._transfer.cancelled:
            raise TransferCancelled(f"{self._transfer.owner} is not wanted any more")
        with self._lock:
            return None if self.error is not None else next(self._pieces, None)

    def done(self, piece: P) -> None:
        with self._lock:
            self._made.add(piece.offset)
            landed = self._transfer.landed
            while self._next is not None and self._next.offset in self._made:
                self._made.remove(self._next.offset)
                landed = self._next.offset + self._next.nbytes
                self._next = next(self._order, None)
            if landed > self._transfer.landed:
                self._transfer.land(landed - self._transfer.landed)

    def fail(self, error: BaseException) -> None:
        """Let the other threads stop; the first error is the one that counts."""
        with self._lock:
            self.error = self.error or error
