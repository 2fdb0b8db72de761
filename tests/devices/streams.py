"""What a `Stream` does, whatever does its copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from appliance.memory.streams import PIECE_BYTES, Copy
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.vmm import Vmm
from tests.devices.bench import Bench
from tests.patience import PATIENCE_SECONDS

SLABS = 8
"""How long a test waits before it calls something stuck."""


class Floor:
    """A range of device memory that is mapped whole, and transfers to and from it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.vmm: Vmm = bench.vmm(SLABS)
        self.nbytes = SLABS * bench.slab_bytes
        self.base = self.vmm.reserve(self.nbytes)
        self.vmm.map(self.base, 0, SLABS)
        bench.write(self.vmm, self.base, bytes(self.nbytes))
        self.streams = [self.vmm.stream(f"test-{i}") for i in range(3)]

    def transfer(self, nbytes: int, kind: TransferKind = TransferKind.WEIGHTS) -> Transfer:
        return Transfer(kind, "m", nbytes, time.monotonic())

    def host(self, offset: int, data: bytes) -> int:
        """Put bytes into host memory, and say where they are."""
        self.bench.host.view(offset, len(data))[:] = data
        return self.bench.host.address(offset, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.bench.read(self.vmm, self.base + offset, nbytes)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.vmm.release(self.base, self.nbytes)


class Gate:
    """Lazy copies that stop in the middle until the test lets them go on."""

    def __init__(self, *copies: Copy, closed_at: int = 0) -> None:
        self._copies = copies
        self._closed_at = closed_at
        self._open = threading.Event()
        self.reached = threading.Event()

    def __iter__(self) -> Iterator[Copy]:
        for index, copy in enumerate(self._copies):
            if index == self._closed_at:
                self.reached.set()
                assert self._open.wait(PATIENCE_SECONDS), "nobody opened the gate"
            yield copy

    def open(self) -> None:
        self._open.set()


class Watched(Transfer):
    """Says when it is cancelled."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(TransferKind.WEIGHTS, "m", nbytes, time.monotonic())
        self.noticed = threading.Event()

    def cancel(self) -> None:
        super().cancel()
        self.noticed.set()


@pytest.fixture
def floor(bench: Bench) -> Iterator[Floor]:
    floor = Floor(bench)
    yield floor
    floor.close()


class StreamConformance:
    """Tests for the fixtures `bench` and `floor`."""

    def test_a_transfer_lands(self, floor: Floor) -> None:
        """All copies of a transfer are done, in the order given; its trace says how many bytes."""
        data = bytes(range(256)) * 100
        there, back = floor.transfer(len(data) + 4), floor.transfer(len(data), TransferKind.KV_OUT)
        first, second = floor.host(0, data), floor.host(1 << 20, b"last")
        copies = [Copy(floor.base, first, len(data)), Copy(floor.base + 2, second, 4)]
        floor.streams[0].run(there, copies)
        target = floor.bench.host.address(2 << 20, len(data))
        floor.streams[1].run(back, [Copy(target, floor.base, len(data))], needs=[there])
        back.wait()

        assert bytes(floor.bench.host.view(2 << 20, len(data))) == data[:2] + b"last" + data[6:]
        assert there.done
        trace = there.trace()
        assert trace.moved_bytes == len(data) + 4
        assert trace.began <= trace.ended

    def test_large_copies_are_cut(self, floor: Floor) -> None:
        """More than a piece arrives whole, whatever its size."""
        nbytes = 2 * PIECE_BYTES + 12345
        data = bytes(range(251)) * (nbytes // 251 + 1)
        data = data[:nbytes]
        transfer = floor.transfer(nbytes)
        floor.streams[0].run(transfer, [Copy(floor.base + 5, floor.host(0, data), nbytes)])
        transfer.wait()

        assert floor.read(5, nbytes) == data

    def test_rows(self, floor: Floor) -> None:
        """Rows go from one pitch to another, in both directions, and what is between stays."""
        rows, width, wide, narrow = 37, 24, 100, 32
        data = bytes(range(256)) * 20
        source = floor.host(0, data)
        there = floor.transfer(rows * width)
        copy = Copy(floor.base + 8, source, width, rows, wide, narrow)
        floor.streams[0].run(there, [copy])
        back = floor.transfer(rows * width)
        target = floor.host(1 << 20, bytes(rows * narrow))
        copy = Copy(target, floor.base + 8, width, rows, narrow, wide)
        floor.streams[1].run(back, [copy], needs=[there])
        back.wait()

        seen = floor.read(0, 8 + rows * wide)
        expected = bytearray(8 + rows * wide)
        for row in range(rows):
            start = 8 + row * wide
            expected[start : start + width] = data[row * narrow : row * narrow + width]
        assert seen == expected
        got = bytes(floor.bench.host.view(1 << 20, rows * narrow))
        for row in range(rows):
            start = row * narrow
            assert got[start : start + width] == data[start : start + width]
            assert got[start + width : start + narrow] == bytes(narrow - width)

    def test_progress_is_reported_piece_by_piece(self, floor: Floor) -> None:
        """Who needs the first bytes has them while the rest is not even asked for."""
        transfer = floor.transfer(8)
        source = floor.host(0, b"one-two-")
        gate = Gate(Copy(floor.base, source, 4), Copy(floor.base + 4, source + 4, 4), closed_at=1)
        floor.streams[0].run(transfer, gate)
        transfer.wait(4)

        assert not transfer.done
        assert floor.read(0, 8) == b"one-\0\0\0\0"
        gate.open()
        transfer.wait()
        assert floor.read(0, 8) == b"one-two-"

    def test_a_stream_keeps_its_order(self, floor: Floor) -> None:
        """The second transfer of a stream does not overtake the first."""
        first, second = floor.transfer(4), floor.transfer(4)
        gate = Gate(Copy(floor.base, floor.host(0, b"1111"), 4))
        floor.streams[0].run(first, gate)
        floor.streams[0].run(second, [Copy(floor.base, floor.host(8, b"2222"), 4)])
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert not second.done
        gate.open()
        second.wait()

        assert first.done
        assert floor.read(0, 4) == b"2222"

    @pytest.mark.parametrize("relation", ["after", "needs"])
    def test_a_transfer_waits_for_those_of_other_streams(self, floor: Floor, relation: str) -> None:
        """It does not begin before they are over, through any number of hands."""
        first, second, third = (floor.transfer(4) for _ in range(3))
        gate = Gate(Copy(floor.base, floor.host(0, b"1111"), 4))
        floor.streams[0].run(first, gate)
        copy = Copy(floor.base, floor.host(8, b"2222"), 4)
        floor.streams[1].run(second, [copy], **{relation: [first]})
        copy = Copy(floor.base + 4, floor.base, 4)
        floor.streams[2].run(third, [copy], **{relation: [second]})
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert not second.done
        gate.open()
        third.wait()

        assert first.done
        assert second.done
        assert floor.read(0, 8) == b"22222222"

    def test_others_do_not_wait(self, floor: Floor) -> None:
        """Transfers that have nothing to do with each other pass each other."""
        first, second = floor.transfer(4), floor.transfer(4)
        gate = Gate(Copy(floor.base, floor.host(0, b"1111"), 4))
        floor.streams[0].run(first, gate)
        floor.streams[1].run(second, [Copy(floor.base + 4, floor.host(8, b"2222"), 4)])
        second.wait()

        assert not first.done
        gate.open()
        first.wait()

    def test_what_it_needs_and_what_only_has_to_be_over(self, floor: Floor) -> None:
        """A failure fails those who read what never came, and not those who only come after."""

        def broken() -> Iterator[Copy]:
            yield Copy(floor.base, floor.host(0, b"1111"), 4)
            raise ValueError("the disk is gone")

        failed, reader, writer = (floor.transfer(n) for n in (8, 4, 4))
        floor.streams[0].run(failed, broken())
        floor.streams[1].run(reader, [Copy(floor.base + 8, floor.base, 4)], needs=[failed])
        copy = Copy(floor.base, floor.host(16, b"next"), 4)
        floor.streams[2].run(writer, [copy], after=[failed, reader])
        writer.wait()

        with pytest.raises(TransferFailed, match=r"weights of m: the disk is gone"):
            failed.wait()
        with pytest.raises(TransferFailed, match=r"reads what never came.*the disk is gone"):
            reader.wait()
        assert floor.read(0, 12) == b"next\0\0\0\0\0\0\0\0"

    @pytest.mark.parametrize("nbytes", [3, 5])
    def test_bytes_are_counted(self, floor: Floor, nbytes: int) -> None:
        """Copies that are not the bytes that were promised are a failure."""
        transfer = floor.transfer(nbytes)
        floor.streams[0].run(transfer, [Copy(floor.base, floor.host(0, b"four"), 4)])
        with pytest.raises(TransferFailed, match=f"4 bytes copied, not {nbytes}"):
            transfer.wait()

    def test_nothing_to_copy(self, floor: Floor) -> None:
        """A transfer of no bytes still has its place in the order."""
        first, empty, last = floor.transfer(4), floor.transfer(0), floor.transfer(4)
        gate = Gate(Copy(floor.base, floor.host(0, b"1111"), 4))
        floor.streams[0].run(first, gate)
        floor.streams[1].run(empty, [], after=[first])
        floor.streams[2].run(last, [Copy(floor.base, floor.host(8, b"2222"), 4)], after=[empty])
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert not empty.done
        gate.open()
        last.wait()

        assert floor.read(0, 4) == b"2222"

    def test_cancelled_in_the_middle(self, floor: Floor) -> None:
        """A cancelled transfer ends at the next piece; the stream goes on with the next one."""
        cancelled, following = floor.transfer(8), floor.transfer(4)
        source = floor.host(0, b"one-two-next")
        gate = Gate(Copy(floor.base, source, 4), Copy(floor.base + 4, source + 4, 4), closed_at=1)
        floor.streams[0].run(cancelled, gate)
        floor.streams[0].run(following, [Copy(floor.base + 8, source + 8, 4)])
        cancelled.wait(4)
        cancelled.cancel()
        gate.open()
        following.wait()

        with pytest.raises(TransferCancelled, match="weights of m was cancelled"):
            cancelled.wait()
        assert floor.read(0, 12) == b"one-\0\0\0\0next"

    def test_cancelled_in_line(self, floor: Floor) -> None:
        """One that is cancelled before it begins copies nothing, and ends after those before it."""
        first, cancelled, last = (floor.transfer(4) for _ in range(3))
        gate = Gate(Copy(floor.base, floor.host(0, b"1111"), 4))
        floor.streams[0].run(first, gate)
        copy = Copy(floor.base + 4, floor.host(8, b"2222"), 4)
        floor.streams[1].run(cancelled, [copy], after=[first])
        copy = Copy(floor.base + 8, floor.host(16, b"3333"), 4)
        floor.streams[2].run(last, [copy], after=[cancelled])
        cancelled.cancel()
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert not cancelled.done
        assert not last.done
        gate.open()
        last.wait()

        assert first.done
        with pytest.raises(TransferCancelled):
            cancelled.wait()
        assert floor.read(0, 12) == b"1111\0\0\0\x003333"

    def test_close_cancels_what_is_in_line(self, floor: Floor) -> None:
        """Closing ends everything given, and refuses more."""
        first, second = Watched(8), Watched(4)
        source = floor.host(0, b"one-two-next")
        gate = Gate(Copy(floor.base, source, 4), Copy(floor.base + 4, source + 4, 4), closed_at=1)
        stream = floor.streams[0]
        stream.run(first, gate)
        stream.run(second, [Copy(floor.base + 8, source + 8, 4)])
        assert gate.reached.wait(PATIENCE_SECONDS)
        closing = threading.Thread(target=stream.close)
        closing.start()
        assert first.noticed.wait(PATIENCE_SECONDS)
        assert second.noticed.wait(PATIENCE_SECONDS)
        gate.open()
        closing.join(PATIENCE_SECONDS)

        assert isinstance(first.error, TransferCancelled)
        assert isinstance(second.error, TransferCancelled)
        stream.close()
        with pytest.raises(RuntimeError, match=r"stream test-0\S* is closed"):
            stream.run(floor.transfer(0), [])

    def test_the_end_is_reported_once(self, floor: Floor) -> None:
        """`on_end` hears of every transfer, well ended or not, when it is over."""
        told: list[tuple[str, bool]] = []
        good, bad = floor.transfer(4), floor.transfer(9)
        for name, transfer in (("good", good), ("bad", bad)):
            transfer.on_end = lambda ended, name=name: told.append((name, ended.done))
            floor.streams[0].run(transfer, [Copy(floor.base, floor.host(0, b"1111"), 4)])
        bad.join()
        floor.streams[0].close()

        assert told == [("good", True), ("bad", True)]

    def test_many_transfers_in_a_chain(self, floor: Floor) -> None:
        """A long chain over three streams carries a value through, whatever runs beside it."""
        source = floor.host(0, bytes(range(8)))
        chain = floor.transfer(8)
        floor.streams[0].run(chain, [Copy(floor.base, source, 8)])
        for step in range(1, 200):
            before, chain = chain, floor.transfer(8)
            place = floor.base + step * 8
            floor.streams[step % 3].run(chain, [Copy(place, place - 8, 8)], needs=[before])
            beside = floor.transfer(1 << 20)
            side = floor.base + (8 + step % 4 << 20)
            floor.streams[(step + 1) % 3].run(
                beside, [Copy(side, floor.bench.host.address(1 << 20, 1 << 20), 1 << 20)]
            )
        chain.wait()

        assert floor.read(199 * 8, 8) == bytes(range(8))
