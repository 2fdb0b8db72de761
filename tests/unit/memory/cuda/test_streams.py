"""`CudaStream` on a stand-in driver: which waits the device is given, and what is left over.

The stand-in does nothing that nobody waits for, so bytes that are there too early or too late show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from appliance.memory.cuda.driver import CudaContext, CudaError, call
from appliance.memory.cuda.streams import AHEAD_PIECES, CudaStream
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from tests.devices.streams import Gate
from tests.patience import PATIENCE_SECONDS
from tests.stand_in.driver import Audit, CudaCode, StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]

SLABS = 8
DEFAULT = 0


class Device:
    """A pool that is mapped whole, two streams, and a compute stream that tests can hold."""

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        self.vmm = CudaVmm(0, SLABS, SLAB)
        self.base = self.vmm.reserve(SLABS * SLAB)
        self.vmm.map(self.base, 0, SLABS)
        self.host = HostTier.create(SLABS * SLAB)
        self.first = self.vmm.stream("first")
        self.second = self.vmm.stream("second")
        self.compute = int(call("cuStreamCreate", 1))
        self.vmm.compute_stream = self.compute

    def at(self, offset: int) -> int:
        return self.host.address(offset, 1)

    def transfer(self, nbytes: int, kind: TransferKind = TransferKind.WEIGHTS) -> Transfer:
        return Transfer(kind, "m", nbytes, time.monotonic())

    def give(self, stream: CudaStream, kind: TransferKind, *copies: Copy) -> Transfer:
        transfer = self.transfer(sum(copy.nbytes for copy in copies), kind)
        stream.run(transfer, copies)
        return transfer

    def compute_copies(self, destination: int, source: int, nbytes: int) -> None:
        """What a kernel does in these tests: read here, write there, on the compute stream."""
        call("cuMemcpyAsync", destination, source, nbytes, self.compute)

    def reached(self, stream: int) -> bool:
        """Whether all that a stream was given can be done now."""
        event = call("cuEventCreate", 2)
        call("cuEventRecord", event, stream)
        try:
            call("cuEventQuery", event)
        except CudaError as error:
            if error.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        finally:
            call("cuEventDestroy", event)
        return True

    def close(self) -> None:
        for stream in (self.compute, self.first.handle, self.second.handle):
            self.driver.let_go(stream)
        self.first.close()
        self.second.close()
        self.vmm.context.use()
        call("cuStreamSynchronize", self.compute)
        call("cuStreamDestroy", self.compute)
        self.vmm.release(self.base, SLABS * SLAB)
        self.vmm.close()
        self.host.close()


@pytest.fixture
def device(driver: StandIn) -> Iterator[Device]:
    device = Device(driver)
    yield device
    device.close()


def test_a_missing_wait_is_seen(device: Device) -> None:
    """What this file relies on: a reader that waits for nobody does not find the bytes."""
    device.host.view(0, 4)[:] = b"data"
    device.compute_copies(device.base, device.at(0), 4)
    weights = device.give(device.first, TransferKind.WEIGHTS, Copy(device.at(8), device.base, 4))
    weights.wait()

    assert bytes(device.host.view(8, 4)) == b"\0\0\0\0"


@pytest.mark.parametrize("kind", [TransferKind.KV_OUT, TransferKind.KV_IN])
def test_kv_comes_after_the_compute_before_it(device: Device, kind: TransferKind) -> None:
    """A transfer of KV reads what a step in line has not written yet, once it has."""
    device.host.view(0, 4)[:] = b"data"
    device.driver.hold(device.compute)
    device.compute_copies(device.base, device.at(0), 4)
    transfer = device.give(device.first, kind, Copy(device.at(8), device.base, 4))
    beside = device.give(
        device.second, TransferKind.WEIGHTS, Copy(device.base + 64, device.at(0), 4)
    )
    beside.wait()
    assert not transfer.done
    device.driver.let_go(device.compute)
    transfer.wait()

    assert bytes(device.host.view(8, 4)) == b"data"


def test_kv_does_not_wait_for_later_compute(device: Device) -> None:
    """Only what was in line when the transfer came is waited for."""
    device.host.view(0, 4)[:] = b"data"
    gate = Gate(Copy(device.base, device.at(0), 4))
    transfer = device.transfer(4, TransferKind.KV_IN)
    device.first.run(transfer, gate)
    assert gate.reached.wait(PATIENCE_SECONDS)
    device.driver.hold(device.compute)
    device.compute_copies(device.base + 64, device.at(0), 4)
    gate.open()
    transfer.wait()


@pytest.mark.parametrize("nbytes", [4, 8, None])
def test_compute_waits_on_the_device(device: Device, nbytes: int | None) -> None:
    """Compute put in line before its bytes are there finds them; this thread did not wait."""
    device.host.view(0, 8)[:] = b"one-two-"
    device.driver.hold(device.compute)
    load = device.transfer(8, TransferKind.KV_IN)  # so it begins after what is held
    device.compute_copies(device.at(64), device.at(0), 8)
    copies = (Copy(device.base, device.at(0), 4), Copy(device.base + 4, device.at(4), 4))
    gate = Gate(*copies, closed_at=1)
    device.first.run(load, gate)
    assert gate.reached.wait(PATIENCE_SECONDS)
    device.driver.hold(device.first.handle)  # behind the first piece, before the second
    gate.open()
    device.vmm.compute_stream = layers = int(call("cuStreamCreate", 1))
    device.vmm.compute_waits(load, nbytes)
    call("cuMemcpyAsync", device.at(16), device.base, nbytes or 8, layers)
    assert load.landed == 0
    assert not device.reached(layers)
    device.driver.let_go(device.compute)
    load.wait(4)
    assert device.reached(layers) == (nbytes == 4)
    device.driver.let_go(device.first.handle)
    call("cuStreamSynchronize", layers)

    assert bytes(device.host.view(16, 8)) == (b"one-\0\0\0\0" if nbytes == 4 else b"one-two-")
    load.wait()
    call("cuStreamDestroy", layers)


def test_compute_waits_until_its_bytes_are_in_line(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For bytes that are not even asked for, the thread waits; a wait for nothing would pass. They
    come once it waits, and not before."""
    device.host.view(0, 8)[:] = b"one-two-"
    copies = (Copy(device.base, device.at(0), 4), Copy(device.base + 4, device.at(4), 4))
    gate = Gate(*copies, closed_at=1)
    load = device.transfer(8)
    device.first.run(load, gate)
    device.vmm.compute_waits(load, 4)
    assert gate.reached.wait(PATIENCE_SECONDS)
    wait, ours = threading.Condition.wait, threading.current_thread()

    def open_and_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is ours:
            gate.open()
        return wait(condition, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "wait", open_and_wait)
        device.vmm.compute_waits(load, 8)
    device.compute_copies(device.at(16), device.base, 8)
    call("cuStreamSynchronize", device.compute)
    gate.open()  # if it has not waited

    assert bytes(device.host.view(16, 8)) == b"one-two-"


def test_compute_that_waits_for_what_never_comes(device: Device) -> None:
    """Bytes of a load that was cancelled are an error, while it ends and afterwards."""
    copies = (Copy(device.base, device.at(0), 4), Copy(device.base + 4, device.at(4), 4))
    gate = Gate(*copies, closed_at=1)
    load = device.transfer(8)
    device.first.run(load, gate)
    load.wait(4)
    load.cancel()
    gate.open()
    for _ in range(2):
        with pytest.raises(TransferCancelled):
            device.vmm.compute_waits(load, 8)
        load.join()


def test_a_transfer_waits_on_the_device(device: Device) -> None:
    """What follows a transfer of another stream is put in line before that one has landed."""
    device.host.view(0, 4)[:] = b"data"
    device.driver.hold(device.compute)
    device.compute_copies(device.base, device.at(0), 4)
    out = device.give(device.first, TransferKind.KV_OUT, Copy(device.at(8), device.base, 4))
    copied = threading.Event()

    def copies() -> Iterator[Copy]:
        yield Copy(device.base + 64, device.at(8), 4)
        copied.set()  # asked for the next: the first has been handed over

    back = device.transfer(4)
    device.second.run(back, copies(), needs=[out])
    assert copied.wait(PATIENCE_SECONDS)
    assert not out.done
    assert not back.done
    device.driver.let_go(device.compute)
    back.wait()
    device.vmm.copy(device.at(16), device.base + 64, 4)

    assert bytes(device.host.view(16, 4)) == b"data"
    assert out.done


def test_all_pieces_are_waited_for(device: Device) -> None:
    """What follows a transfer that is in line, and of which a piece is there, comes after all."""
    device.host.view(0, 8)[:] = b"one-two-"
    copies = (Copy(device.base, device.at(0), 4), Copy(device.base + 4, device.at(4), 4))
    gate = Gate(*copies, closed_at=1)
    load = device.transfer(8, TransferKind.KV_IN)
    device.driver.hold(device.compute)
    device.compute_copies(device.at(64), device.at(0), 8)
    device.first.run(load, gate)
    assert gate.reached.wait(PATIENCE_SECONDS)
    device.driver.hold(device.first.handle)  # behind the first piece, before the second
    gate.open()
    device.vmm.compute_waits(load)  # returns when all is in line
    back = device.transfer(8)
    device.second.run(back, [Copy(device.at(16), device.base, 8)], after=[load])
    device.vmm.compute_waits(back)
    assert not device.reached(device.second.handle)
    device.driver.let_go(device.compute)
    assert not device.reached(device.second.handle)
    device.driver.let_go(device.first.handle)
    back.wait()

    assert bytes(device.host.view(16, 8)) == b"one-two-"


def test_a_cancelled_transfer_ends_after_those_before_it(device: Device) -> None:
    """Though it copies nothing: what comes after it comes after these, too."""
    joined = threading.Event()

    class Earlier(Transfer):
        def join(self) -> None:
            joined.set()
            super().join()

    earlier = Earlier(TransferKind.KV_OUT, "m", 4, time.monotonic())
    cancelled = device.transfer(4)
    cancelled.on_end = lambda _: joined.set()
    cancelled.cancel()
    device.driver.hold(device.compute)
    device.compute_copies(device.base, device.at(0), 4)
    device.first.run(earlier, [Copy(device.at(8), device.base, 4)])
    device.second.run(cancelled, [Copy(device.base, device.at(0), 4)], after=[earlier])
    assert joined.wait(PATIENCE_SECONDS)  # its end is near, or has come

    assert not cancelled.done
    device.driver.let_go(device.compute)
    with pytest.raises(TransferCancelled):
        cancelled.wait()
    assert earlier.done


def test_a_failure_reaches_those_in_line_behind_it(device: Device) -> None:
    """What needs a transfer that fails on the device fails with it, though it was in line."""
    device.driver.hold(device.compute)
    device.compute_copies(device.base, device.at(0), 4)
    out = device.give(device.first, TransferKind.KV_OUT, Copy(device.at(8), device.base, 4))
    handed = threading.Event()

    def nothing() -> Iterator[Copy]:
        handed.set()
        return
        yield

    reader, later = device.transfer(0), device.transfer(0)
    device.second.run(reader, nothing(), needs=[out])
    device.second.run(later, [], after=[out, reader])
    assert handed.wait(PATIENCE_SECONDS)
    device.driver.fail("cuEventElapsedTime", 1, CudaCode.UNKNOWN)
    device.driver.let_go(device.compute)
    later.wait()

    with pytest.raises(TransferFailed, match="CUDA_ERROR_UNKNOWN"):
        out.wait()
    with pytest.raises(TransferFailed, match="reads what never came"):
        reader.wait()


@pytest.mark.parametrize(
    "name", ["cuMemcpyAsync", "cuMemcpy2DAsync", "cuEventRecord", "cuEventSynchronize"]
)
def test_a_refused_call_fails_its_transfer(device: Device, name: str) -> None:
    """Whichever call the driver refuses: a named failure, nothing left in line, and on it goes."""
    device.driver.fail(name, 1, 2)
    transfer = device.transfer(32)
    copy = Copy(device.base, device.at(0), 8, rows=2, destination_pitch=64, source_pitch=8)
    copies = [copy, Copy(device.base + 512, device.at(64), 16)]
    device.first.run(transfer, copies)
    with pytest.raises(TransferFailed, match=rf"CUDA_ERROR_OUT_OF_MEMORY from {name}"):
        transfer.wait()

    device.host.view(0, 4)[:] = b"next"
    device.give(device.first, TransferKind.KV_IN, Copy(device.base, device.at(0), 4)).wait()
    device.vmm.copy(device.at(8), device.base, 4)
    assert bytes(device.host.view(8, 4)) == b"next"


def test_an_unmapped_target_breaks_loudly(driver: StandIn) -> None:
    """Slabs taken away under a transfer in line: the driver's error, for it and all after it."""
    device = Device(driver)
    driver.hold(device.compute)
    transfer = device.give(device.first, TransferKind.KV_IN, Copy(device.base, device.at(0), 4))
    copied = threading.Event()

    def copies() -> Iterator[Copy]:
        yield Copy(device.base + 64, device.at(8), 4)
        copied.set()

    following = device.transfer(4)
    device.first.run(following, copies())
    assert copied.wait(PATIENCE_SECONDS)
    device.vmm.unmap(device.base)
    driver.let_go(device.compute)
    with pytest.raises(TransferFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS from cuEventSynchronize"):
        transfer.wait()
    with pytest.raises(TransferFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        following.wait()
    assert driver.audit() == Audit(unmapped_in_use=1)
    driver.pardon()
    driver.reset()
    device.vmm.map(device.base, 0)
    call("cuStreamSynchronize", device.first.handle)  # what the error has left in line
    device.close()


def test_a_stream_that_began_while_its_context_was_broken(
    driver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gives back what it has as soon as that can be done: its threads take the context again."""
    use, broken = CudaContext.use, threading.Event()
    tried = threading.Barrier(3)

    def refused(context: CudaContext) -> None:
        if broken.is_set() and threading.current_thread() is not threading.main_thread():
            tried.wait(PATIENCE_SECONDS)
            raise CudaError("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "broken")
        use(context)

    monkeypatch.setattr(CudaContext, "use", refused)
    vmm = CudaVmm(0, SLABS, SLAB)
    before = driver.live().streams
    broken.set()
    stream = vmm.stream("late")
    tried.wait(PATIENCE_SECONDS)
    broken.clear()
    stream.close()

    assert driver.live().streams == before
    vmm.close()


def test_few_pieces_are_ahead(device: Device) -> None:
    """A cancel ends a transfer after the pieces in line, and these are bounded."""
    device.driver.hold(device.compute)
    asked: list[int] = []
    full = threading.Event()

    def copies() -> Iterator[Copy]:
        for index in range(10 * AHEAD_PIECES):
            asked.append(index)
            if len(asked) == AHEAD_PIECES:
                full.set()  # the mark of the start has a place, so this one waits for room
            yield Copy(device.base, device.at(0), 8)

    transfer = device.transfer(10 * AHEAD_PIECES * 8, TransferKind.KV_IN)
    device.first.run(transfer, copies())
    assert full.wait(PATIENCE_SECONDS)
    transfer.cancel()
    device.driver.let_go(device.compute)
    with pytest.raises(TransferCancelled):
        transfer.wait()

    assert len(asked) == AHEAD_PIECES
    assert transfer.landed == (AHEAD_PIECES - 1) * 8


def test_another_process_waits_for_an_event(device: Device) -> None:
    """A stream that awaits an exported event comes after the transfer it was exported for."""
    device.host.view(0, 4)[:] = b"data"
    device.driver.hold(device.compute)
    device.compute_copies(device.base, device.at(0), 4)
    out = device.give(device.first, TransferKind.KV_OUT, Copy(device.at(8), device.base, 4))
    event = device.first.export(out)
    assert not out.done
    device.second.await_event(event.handle)
    back = device.give(device.second, TransferKind.WEIGHTS, Copy(device.base + 64, device.at(8), 4))
    device.vmm.compute_waits(back)  # returns when it is in line
    assert not device.reached(device.second.handle)
    device.driver.let_go(device.compute)
    back.wait()
    event.close()
    event.close()
    device.vmm.copy(device.at(16), device.base + 64, 4)

    assert bytes(device.host.view(16, 4)) == b"data"
    with pytest.raises(ValueError, match="has 64 bytes, not 3"):
        device.second.await_event(b"abc")


def test_what_has_failed_is_not_exported(device: Device) -> None:
    """There is no event for bytes that never come."""
    failed = device.transfer(9)
    device.first.run(failed, [Copy(device.base, device.at(0), 4)])
    with pytest.raises(TransferFailed):
        device.first.export(failed)


def test_the_pool_copies_after_compute(device: Device) -> None:
    """`copy` sees what the compute stream was given before it."""
    device.host.view(0, 4)[:] = b"data"
    device.compute_copies(device.base, device.at(0), 4)
    device.vmm.copy(device.at(8), device.base, 4)

    assert bytes(device.host.view(8, 4)) == b"data"


def test_the_host_tier_is_pinned_in_chunks(device: Device) -> None:
    """Copies cross the borders between chunks, while they are pinned and afterwards."""
    nbytes = 8 << 20
    data = bytes(range(256)) * (nbytes // 256)
    device.host.view(100, nbytes)[:] = data
    pinning = device.vmm.register(device.at(0), 12 << 20, chunk_bytes=1 << 20)
    early = device.give(
        device.first, TransferKind.WEIGHTS, Copy(device.base, device.at(100), nbytes)
    )
    pinning.wait()
    assert pinning.pinned_bytes == 12 << 20
    early.wait()
    late = device.transfer(nbytes)
    rows = Copy(device.at(100), device.base, 1 << 10, nbytes >> 10, 1 << 10, 1 << 10)
    device.host.view(100, nbytes)[:] = bytes(nbytes)
    device.second.run(late, [rows])
    late.wait()

    assert device.host.view(100, nbytes) == data
    device.vmm.copy(device.base, device.at(100), nbytes)


def test_neither_pinning_nor_copies_spoil_a_capture(device: Device) -> None:
    """vLLM captures graphs in the mode that forbids calls to all threads; ours go on."""
    pinning = device.vmm.register(device.at(0), 1 << 20)
    pinning.wait()
    call("cuStreamBeginCapture", device.compute, 0)
    with pytest.raises(CudaError, match="CAPTURE_UNSUPPORTED from cuStreamSynchronize"):
        call("cuStreamSynchronize", DEFAULT)  # of a thread that is not told to be relaxed
    with pytest.raises(CudaError, match="CAPTURE_INVALIDATED from cuStreamEndCapture"):
        call("cuStreamEndCapture", device.compute)

    call("cuStreamBeginCapture", device.compute, 0)
    late = device.vmm.register(device.at(2 << 20), 4 << 20, chunk_bytes=1 << 20)
    moved = device.give(
        device.first, TransferKind.WEIGHTS, Copy(device.base, device.at(0), 1 << 20)
    )
    late.wait()
    moved.wait()
    call("cuStreamEndCapture", device.compute)

    assert late.pinned_bytes == 4 << 20


def test_pinning_that_is_refused(device: Device) -> None:
    """What the driver will not lock stays usable, and the error is named."""
    device.driver.fail("cuMemHostRegister", 2, 2)
    pinning = device.vmm.register(device.at(0), 3 << 20, chunk_bytes=1 << 20)
    with pytest.raises(CudaError, match=r"^CUDA_ERROR_OUT_OF_MEMORY from cuMemHostRegister of"):
        pinning.wait()

    assert pinning.pinned_bytes == 1 << 20
    device.vmm.copy(device.base, device.at((1 << 20) - 8), 16)
