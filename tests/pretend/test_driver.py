"""The pretend driver sees what no program may do, and nothing in what programs may do."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

SLAB = 2 << 20
GLOBAL, RELAXED = 0, 2
FORBIDDEN, SPOILT = 900, 901


class Driver:
    """Both halves of it, and a mapped slab."""

    def __init__(self, audit: Path) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self.rt = ctypes.CDLL("libcudart.so.13")
        self.audit = audit
        self.cu.cuCtxSynchronize()  # what a test before this one left in line
        self.slab = ctypes.c_uint64()
        handle = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        size = ctypes.c_size_t(SLAB)
        assert not self.cu.cuMemAddressReserve(ctypes.byref(self.slab), size, size, zero, zero)
        assert not self.cu.cuMemCreate(ctypes.byref(handle), size, None, zero)
        assert not self.cu.cuMemMap(self.slab, size, ctypes.c_size_t(0), handle, zero)
        assert not self.cu.cuMemSetAccess(self.slab, size, None, ctypes.c_size_t(1))

    def stream(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert not self.cu.cuStreamCreate(ctypes.byref(made), 1)
        return made

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """An event, recorded there."""
        made = ctypes.c_void_p()
        assert not self.cu.cuEventCreate(ctypes.byref(made), 0)
        assert not self.cu.cuEventRecord(made, stream)
        return made

    def kernel(self, stream: ctypes.c_void_p) -> None:
        assert not self.cu.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

    def copy(self, stream: ctypes.c_void_p) -> int:
        page = (ctypes.c_char * 64)()
        there = ctypes.c_uint64(ctypes.addressof(page))
        return int(self.cu.cuMemcpyAsync(self.slab, there, ctypes.c_size_t(64), stream))

    def unmap(self) -> int:
        return int(self.cu.cuMemUnmap(self.slab, ctypes.c_size_t(SLAB)))

    def faults(self) -> list[str]:
        if not self.audit.exists():
            return []
        return [line.split("\t")[1] for line in self.audit.read_text().splitlines()]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    if os.environ.get("PRETEND") != "1":
        pytest.fail("this is for the pretend driver: run `make gpu-dry`")
    monkeypatch.setenv("PRETEND_AUDIT", str(tmp_path / "faults"))
    return Driver(tmp_path / "faults")


@pytest.mark.parametrize("work", [Driver.kernel, Driver.copy])
def test_memory_is_unmapped_under_work(driver: Driver, work: object) -> None:
    work(driver, driver.stream())  # type: ignore[operator]
    driver.unmap()

    assert driver.faults() == ["unmapped_in_use"]


def test_work_that_the_host_waited_for(driver: Driver) -> None:
    """Directly, and through an event of another stream."""
    first, second = driver.stream(), driver.stream()
    driver.kernel(first)
    assert not driver.cu.cuStreamWaitEvent(second, driver.event(first), 0)
    driver.copy(second)
    assert not driver.cu.cuStreamSynchronize(second)
    driver.unmap()

    assert driver.faults() == []


def test_an_event_before_the_work_is_no_wait_for_it(driver: Driver) -> None:
    stream = driver.stream()
    event = driver.event(stream)
    driver.kernel(stream)
    assert not driver.cu.cuEventSynchronize(event)
    driver.unmap()

    assert driver.faults() == ["unmapped_in_use"]


@pytest.mark.parametrize(
    ("mode", "refused", "ended"), [(GLOBAL, FORBIDDEN, SPOILT), (RELAXED, 0, 0)]
)
def test_waits_during_a_capture(driver: Driver, mode: int, refused: int, ended: int) -> None:
    stream, other, graph = driver.stream(), driver.stream(), ctypes.c_void_p()
    event = driver.event(other)
    assert not driver.rt.cudaStreamBeginCapture(stream, mode)

    assert driver.cu.cuEventSynchronize(event) == refused
    assert driver.rt.cudaStreamEndCapture(stream, ctypes.byref(graph)) == ended
    assert driver.faults() == (["forbidden_in_capture"] if refused else [])


def test_memory_is_registered_once(driver: Driver) -> None:
    pages = (ctypes.c_char * 8192)()
    size = ctypes.c_size_t(8192)
    assert not driver.cu.cuMemHostRegister_v2(pages, size, 0)
    assert driver.cu.cuMemHostRegister_v2(pages, size, 0)
    assert not driver.cu.cuMemHostUnregister(pages)
    assert driver.cu.cuMemHostUnregister(pages)

    assert driver.faults() == ["registered_twice", "freed_twice"]


def test_a_copy_to_unmapped_memory_breaks_the_context(driver: Driver) -> None:
    """For the rest of the process, so this is the last test."""
    driver.unmap()
    stream = driver.stream()

    assert driver.copy(stream) == 700
    assert driver.cu.cuStreamSynchronize(stream) == 700
    assert driver.faults() == ["illegal_address"]
