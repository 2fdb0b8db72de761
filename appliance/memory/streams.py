"""Streams: copies that run during compute, in order within a stream, after others across streams.

The interface is the same for host memory (a thread with a queue) and for a GPU (driver streams and
events). Which transfer has to come after which is decided above (`appliance.memory.hazards`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Final, NamedTuple, Protocol

from appliance.memory import mapping
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed

PIECE_BYTES: Final = 4 << 20
"""What is copied at one go: the grain of progress and of cancellation."""


class Copy(NamedTuple):
    """`rows` rows of `nbytes` bytes each, `..._pitch` bytes from one row's start to the next's."""

    destination: int
    source: int
    nbytes: int
    rows: int = 1
    destination_pitch: int = 0
    source_pitch: int = 0


class Stream(Protocol):
    """Does transfers one after the other, in the order in which `run` got them."""

    def run(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        *,
        after: Sequence[Transfer] = (),
        needs: Sequence[Transfer] = (),
    ) -> None:
        """Put a transfer in line, and return at once; from now on it is this stream's to end.

        `copies` are `transfer.nbytes` bytes in all; they land in the order given, in pieces. They
        may be made lazily, in another thread; an error of theirs is the transfer's.

        It begins when all of `after` and `needs` are over, on whatever streams they are. It fails
        if one of `needs` failed, for it reads what that one wrote; `after` only had to be out of
        the way. Also one that is cancelled or fails never ends before all of these have: what
        comes after it comes after them, too.

        `after` and `needs` have been given to a stream before, so there is always one that can
        go on. Raises `RuntimeError` when the stream is closed.
        """

    def close(self) -> None:
        """Cancel what is in line, and return when all of it has ended; idempotent."""


def pieces(copies: Iterable[Copy], piece_bytes: int = PIECE_BYTES) -> Iterator[Copy]:
    """The same bytes in the same order, in pieces of at most `piece_bytes`."""
    for copy in copies:
        if copy.nbytes * copy.rows <= piece_bytes:
            yield copy
        elif copy.nbytes > piece_bytes or copy.rows == 1:
            for row in range(copy.rows):
                destination = copy.destination + row * copy.destination_pitch
                source = copy.source + row * copy.source_pitch
                for start in range(0, copy.nbytes, piece_bytes):
                    size = min(piece_bytes, copy.nbytes - start)
                    yield Copy(destination + start, source + start, size)
        else:
            step = piece_bytes // copy.nbytes
            for row in range(0, copy.rows, step):
                yield copy._replace(
                    destination=copy.destination + row * copy.destination_pitch,
                    source=copy.source + row * copy.source_pitch,
                    rows=min(step, copy.rows - row),
                )


def require(transfer: Transfer, needs: Sequence[Transfer]) -> None:
    """Raise `TransferFailed` if one of `needs`, which are all over, failed."""
    for earlier in needs:
        if earlier.error is not None:
            raise TransferFailed(
                f"{transfer.kind} of {transfer.owner} reads what never came: {earlier.error}"
            ) from earlier.error


class _Job(NamedTuple):
    transfer: Transfer
    copies: Iterable[Copy]
    after: Sequence[Transfer]
    needs: Sequence[Transfer]


class HostStream:
    """One thread that copies within this process's memory."""

    def __init__(
        self,
        name: str,
        cpus: Set[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cpus` are those the thread may run on; if None, those of the thread that calls."""
        self._cpus = cpus
        self._clock = clock
        self._line: deque[_Job] = deque()  # the first of it is under way
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        *,
        after: Sequence[Transfer] = (),
        needs: Sequence[Transfer] = (),
    ) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(f"stream {self._thread.name} is closed")
            self._line.append(_Job(transfer, copies, after, needs))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for job in self._line:
                job.transfer.cancel()
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        if self._cpus is not None:
            # A machine that took CPUs away since then makes copies slower, not impossible.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                job = self._line[0]
            self._do(job)
            with self._changed:
                self._line.popleft()

    def _do(self, job: _Job) -> None:
        transfer = job.transfer
        for earlier in (*job.after, *job.needs):
            earlier.join()
        try:
            require(transfer, job.needs)
            _go_on(transfer)
            transfer.begin(self._clock())
            for piece in pieces(job.copies):
                _go_on(transfer)
                _copy(piece)
                transfer.land(piece.nbytes * piece.rows)
            if transfer.landed != transfer.nbytes:
                raise ValueError(f"{transfer.landed} bytes copied, not {transfer.nbytes}")
        except BaseException as error:  # whatever it is, a waiting thread needs it
            transfer.fail(error, self._clock())
        else:
            transfer.finish(self._clock())


def _go_on(transfer: Transfer) -> None:
    if transfer.cancelled:
        raise TransferCancelled(f"{transfer.kind} of {transfer.owner} was cancelled")


def _copy(copy: Copy) -> None:
    if copy.rows == 1:
        mapping.copy(copy.destination, copy.source, copy.nbytes)
    elif copy.rows:
        mapping.copy_rows(*copy)
