"""Whatever call of the driver fails: nothing leaks, the books agree, and what can go on goes on.

The stand-in fails one call of a step, by its number. An error that CUDA lets a program survive must
leave the books as they are in the driver; one that breaks the context must end everything with its
own name, and nothing may wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.memory.arena import Arena, PoolExhausted, Region
from appliance.memory.cuda.allocator import RuntimeAllocator
from appliance.memory.cuda.driver import CudaError, call
from appliance.memory.cuda.events import SharedEvent
from appliance.memory.cuda.scratch import Scratch
from appliance.memory.cuda.streams import CudaStream
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from appliance.memory.runtime import RuntimeMemory
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.weights import DeviceWeights, Image, StoredTensor, WeightLayout
from tests.patience import PATIENCE_SECONDS
from tests.stand_in.driver import Audit, CudaCode, StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]

LASTING = (
    CudaCode.ILLEGAL_ADDRESS,
    CudaCode.LAUNCH_FAILED,
    CudaCode.ECC_UNCORRECTABLE,
    CudaCode.MISALIGNED_ADDRESS,
)
NON_BLOCKING, GLOBAL = 1, 0
some_failures = st.tuples(
    st.integers(0, 6),  # which call fails; 0 is none
    st.sampled_from([CudaCode.OUT_OF_MEMORY, CudaCode.UNKNOWN]),
)


def deterministic(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def until_done(work: Callable[[], object]) -> None:
    """On a thread, so that what waits for ever fails the test. Raises what `work` raises."""
    errors: list[BaseException] = []

    def keep_errors() -> None:
        try:
            work()
        except BaseException as error:  # the test's thread raises it
            errors.append(error)

    thread = threading.Thread(target=keep_errors, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]


def test_errors_of_the_other_thread_are_raised() -> None:
    """A step that fails there fails its test."""

    def work() -> None:
        raise LookupError("of the thread")

    with pytest.raises(LookupError, match="of the thread"):
        until_done(work)


def check_books(driver: StandIn, arena: Arena, regions: list[Region]) -> None:
    """What the arena says is mapped is what the driver has, each slab once."""
    arena.check_integrity()
    believed = {
        region.slot_address(slot)
        for region in regions
        for slot in region._slabs.keys() - region._aside
    }
    believed |= arena._vacated.addresses().keys()  # what the driver refused to take away
    mapped = driver.mapped()
    assert {one.address for one in mapped} == believed
    assert len({one.handle for one in mapped}) == len(mapped)
    assert all(one.accessible for one in mapped)
    assert arena.free == arena.slabs - sum(region.mapped for region in regions)
    assert driver.live().bytes == arena.slabs * SLAB
    assert driver.audit() == Audit()


@deterministic(60)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["map", "aside", "unmap", "vacate", "release"]),
            st.integers(0, 1),
            st.sets(st.integers(0, 3), min_size=1),
            some_failures,
        ),
        max_size=16,
    )
)
def test_regions(
    driver: StandIn, steps: list[tuple[str, int, set[int], tuple[int, CudaCode]]]
) -> None:
    """A mapping that fails maps nothing; what could not be taken away is taken away by the next
    attempt; a region that could not be released is released by the next, too."""
    driver.forget()  # of an example that failed
    arena = Arena(CudaVmm(0, 6, SLAB), at_once_slabs=1)
    regions = [arena.reserve(f"r{i}", 4) for i in range(2)]
    for what, which, slots, (nth, code) in steps:
        region = regions[which]
        held = sorted(slots & region._slabs.keys())
        if nth:
            driver.fail("*", nth, code)
        try:
            if what == "map":
                region.map(sorted(slots - region._slabs.keys()))
            elif what == "aside":
                region.set_aside(sorted(slots - region._slabs.keys()))
                region.map_aside(sorted(region._aside))
            elif what == "unmap":
                region.unmap(held)
            elif what == "vacate":
                region.vacate(held)
                arena.settle()
            else:
                region.release()
        except PoolExhausted:
            pass
        except CudaError:
            driver.reset()
            if what == "unmap":
                region.unmap([slot for slot in held if slot in region._slabs])
            elif what == "release":
                region.release()
        if what == "release":
            try:
                regions[which] = arena.reserve("again", 4)
            except CudaError:
                driver.reset()
                regions[which] = arena.reserve("again", 4)
        driver.reset()
        check_books(driver, arena, regions)
    for region in regions:
        region.release()
    check_books(driver, arena, [])
    arena.vmm.close()
    assert not any(driver.live())


def test_vacated_slabs_are_unmapped_during_a_capture(driver: StandIn) -> None:
    """The thread that unmaps them spoils no graph that another captures, and its driver's calls
    need no wait: nothing in line touched them."""
    arena = Arena(CudaVmm(0, 4, SLAB), at_once_slabs=1)
    region = arena.reserve("weights", 4)
    region.map(range(4))
    stream = call("cuStreamCreate", NON_BLOCKING)
    call("cuStreamBeginCapture", stream, GLOBAL)
    region.vacate(range(4))
    arena.settle()
    call("cuStreamEndCapture", stream)

    check_books(driver, arena, [region])
    assert driver.mapped() == []
    call("cuStreamDestroy", stream)
    region.release()
    arena.vmm.close()
    assert not any(driver.live())


def test_a_transfer_that_fails_to_map_leaves_nothing(driver: StandIn) -> None:
    """Weights whose slabs still lie elsewhere, which the driver does not take away: the load fails
    with that, nothing is lost, and the next one succeeds."""
    vmm = CudaVmm(0, 4, SLAB)
    arena, host = Arena(vmm), HostTier.create(4 * SLAB)
    swapper = Swapper(vmm.stream)
    other = arena.reserve("other", 4)
    other.map(range(4))
    layout = WeightLayout.plan([StoredTensor("a", "uint8", (4 * SLAB,), (1,), 4 * SLAB)])
    weights = DeviceWeights("weights:m", layout, arena, host, swapper, no_files)
    weights.store([slab * SLAB for slab in range(4)], fill=False)
    driver.fail("cuMemUnmap", 1, CudaCode.UNKNOWN)
    other.vacate(range(4))
    driver.fail("cuMemUnmap", 1, CudaCode.UNKNOWN)

    with pytest.raises(TransferFailed, match="CUDA_ERROR_UNKNOWN from cuMemUnmap"):
        weights.begin_load().wait()

    weights.evict()
    check_books(driver, arena, [other, weights.region])
    weights.begin_load().wait()
    check_books(driver, arena, [other, weights.region])
    swapper.close()
    weights.evict()
    for region in (weights.region, other):
        region.release()
    vmm.close()
    host.close()
    assert not any(driver.live())


def no_files(transfer: Transfer, image: Image) -> None:
    raise AssertionError("the weights have an image")


class Runtime:
    """Runtime memory of six slabs of a pool of eight, another owner's region, and a stream."""

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        self.vmm = CudaVmm(0, 8, SLAB)
        self.arena = Arena(self.vmm)
        self.memory = RuntimeMemory(self.arena, 6)
        self.capturing = False
        self.allocator = RuntimeAllocator(self.memory, lambda: self.capturing)
        self.kv = self.arena.reserve("kv", 4)
        self.compute, self.captured = (int(call("cuStreamCreate", NON_BLOCKING)) for _ in range(2))
        self.given: dict[int, int] = {}

    def take(self, slabs: int) -> None:
        address = self.allocator.take(slabs * SLAB)
        if address is not None:
            self.given[address] = slabs
            call("cuMemcpyAsync", address, address, SLAB, self.compute)  # a kernel at work there

    def give(self) -> None:
        if self.given:
            address = min(self.given)
            del self.given[address]
            self.allocator.give(address)

    def keep(self) -> None:
        if not self.kv.mapped:
            with contextlib.suppress(PoolExhausted, CudaError):
                self.memory.keep(self.kv, [0, 2])

    def retire(self) -> None:
        if kept := self.kv.mapped:
            self.kv.unmap([0, 2])
            self.memory.discharge(kept)

    def check(self) -> None:
        """What was given out and not given back is what is counted, and what is mapped."""
        self.allocator.let_go()
        self.driver.reset()
        used = sum(self.given.values()) + self.kv.mapped
        assert self.memory.used == used <= 6
        assert self.arena.free == 8 - used
        assert len(self.driver.mapped()) == used
        assert self.driver.live().ranges == 1 + len(self.given)
        assert self.driver.audit() == Audit()
        self.arena.check_integrity()

    def close(self) -> None:
        while self.given:
            self.give()
        self.retire()
        self.check()
        self.kv.release()
        for stream in (self.compute, self.captured):
            call("cuStreamDestroy", stream)
        self.vmm.close()


@deterministic(80)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "give", "keep", "capture"]), st.integers(1, 3), some_failures
        ),
        max_size=14,
    )
)
def test_runtime_memory(
    driver: StandIn, steps: list[tuple[str, int, tuple[int, CudaCode]]]
) -> None:
    """Torch's allocator gets memory or none; what it gives back is waited for, unmapped and
    discharged once, at the latest by the next attempt."""
    driver.forget()  # of an example that failed
    runtime = Runtime(driver)
    for what, slabs, (nth, code) in steps:
        if what == "capture":
            runtime.retire()
            capture(runtime)
        elif nth:
            driver.fail("*", nth, code)
        with contextlib.suppress(CudaError):
            if what == "take":
                runtime.take(slabs)
            elif what == "give":
                runtime.give()
            elif what == "keep":
                runtime.keep()
        driver.reset()
        runtime.check()
    runtime.close()
    assert not any(driver.live())


def capture(runtime: Runtime) -> None:
    """What torch takes and gives back while a graph is captured does not spoil the graph."""
    call("cuStreamBeginCapture", runtime.captured, GLOBAL)
    runtime.capturing = True
    runtime.take(1)
    runtime.give()
    runtime.capturing = False
    call("cuStreamEndCapture", runtime.captured)


class Floor:
    """A pool of eight slabs that are mapped one by one, two streams, and a compute stream."""

    def __init__(self) -> None:
        self.vmm = CudaVmm(0, 8, SLAB)
        self.base = self.vmm.reserve(8 * SLAB)
        self.vmm.map(self.base, 0, 8)
        self.host = HostTier.create(SLAB)
        self.compute = int(call("cuStreamCreate", NON_BLOCKING))
        self.vmm.compute_stream = self.compute
        self.streams: list[CudaStream] = [self.vmm.stream(f"s{i}") for i in range(2)]

    def start(
        self, slab: int, stream: int, kind: TransferKind, needs: list[Transfer], pieces: int
    ) -> Transfer:
        """Into a slab: two copies, one of them of rows, for each piece."""
        transfer = Transfer(kind, "m", 24 * pieces, time.monotonic())
        place, source = self.base + slab * SLAB, self.host.address(slab * 64, 64)
        self.host.view(slab * 64, 8)[:] = b"slab-%03d" % slab
        copies = [Copy(place + 64, source, 8, 2, 32, 16), Copy(place, source, 8)] * pieces
        self.streams[stream].run(transfer, copies, needs=needs)
        return transfer

    def read(self, slab: int) -> bytes:
        self.vmm.copy(self.host.address(1 << 20, 8), self.base + slab * SLAB, 8)
        return bytes(self.host.view(1 << 20, 8))

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.vmm.context.use()
        call("cuStreamSynchronize", self.compute)
        call("cuStreamDestroy", self.compute)
        self.vmm.release(self.base, 8 * SLAB)
        self.vmm.close()
        self.host.close()


@deterministic(60)
@given(
    transfers=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(TransferKind),
            st.booleans(),
            st.integers(1, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    name=st.sampled_from(
        [
            *("cuMemcpyAsync", "cuMemcpy2DAsync", "cuEventRecord", "cuEventCreate"),
            *("cuStreamWaitEvent", "cuEventSynchronize", "cuEventElapsedTime"),
        ]
    ),
    failure=some_failures,
)
def test_transfers(
    driver: StandIn,
    transfers: list[tuple[int, TransferKind, bool, int, bool]],
    name: str,
    failure: tuple[int, CudaCode],
) -> None:
    """Each ends, with its bytes, the driver's error or because it was cancelled, and when it has
    ended no copy of it is in line: its slab can be unmapped. The streams go on."""
    driver.forget()  # of an example that failed
    floor = Floor()
    nth, code = failure
    if nth:
        driver.fail(name, nth, code)
    started: list[Transfer] = []
    with contextlib.suppress(CudaError):
        call("cuMemcpyAsync", floor.base, floor.base, 8, floor.compute)
    for slab, (stream, kind, chained, pieces, cancelled) in enumerate(transfers):
        needs = started[-1:] if chained else []
        started.append(floor.start(slab, stream, kind, needs, pieces))
        if cancelled:
            started[-1].cancel()
    for slab, transfer in enumerate(started):
        until_done(transfer.join)
        with contextlib.suppress(CudaError):
            call("cuStreamSynchronize", floor.compute)
        if transfer.error is not None:
            assert code.name in str(transfer.error) or "was cancelled" in str(transfer.error)
            floor.vmm.context.use()
            floor.vmm.unmap(floor.base + slab * SLAB)
            assert driver.audit() == Audit()
            floor.vmm.map(floor.base + slab * SLAB, slab)
    driver.reset()
    for slab, transfer in enumerate(started):
        assert transfer.error is not None or floor.read(slab) == b"slab-%03d" % slab
    for stream in range(2):
        again = floor.start(6 + stream, stream, TransferKind.KV_IN, [], 1)
        until_done(again.join)
        again.wait()
        assert floor.read(6 + stream) == b"slab-%03d" % (6 + stream)
    floor.close()
    assert not any(driver.live())
    assert driver.audit() == Audit()


def test_a_cancelled_transfer_whose_wait_is_refused(driver: StandIn) -> None:
    """Its copies are waited for before it ends, though it was cancelled before the refusal."""
    floor = Floor()
    stream, place = floor.streams[0], floor.base
    first, second = (Transfer(TransferKind.WEIGHTS, "m", 16, time.monotonic()) for _ in range(2))
    in_line, cancelled, ended, unmapped = (threading.Event() for _ in range(4))

    def copies_of_first() -> Iterator[Copy]:
        yield Copy(place, floor.host.address(0, 8), 8)
        in_line.set()
        cancelled.wait(PATIENCE_SECONDS)
        yield Copy(place + 8, floor.host.address(8, 8), 8)

    def copies_of_second() -> Iterator[Copy]:
        ended.set()  # nothing more of the first is put in line
        unmapped.wait(PATIENCE_SECONDS)
        yield Copy(place + SLAB, floor.host.address(0, 16), 16)

    driver.hold(stream.handle)
    # The wait for the first piece; and the one after it, which would do its copy. (What one
    # injection takes, the other does not count.)
    for nth in (2, 2):
        driver.fail("cuEventSynchronize", nth, CudaCode.OUT_OF_MEMORY)
    stream.run(first, copies_of_first())
    stream.run(second, copies_of_second())
    assert in_line.wait(PATIENCE_SECONDS)
    first.cancel()
    cancelled.set()
    assert ended.wait(PATIENCE_SECONDS)
    driver.let_go(stream.handle)
    until_done(first.join)
    floor.vmm.context.use()
    floor.vmm.unmap(place)
    audit = driver.audit()
    unmapped.set()
    until_done(second.join)
    floor.close()

    assert isinstance(first.error, TransferCancelled)
    assert audit == Audit()


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_pool_that_cannot_be_made(driver: StandIn, nth: int) -> None:
    """Whichever call is refused: an error with its name, and all that was taken is given back."""
    driver.fail("*", nth, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match=r"^CUDA_ERROR_OUT_OF_MEMORY from cu"):
        CudaVmm(0, 2, SLAB)

    assert not any(driver.live())


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_streams_that_cannot_be_made(driver: StandIn, nth: int) -> None:
    """A swapper that lacks one of its streams ends those it has."""
    vmm, threads = CudaVmm(0, 1, SLAB), {*threading.enumerate()}
    driver.fail("cuStreamCreate", nth, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY from cuStreamCreate"):
        Swapper(vmm.stream)

    assert {*threading.enumerate()} <= threads  # those of earlier tests may end meanwhile
    assert driver.live().streams == 1  # the pool's own
    vmm.close()


@pytest.mark.parametrize("nth", [2, 3])
def test_threads_that_were_refused_the_context(driver: StandIn, nth: int) -> None:
    """The two threads of a stream begin with it; what one is refused, it asks for again."""
    vmm, host = CudaVmm(0, 1, SLAB), HostTier.create(SLAB)
    base = vmm.reserve(SLAB)
    vmm.map(base, 0)
    driver.fail("cuCtxSetCurrent", nth, CudaCode.UNKNOWN)
    stream = vmm.stream("s")
    transfer = Transfer(TransferKind.WEIGHTS, "m", 8, time.monotonic())
    stream.run(transfer, [Copy(base, host.address(0, 8), 8)])
    until_done(transfer.join)
    transfer.wait()
    stream.close()
    vmm.release(base, SLAB)
    vmm.close()
    host.close()


@pytest.mark.parametrize(
    "name", ["cuIpcGetEventHandle", "cuEventRecord", "cuStreamWaitEvent", "cuIpcOpenEventHandle"]
)
def test_events_between_processes(driver: StandIn, name: str) -> None:
    """A call that is refused is an error for the caller, or is made up for by a wait of the host's:
    what comes after the other process's event comes after it all the same. No event is left."""
    floor = Floor()
    out = floor.start(0, 0, TransferKind.WEIGHTS, [], 1)
    events = driver.live().events
    until_done(out.join)
    driver.fail(name, 2 if name == "cuEventRecord" else 1, CudaCode.OUT_OF_MEMORY)
    with contextlib.suppress(CudaError):
        shared = floor.streams[0].export(out)
        try:
            call("cuMemcpyAsync", floor.base + SLAB, floor.host.address(0, 8), 8, floor.compute)
            call("cuEventRecord", shared.event, floor.compute)
            floor.streams[1].await_event(shared.handle)
            after = Transfer(TransferKind.WEIGHTS, "m", 8, time.monotonic())
            floor.streams[1].run(after, [Copy(floor.base + 2 * SLAB, floor.base + SLAB, 8)])
            until_done(after.join)
            after.wait()
            assert floor.read(2) == b"slab-000"
        finally:
            shared.close()
    driver.reset()
    floor.close()
    assert events
    assert not any(driver.live())


def test_an_order_that_cannot_be_kept(driver: StandIn) -> None:
    """If neither the stream nor the host can wait for another process, transfers fail with that
    error: they do not go ahead of it."""
    floor = Floor()
    out = floor.start(0, 0, TransferKind.WEIGHTS, [], 1)
    until_done(out.join)
    shared = floor.streams[0].export(out)
    driver.fail("cuStreamWaitEvent", 1, CudaCode.OUT_OF_MEMORY)
    driver.fail("cuEventSynchronize", 1, CudaCode.OUT_OF_MEMORY)
    floor.streams[1].await_event(shared.handle)
    after = floor.start(2, 1, TransferKind.WEIGHTS, [], 1)
    until_done(after.join)
    with pytest.raises(TransferFailed, match="OUT_OF_MEMORY from cuEventSynchronize"):
        after.wait()
    shared.close()
    floor.close()


def test_scratch_that_cannot_be_mapped(driver: StandIn) -> None:
    """Of a range whose third slab is refused, nothing stays mapped; and it works the next time."""
    scrap = Scratch(0, SLAB)
    driver.fail("cuMemSetAccess", 3, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY from cuMemSetAccess"):
        scrap.reserve(4 * SLAB)
    assert driver.live().mappings == 0
    scrap.release()
    assert scrap.reserve(4 * SLAB)
    scrap.close()
    assert not any(driver.live())


@pytest.mark.parametrize("nth", range(1, 7))
def test_scratch_that_cannot_be_given_back(driver: StandIn, nth: int) -> None:
    """Whichever call is refused: what is left is given back by the next attempt."""
    scrap = Scratch(0, SLAB)
    for _ in range(2):
        scrap.reserve(2 * SLAB)
    name = "cuMemUnmap" if nth <= 4 else "cuMemAddressFree"
    driver.fail(name, nth if nth <= 4 else nth - 4, CudaCode.UNKNOWN)
    with pytest.raises(CudaError, match=f"UNKNOWN from {name}"):
        scrap.close()
    assert driver.live().contexts == 0
    scrap.close()

    assert not any(driver.live())


def test_a_slot_whose_mapping_stayed_can_be_mapped(driver: StandIn) -> None:
    """What a mapping that failed could not take away, the next one there does."""
    arena = Arena(CudaVmm(0, 2, SLAB))
    region = arena.reserve("kv", 2)
    driver.fail("cuMemSetAccess", 1, CudaCode.OUT_OF_MEMORY)
    driver.fail("cuMemUnmap", 1, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY from cuMemSetAccess"):
        region.map([0])
    region.map([0, 1])

    check_books(driver, arena, [region])
    region.release()
    arena.vmm.close()


def test_torch_gets_what_it_gave_back(driver: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    """Memory whose return was refused is returned before torch gets none; not while a graph is
    captured, which the wait for the device would spoil."""
    runtime = Runtime(driver)
    runtime.take(6)
    driver.fail("cuMemUnmap", 1, CudaCode.UNKNOWN)
    runtime.give()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "what torch gives back cannot be taken yet"
    ]
    call("cuStreamBeginCapture", runtime.captured, GLOBAL)
    runtime.capturing = True
    assert runtime.allocator.take(6 * SLAB) is None
    runtime.capturing = False
    call("cuStreamEndCapture", runtime.captured)
    runtime.take(6)
    assert list(runtime.given.values()) == [6]
    runtime.close()


def test_an_event_whose_destruction_is_refused(driver: StandIn) -> None:
    """Closing it again destroys it."""
    vmm = CudaVmm(0, 1, SLAB)
    vmm.context.use()
    events = driver.live().events
    shared = SharedEvent(vmm.context)
    driver.fail("cuEventDestroy", 1, CudaCode.UNKNOWN)
    with pytest.raises(CudaError, match="UNKNOWN from cuEventDestroy"):
        shared.close()
    shared.close()

    assert driver.live().events == events
    vmm.close()


@pytest.mark.parametrize(
    ("name", "nth", "left"),
    [
        *(("cuCtxSetCurrent", nth, "") for nth in (1, 2, 3)),  # the stream, page-locking, the pool
        *(("cuMemHostRegister", nth, "") for nth in (1, 2)),
        *(("cuMemHostUnregister", nth, "pinned") for nth in (1, 2)),
        *(("cuStreamDestroy", nth, "streams") for nth in (1, 2)),
        *(("cuEventDestroy", nth, "events") for nth in (1, 2)),
        *(("cuMemRelease", nth, "handles") for nth in (1, 2)),
        ("cuDevicePrimaryCtxRelease", 1, "contexts"),
    ],
)
def test_closing_goes_on(driver: StandIn, name: str, nth: int, left: str) -> None:
    """A call that is refused while a stream and its pool are closed raises nothing, and keeps
    nothing else from being given back."""
    vmm, host = CudaVmm(0, 2, SLAB), HostTier.create(SLAB)
    base = vmm.reserve(SLAB)
    vmm.map(base, 0)
    if name == "cuMemHostRegister":
        driver.fail(name, nth, CudaCode.UNKNOWN)
    pinning = vmm.register(host.address(0, SLAB), SLAB, chunk_bytes=1 << 20)
    with contextlib.suppress(CudaError):
        pinning.wait()
    stream = vmm.stream("s")
    transfer = Transfer(TransferKind.WEIGHTS, "m", 8, time.monotonic())
    stream.run(transfer, [Copy(base, host.address(0, 8), 8)])
    until_done(transfer.join)
    vmm.release(base, SLAB)
    if name != "cuMemHostRegister":
        driver.fail(name, nth, CudaCode.UNKNOWN)
    until_done(stream.close)
    vmm.close()
    host.close()

    counts = driver.live()._replace(bytes=0)._asdict()
    assert {what: count for what, count in counts.items() if count} == ({left: 1} if left else {})
    driver.forget()


def test_a_copy_that_fails_half_way(driver: StandIn) -> None:
    """Parts in line before one that was refused have been waited for when the error comes."""
    vmm, host = CudaVmm(0, 1, SLAB), HostTier.create(1 << 20)
    base = vmm.reserve(SLAB)
    vmm.map(base, 0)
    vmm.register(host.address(0, 1 << 20), 1 << 20, chunk_bytes=1 << 18).wait()
    driver.fail("cuMemcpyAsync", 3, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY from cuMemcpyAsync"):
        vmm.copy(base, host.address(0, 1 << 20), 1 << 20)
    vmm.release(base, SLAB)
    vmm.close()
    host.close()

    assert driver.audit() == Audit()


def test_pages_are_made_before_they_are_locked(driver: StandIn) -> None:
    """The stand-in makes none when memory is registered, so these are ours."""
    vmm, host = CudaVmm(0, 1, SLAB), HostTier.create(SLAB)
    assert os.fstat(host.fd).st_blocks == 0
    vmm.register(host.address(0, SLAB), SLAB, chunk_bytes=1 << 20).wait()

    assert os.fstat(host.fd).st_blocks * 512 == SLAB
    vmm.close()
    host.close()


def test_pinned_copies_are_of_locked_memory(driver: StandIn) -> None:
    """Once the tier is page-locked no copy has to go through memory of the driver's own."""
    floor = Floor()
    floor.vmm.register(floor.host.address(0, SLAB), SLAB, chunk_bytes=1 << 20).wait()
    floor.start(0, 0, TransferKind.WEIGHTS, [], 2).wait()
    floor.vmm.copy(floor.base, floor.host.address(0, SLAB), SLAB)

    assert driver.pageable_copies() == 0
    floor.close()


def whole_life(ended: list[Transfer]) -> Iterator[Callable[[], object]]:
    """Steps of a worker's memory, from its pool to its end."""
    made: dict[str, Any] = {"host": HostTier.create(SLAB)}

    def pool() -> None:
        made["vmm"] = CudaVmm(0, 4, SLAB)

    def regions() -> None:
        made["arena"] = Arena(made["vmm"], at_once_slabs=1)
        made["allocator"] = RuntimeAllocator(RuntimeMemory(made["arena"], 2), lambda: False)
        made["weights"] = made["arena"].reserve("weights", 2)
        made["weights"].map([0, 1])

    def streams() -> None:
        made["swapper"] = Swapper(made["vmm"].stream)
        made["pinning"] = made["vmm"].register(made["host"].address(0, SLAB), SLAB, 1 << 20)

    def transfers() -> None:
        for kind in TransferKind:
            copies = [Copy(made["weights"].address, made["host"].address(0, 64), 64)]
            writes = ["weights"] if kind == TransferKind.KV_IN else []
            ended.append(made["swapper"].start(kind, "m", copies, nbytes=64, writes=writes))

    def waits() -> None:
        made["vmm"].context.use()
        made["vmm"].compute_waits(ended[-1])
        made["pinning"].wait()

    def runtime() -> None:
        address = made["allocator"].take(SLAB)
        if address is None:
            raise CudaError("none", 0, "logged")
        made["allocator"].give(address)
        made["allocator"].let_go()

    def unmap() -> None:
        made["swapper"].settle()
        made["weights"].vacate([0, 1])
        made["arena"].settle()
        made["weights"].release()

    yield from (pool, regions, streams, transfers, waits, runtime, unmap)
    if "swapper" in made:
        yield made["swapper"].close
    if "vmm" in made:
        yield made["vmm"].close
    yield made["host"].close


@deterministic(80)
@given(nth=st.integers(1, 121), code=st.sampled_from(LASTING))
def test_a_broken_context_ends_everything(driver: StandIn, nth: int, code: CudaCode) -> None:
    """From the call on which a context breaks, each step fails with that error's name, none waits
    for ever, every transfer ends, and closing is possible."""
    driver.forget()  # of an example that failed
    driver.fail("*", nth, code)
    errors: list[BaseException] = []
    ended: list[Transfer] = []

    def live() -> None:
        for step in whole_life(ended):
            if errors and step.__name__ != "close":
                continue  # the worker has ended
            try:
                step()
            except (CudaError, TransferFailed) as error:
                errors.append(error)

    until_done(live)
    for transfer in ended:
        assert transfer.done
        assert (
            transfer.error is None
            or isinstance(transfer.error, TransferCancelled)
            or (code.name in str(transfer.error))
        )
    if errors:  # later ones were not tried, and closing has none
        with pytest.raises(CudaError, match=code.name):
            call("cuCtxSynchronize")
    assert len(errors) <= 1
    if errors and "logged" not in str(errors[0]):
        assert code.name in str(errors[0])
    driver.forget()


def test_a_device_lost_under_transfers(driver: StandIn) -> None:
    """Transfers in line fail with its error, and their streams can be closed."""
    floor = Floor()
    driver.hold(floor.compute)
    call("cuMemcpyAsync", floor.base, floor.base, 8, floor.compute)
    first = floor.start(0, 0, TransferKind.KV_IN, [], 2)
    second = floor.start(1, 1, TransferKind.KV_OUT, [first], 2)
    driver.lose(CudaCode.ECC_UNCORRECTABLE)
    for transfer in (first, second):
        until_done(transfer.join)
        assert "CUDA_ERROR_ECC_UNCORRECTABLE" in str(transfer.error)
    for stream in floor.streams:
        until_done(stream.close)
    floor.vmm.close()
    floor.host.close()
    driver.forget()
