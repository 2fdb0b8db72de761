"""Streams: copies that go on beside compute, in order within a stream, after others across streams.

The interface is the same for host memory (a thread with a queue) and for a GPU (driver streams and
events). Which transfer has to come after which is decided above (`appliance.memory.transferrules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from appliance.memory.transfers import Transfer

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
        the way. Also one that is cancelled or fails never ends before all of these have: whoever
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
