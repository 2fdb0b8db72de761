"""Streams of the host: the right bytes, in order, after whom they must, until cancelled."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.memory.streams import PIECE_BYTES, Copy, HostStream, pieces
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from tests.patience import PATIENCE_SECONDS


def make(nbytes: int = 0, owner: str = "a") -> Transfer:
    return Transfer(TransferKind.WEIGHTS, owner, nbytes, 0.0)


class Gate:
    """Copies that are not there before the test says so."""

    def __init__(self, *copies: Copy) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._copies = copies

    def __iter__(self) -> Iterator[Copy]:
        self.reached.set()
        assert self.opened.wait(PATIENCE_SECONDS)
        yield from self._copies


@pytest.fixture
def streams() -> Iterator[list[HostStream]]:
    made = [HostStream(f"test-{i}") for i in range(3)]
    yield made
    for stream in made:
        stream.close()


rows = st.tuples(st.integers(0, 40), st.integers(0, 6), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(rows, max_size=4), st.integers(1, 50))
def test_pieces_are_the_same_bytes_in_the_same_order(
    shapes: list[tuple[int, int, int, int]], piece_bytes: int
) -> None:
    """Cutting changes how much is copied at one go, and nothing else."""
    copies = [
        Copy(1000 * i, 5000 * i, nbytes, count, nbytes + gap, nbytes + other)
        for i, (nbytes, count, gap, other) in enumerate(shapes)
    ]

    def moves(of: Iterator[Copy]) -> list[tuple[int, int]]:
        return [
            (
                copy.destination + row * copy.destination_pitch + byte,
                copy.source + row * copy.source_pitch + byte,
            )
            for copy in of
            for row in range(copy.rows)
            for byte in range(copy.nbytes)
        ]

    cut = list(pieces(copies, piece_bytes))

    assert moves(iter(cut)) == moves(iter(copies))
    assert all(piece.nbytes * piece.rows <= piece_bytes for piece in cut)


@pytest.mark.parametrize(
    ("nbytes", "count", "gap", "shift"),
    [(1, 1, 0, 0), (24, 7, 8, 0), (24, 7, 8, 3), (13, 5, 4, 1), (8, 3, 0, 0), (0, 4, 8, 0)],
)
def test_rows_are_gathered_and_scattered(
    streams: list[HostStream], nbytes: int, count: int, gap: int, shift: int
) -> None:
    """Rows land where their pitches say, whole words or not, and nothing between them changes."""
    source = np.arange(400, dtype=np.uint8)
    middle, target = np.zeros(400, np.uint8), np.full(400, 7, np.uint8)
    pitch = nbytes + gap
    start = source.ctypes.data + shift, middle.ctypes.data, target.ctypes.data + shift
    gather, scatter = make(nbytes * count), make(nbytes * count)
    streams[0].run(gather, [Copy(start[1], start[0], nbytes, count, nbytes, pitch)])
    streams[0].run(scatter, [Copy(start[2], start[1], nbytes, count, pitch, nbytes)])
    scatter.wait()

    inside = np.zeros(400, bool)
    for row in range(count):
        inside[shift + row * pitch : shift + row * pitch + nbytes] = True
    np.testing.assert_array_equal(target[inside], source[inside])
    assert (target[~inside] == 7).all()


def test_large_copies_land_piece_by_piece(streams: list[HostStream]) -> None:
    """Whoever waits for the first bytes of a copy need not wait for its last."""
    source = np.random.default_rng(0).integers(0, 255, 3 * PIECE_BYTES + 5, np.uint8)
    target = np.zeros_like(source)
    landed: list[int] = []
    transfer = make(source.nbytes)
    transfer.land = lambda n, land=transfer.land: (landed.append(n), land(n))[1]
    streams[0].run(transfer, [Copy(target.ctypes.data, source.ctypes.data, source.nbytes)])
    transfer.wait()

    np.testing.assert_array_equal(target, source)
    assert landed == [PIECE_BYTES] * 3 + [5]


def test_a_stream_keeps_its_order_and_never_holds_up_the_caller(streams: list[HostStream]) -> None:
    """The second begins when the first is over, and `run` returned long before."""
    gate, seen = Gate(), []
    first, second = make(), make()

    def look() -> Iterator[Copy]:
        seen.append(first.done)
        yield from ()

    streams[0].run(first, gate)
    streams[0].run(second, look())
    assert gate.reached.wait(PATIENCE_SECONDS)
    assert (first.done, second.began) == (False, None)
    gate.opened.set()
    second.wait()

    assert seen == [True]


def test_another_stream_waits_for_what_it_comes_after(streams: list[HostStream]) -> None:
    """`after` and `needs` hold across streams; what is not named is not waited for."""
    gate = Gate()
    first, free = make(), make()
    later = [make(), make()]
    streams[0].run(first, gate)
    streams[1].run(free, ())
    streams[1].run(later[0], (), after=[first])
    streams[2].run(later[1], (), needs=[first])
    free.wait()
    assert gate.reached.wait(PATIENCE_SECONDS)
    assert [transfer.began for transfer in later] == [None, None]
    gate.opened.set()
    for transfer in later:
        transfer.wait()
        assert first.ended is not None
        assert transfer.began is not None
        assert transfer.began >= first.ended


def test_who_reads_what_failed_fails_who_comes_after_does_not(streams: list[HostStream]) -> None:
    """`needs` is about bytes, `after` about the way being free."""
    byte = ctypes.create_string_buffer(b"x", 1)
    target = ctypes.create_string_buffer(1)
    one = Copy(ctypes.addressof(target), ctypes.addressof(byte), 1)
    failed, after, needs, further = make(1, "f"), make(1), make(1, "n"), make(1)
    streams[0].run(failed, ({}["gone"] for _ in "x"))
    streams[1].run(needs, [one], needs=[failed])
    streams[2].run(further, [one], needs=[needs])
    for transfer in (failed, needs, further):
        with pytest.raises(TransferFailed):
            transfer.wait()
    assert target.raw == b"\0"
    assert isinstance(failed.error.__cause__, KeyError)
    assert str(needs.error) == "weights of n reads what never came: weights of f: 'gone'"

    streams[0].run(after, [one], after=[failed])
    after.wait()
    assert target.raw == b"x"


def test_the_cancelled_still_wait_for_those_before_them(streams: list[HostStream]) -> None:
    """One that comes after a cancelled transfer comes after what that came after, too."""
    gate, seen = Gate(), []
    first, cancelled, last = make(), make(), make()

    def look() -> Iterator[Copy]:
        seen.append(first.done)
        yield from ()

    streams[0].run(first, gate)
    streams[1].run(cancelled, (), after=[first])
    cancelled.cancel()
    streams[2].run(last, look(), after=[cancelled])
    assert gate.reached.wait(PATIENCE_SECONDS)
    assert not cancelled.done
    gate.opened.set()
    last.wait()

    assert seen == [True]
    assert isinstance(cancelled.error, TransferCancelled)
    assert cancelled.began is None


def test_cancelling_ends_at_the_next_piece(streams: list[HostStream]) -> None:
    """What has landed stays; the rest is not copied."""
    source, target = np.full(8, 1, np.uint8), np.zeros(8, np.uint8)
    transfer = make(8)

    def copies() -> Iterator[Copy]:
        yield Copy(target.ctypes.data, source.ctypes.data, 4)
        transfer.cancel()
        yield Copy(target.ctypes.data + 4, source.ctypes.data + 4, 4)

    streams[0].run(transfer, copies())
    with pytest.raises(TransferCancelled, match="weights of a was cancelled"):
        transfer.wait()

    assert transfer.landed == 4
    assert target.tolist() == [1] * 4 + [0] * 4


def test_too_few_bytes_are_a_failure(streams: list[HostStream]) -> None:
    """A transfer that says it is whole is whole."""
    transfer = make(2)
    streams[0].run(transfer, ())

    with pytest.raises(TransferFailed, match="0 bytes copied, not 2"):
        transfer.wait()


def test_closing_ends_everything_in_line() -> None:
    """Each transfer ends once, whatever becomes of its stream; a closed one takes no more."""
    stream, gate = HostStream("closing"), Gate(Copy(0, 0, 0))
    line = [make() for _ in range(3)]
    stream.run(line[0], gate)
    for transfer in line[1:]:
        stream.run(transfer, ())
    assert gate.reached.wait(PATIENCE_SECONDS)
    closer = threading.Thread(target=stream.close)
    closer.start()
    line[2].cancel()
    gate.opened.set()
    closer.join(PATIENCE_SECONDS)

    assert not closer.is_alive()
    assert all(transfer.done for transfer in line)
    assert isinstance(line[2].error, TransferCancelled)
    stream.close()
    with pytest.raises(RuntimeError, match="stream closing is closed"):
        stream.run(make(), ())


def test_a_stream_may_use_cpus_that_its_maker_may_not() -> None:
    """Its thread is bound to what it is told, not to what compute was bound to."""
    cpu = min(os.sched_getaffinity(0))
    mine: list[set[int]] = []

    def look() -> Iterator[Copy]:
        mine.append(os.sched_getaffinity(0))
        yield from ()

    for cpus in ({cpu}, None, {100_000}):
        stream, transfer = HostStream("bound", cpus), make()
        stream.run(transfer, look())
        transfer.wait()
        stream.close()

    everything = os.sched_getaffinity(0)
    assert mine == [{cpu}, everything, everything]
