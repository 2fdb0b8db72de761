"""The stand-in driver is as strict as CUDA: what it refuses, and when; what its audit notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from appliance.memory.cuda.driver import CudaContext, CudaError, call, relaxed_capture
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from tests.patience import PATIENCE_SECONDS
from tests.stand_in.driver import Audit, CudaCode, StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]

DEFAULT = 0
NON_BLOCKING, DISABLE_TIMING = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Bare:
    """What a program asks of the driver: four slabs, three of them under addresses; two streams."""

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        self.vmm = CudaVmm(0, 4, SLAB)
        self.base = self.vmm.reserve(4 * SLAB)
        self.vmm.map(self.base, 0, 3)
        self.host = HostTier.create(SLAB)
        self.at = self.host.address(0, SLAB)
        self.stream, self.other = (int(call("cuStreamCreate", NON_BLOCKING)) for _ in range(2))
        self.event = call("cuEventCreate", DISABLE_TIMING)
        call("cuEventRecord", self.event, DEFAULT)

    def close(self) -> None:
        for stream in (self.stream, self.other):
            self.driver.let_go(stream)
            outcome(lambda stream=stream: call("cuStreamSynchronize", stream))
            call("cuStreamDestroy", stream)
        call("cuEventDestroy", self.event)
        self.vmm.release(self.base, 4 * SLAB)
        self.vmm.close()
        self.host.close()


@pytest.fixture
def bare(driver: StandIn) -> Iterator[Bare]:
    bare = Bare(driver)
    yield bare
    bare.close()


def outcome(work: Callable[[], object]) -> str:
    """``ok``, or the name of the error, without what they all begin with."""
    try:
        work()
    except CudaError as error:
        return error.name.removeprefix("CUDA_ERROR_")
    return "ok"


def on_thread(work: Callable[[], object], relaxed: bool) -> str:
    """The outcome on another thread."""
    said: list[str] = []

    def there() -> None:
        CudaContext(0).use()
        if relaxed:
            with relaxed_capture():
                said.append(outcome(work))
        else:
            said.append(outcome(work))
        call("cuDevicePrimaryCtxRelease", 0)

    thread = threading.Thread(target=there)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return said[0]


def calls_of(bare: Bare) -> dict[str, Callable[[], object]]:
    def remap() -> None:
        bare.vmm.map(bare.base + 3 * SLAB, 3)
        bare.vmm.unmap(bare.base + 3 * SLAB)

    def copy() -> None:
        call("cuMemcpyAsync", bare.base, bare.at, 8, bare.other)

    def register() -> None:
        call("cuMemHostRegister", bare.at, 4096, 0)
        call("cuMemHostUnregister", bare.at)

    return {
        "register": register,
        "event": lambda: call("cuEventSynchronize", bare.event),
        "map": remap,
        "copy": copy,
        "context": lambda: call("cuCtxSynchronize"),
    }


@pytest.mark.parametrize(
    ("name", "default", "relaxed"),
    [
        ("register", "STREAM_CAPTURE_UNSUPPORTED", "ok"),
        ("event", "STREAM_CAPTURE_UNSUPPORTED", "ok"),
        ("map", "ok", "ok"),
        ("copy", "ok", "ok"),
        ("context", "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_UNSUPPORTED"),
    ],
)
def test_calls_during_a_capture(bare: Bare, name: str, default: str, relaxed: str) -> None:
    """Of another thread, while a graph is captured as vLLM does: what an H200's driver answered
    (`benchmarks/gpu_probes.py`), to the call and at the capture's end."""
    for mode, expected in ((False, default), (True, relaxed)):
        call("cuStreamBeginCapture", bare.stream, GLOBAL)
        said = on_thread(calls_of(bare)[name], relaxed=mode)
        ended = outcome(lambda: call("cuStreamEndCapture", bare.stream))
        assert (said, ended) == (
            expected,
            "ok" if expected == "ok" else "STREAM_CAPTURE_INVALIDATED",
        )


@pytest.mark.parametrize(
    ("mode", "here", "there"), [(THREAD_LOCAL, False, True), (RELAXED, True, True)]
)
def test_captures_in_other_modes(bare: Bare, mode: int, here: bool, there: bool) -> None:
    """One of a thread forbids that thread only, a relaxed one none, what it need not."""
    register = calls_of(bare)["register"]
    for allowed, ask in (
        (there, lambda: on_thread(register, relaxed=False)),
        (here, lambda: outcome(register)),
    ):
        call("cuStreamBeginCapture", bare.stream, mode)
        assert (ask() == "ok") == allowed
        assert (outcome(lambda: call("cuStreamEndCapture", bare.stream)) == "ok") == allowed


def test_relaxed_is_for_the_time_of_the_context(bare: Bare) -> None:
    """A thread that was relaxed for a call is not any more."""
    with relaxed_capture():
        pass
    call("cuStreamBeginCapture", bare.stream, GLOBAL)
    said = outcome(lambda: call("cuEventSynchronize", bare.event))
    ended = outcome(lambda: call("cuStreamEndCapture", bare.stream))

    assert (said, ended) == ("STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED")


def test_what_is_captured_is_not_done(bare: Bare) -> None:
    """A copy given to the stream is recorded; its event and the stream cannot be waited for."""
    bare.host.view(0, 4)[:] = b"data"
    call("cuStreamBeginCapture", bare.stream, RELAXED)
    call("cuMemcpyAsync", bare.at + 8, bare.at, 4, bare.stream)
    call("cuStreamEndCapture", bare.stream)
    call("cuStreamSynchronize", bare.stream)
    assert bytes(bare.host.view(8, 4)) == b"\0\0\0\0"

    inside = call("cuEventCreate", DISABLE_TIMING)
    for error, wrong in (
        ("CAPTURED_EVENT", lambda: call("cuEventSynchronize", inside)),
        ("STREAM_CAPTURE_UNSUPPORTED", lambda: call("cuStreamSynchronize", bare.stream)),
        ("STREAM_CAPTURE_ISOLATION", lambda: call("cuStreamWaitEvent", bare.other, inside, 0)),
        ("STREAM_CAPTURE_ISOLATION", lambda: call("cuStreamWaitEvent", bare.stream, bare.event, 0)),
        (
            "STREAM_CAPTURE_WRONG_THREAD",
            lambda: on_thread(lambda: call("cuStreamEndCapture", bare.stream), relaxed=False),
        ),
    ):
        call("cuStreamBeginCapture", bare.stream, THREAD_LOCAL)
        call("cuEventRecord", inside, bare.stream)
        said = outcome(wrong) if "THREAD" not in error else wrong()
        assert said == error
        ended = outcome(lambda: call("cuStreamEndCapture", bare.stream))
        assert ended == ("ok" if "THREAD" in error else "STREAM_CAPTURE_INVALIDATED")
    call("cuEventDestroy", inside)


def test_the_default_stream_during_a_capture(bare: Bare) -> None:
    """It waits for streams that were made to be waited for: refused, if one of them is captured."""
    blocking = int(call("cuStreamCreate", 0))
    for stream, expected in ((bare.stream, "ok"), (blocking, "STREAM_CAPTURE_IMPLICIT")):
        call("cuStreamBeginCapture", stream, GLOBAL)
        assert outcome(lambda: call("cuMemcpyAsync", bare.base, bare.at, 8, DEFAULT)) == expected
        outcome(lambda s=stream: call("cuStreamEndCapture", s))
    call("cuCtxSynchronize")
    call("cuStreamDestroy", blocking)


def test_memory_unmapped_under_work(bare: Bare) -> None:
    """It is noted until the host has waited for the work, on whatever stream."""
    end = bare.base + 2 * SLAB
    call("cuMemcpyAsync", end, bare.at, 8, bare.stream)
    call("cuEventRecord", bare.event, bare.stream)
    call("cuStreamWaitEvent", bare.other, bare.event, 0)
    bare.vmm.unmap(bare.base)  # not there
    assert bare.driver.audit() == Audit()
    call("cuStreamSynchronize", bare.other)
    bare.vmm.unmap(end)
    assert bare.driver.audit() == Audit()

    call("cuMemcpyAsync", bare.base + SLAB, bare.at, 8, bare.stream)
    bare.vmm.unmap(bare.base + SLAB)
    assert bare.driver.audit() == Audit(unmapped_in_use=1)
    bare.vmm.map(bare.base + SLAB, 1)
    bare.driver.pardon()


def test_whole_mappings_are_unmapped(bare: Bare) -> None:
    """Several by one call; what is no whole mapping is refused, and nothing mapped is noted."""
    double = int(call("cuMemAddressReserve", 2 * SLAB, SLAB, 0, 0))
    handle = call("cuMemCreate", 2 * SLAB, None, 0)
    call("cuMemMap", double, 2 * SLAB, 0, handle, 0)
    assert outcome(lambda: call("cuMemUnmap", double, SLAB)) == "INVALID_VALUE"
    assert outcome(lambda: call("cuMemMap", double, 2 * SLAB, 0, handle, 0)) == "INVALID_VALUE"
    assert outcome(lambda: call("cuMemAddressFree", double, 2 * SLAB)) == "INVALID_VALUE"
    call("cuMemUnmap", double, 2 * SLAB)
    call("cuMemUnmap", double, 2 * SLAB)
    call("cuMemRelease", handle)
    assert outcome(lambda: call("cuMemRelease", handle)) == "INVALID_VALUE"
    assert outcome(lambda: call("cuMemMap", double, 2 * SLAB, 0, handle, 0)) == "INVALID_VALUE"
    call("cuMemAddressFree", double, 2 * SLAB)
    call("cuMemUnmap", bare.base, 3 * SLAB)

    assert bare.driver.live().mappings == 0
    assert bare.driver.audit() == Audit(
        unmapped_part=1,
        mapped_twice=1,
        freed_mapped=1,
        unmapped_nothing=1,
        freed_twice=1,
        used_after_free=1,
    )
    for slab in range(3):  # for the pool, which does not know
        call("cuMemMap", bare.base + slab * SLAB, SLAB, 0, bare.vmm._handles[slab], 0)
    bare.driver.pardon()


def test_things_used_or_given_back_after_their_end(bare: Bare) -> None:
    """Streams, events and page-locked memory: refused, and noted."""
    stream, event = int(call("cuStreamCreate", 1)), call("cuEventCreate", 2)
    call("cuMemHostRegister", bare.at, 4096, 0)
    twice = outcome(lambda: call("cuMemHostRegister", bare.at, 4096, 0))
    call("cuMemcpyAsync", bare.base, bare.at, 8, bare.stream)
    call("cuMemHostUnregister", bare.at)
    call("cuStreamDestroy", stream)
    call("cuEventDestroy", event)
    refused = [
        outcome(lambda: call("cuMemHostUnregister", bare.at)),
        outcome(lambda: call("cuStreamDestroy", stream)),
        outcome(lambda: call("cuEventDestroy", event)),
        outcome(lambda: call("cuStreamSynchronize", stream)),
        outcome(lambda: call("cuEventRecord", event, bare.stream)),
    ]

    assert twice == "HOST_MEMORY_ALREADY_REGISTERED"
    assert refused == ["HOST_MEMORY_NOT_REGISTERED", *["INVALID_HANDLE"] * 4]
    assert bare.driver.audit() == Audit(
        registered_twice=1, unregistered_in_use=1, freed_twice=3, used_after_free=2
    )
    bare.driver.pardon()
    call("cuStreamSynchronize", bare.stream)


def test_host_memory_that_is_not_locked_is_counted(bare: Bare) -> None:
    """CUDA does copies of such memory another way; a part of it locked is an error."""
    copy = lambda n: outcome(lambda: call("cuMemcpyAsync", bare.base, bare.at, n, bare.stream))  # noqa: E731
    assert copy(8) == "ok"
    assert bare.driver.pageable_copies() == 1
    call("cuMemHostRegister", bare.at, 4096, 0)
    assert (copy(8), copy(8192)) == ("ok", "INVALID_VALUE")
    assert bare.driver.pageable_copies() == 1
    call("cuStreamSynchronize", bare.stream)
    call("cuMemHostUnregister", bare.at)


def test_an_illegal_address_shows_later_and_stays(driver: StandIn) -> None:
    """The copy is taken, a wait for it fails, and with it everything, until the process ends."""
    bare = Bare(driver)
    nowhere = bare.base + 3 * SLAB
    call("cuMemcpyAsync", nowhere, bare.at, 8, bare.stream)
    call("cuMemcpyAsync", bare.base, bare.at, 8, bare.other)
    call("cuEventRecord", bare.event, bare.stream)
    call("cuStreamSynchronize", bare.other)
    expected = "ILLEGAL_ADDRESS"
    assert outcome(lambda: call("cuEventQuery", bare.event)) == expected
    for work in (
        lambda: call("cuStreamSynchronize", bare.other),
        lambda: call("cuMemUnmap", bare.base, SLAB),
        lambda: call("cuStreamCreate", 1),
        CudaVmm.close.__get__(bare.vmm),
    ):
        assert outcome(work) in (expected, "ok")
    assert driver.live().handles == 4
    driver.forget()
    bare.host.close()
    assert not any(driver.live())


def test_what_is_mapped_needs_access(driver: StandIn) -> None:
    """Between the two calls a slab is not to be read."""
    bare = Bare(driver)
    call("cuMemMap", bare.base + 3 * SLAB, SLAB, 0, bare.vmm._handles[3], 0)
    assert [one.accessible for one in driver.mapped()] == [True, True, True, False]
    call("cuMemcpyAsync", bare.at, bare.base + 3 * SLAB, 8, bare.stream)
    assert outcome(lambda: call("cuStreamSynchronize", bare.stream)) == "ILLEGAL_ADDRESS"
    driver.forget()
    bare.host.close()


@pytest.mark.parametrize("code", [CudaCode.ECC_UNCORRECTABLE, CudaCode.MISALIGNED_ADDRESS])
def test_a_lost_device_ends_what_waits_for_it(driver: StandIn, code: CudaCode) -> None:
    """A thread that waits for a stream goes on with the error."""
    bare = Bare(driver)
    driver.hold(bare.stream)
    call("cuMemcpyAsync", bare.base, bare.at, 8, bare.stream)
    said: list[str] = []

    def wait() -> None:
        bare.vmm.context.use()
        said.append(outcome(lambda: call("cuStreamSynchronize", bare.stream)))

    thread = threading.Thread(target=wait)
    thread.start()
    limit = time.monotonic() + PATIENCE_SECONDS
    while "cuStreamSynchronize" not in driver.calls() and time.monotonic() < limit:
        pass
    driver.lose(code)  # it holds the stand-in's lock until it sleeps
    thread.join(PATIENCE_SECONDS)

    assert said == [code.name]
    assert outcome(lambda: call("cuStreamCreate", 1)) == code.name
    driver.forget()
    bare.host.close()


def test_a_destroyed_stream_does_what_it_has(bare: Bare) -> None:
    """Its destruction does not wait; the memory is in use until the host has waited."""
    streams = bare.driver.live().streams
    for slab in (1, 2):
        stream = call("cuStreamCreate", NON_BLOCKING)
        call("cuMemcpyAsync", bare.base + slab * SLAB, bare.at, 8, stream)
        call("cuStreamDestroy", stream)
        if slab == 1:
            call("cuCtxSynchronize")
        bare.vmm.unmap(bare.base + slab * SLAB)

    assert bare.driver.live().streams == streams
    assert bare.driver.audit() == Audit(unmapped_in_use=1)
    bare.driver.pardon()


def test_any_call_can_be_made_to_fail(bare: Bare) -> None:
    """The nth of a name, or of all."""
    bare.driver.fail("*", 2, CudaCode.OUT_OF_MEMORY)
    synchronize = lambda: call("cuStreamSynchronize", bare.stream)  # noqa: E731
    assert [outcome(synchronize) for _ in range(3)] == ["ok", "OUT_OF_MEMORY", "ok"]
