"""The order of copies and compute on a GPU, with delays put where a missing wait would show."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import cupy
import pytest
import torch

from appliance.kernels.arrays import device_bytes
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferKind
from tests.gpu.conftest import DEVICE, SLAB

DELAY_SECONDS = 0.2
SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
  long long began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - began < nanoseconds);
}
"""


class Device:
    """A pool that is mapped whole, page-locked host memory, and streams that can be delayed."""

    def __init__(self) -> None:
        torch.cuda.set_device(DEVICE)
        self.vmm = CudaVmm(DEVICE, 32, SLAB)
        self.base = self.vmm.reserve(32 * SLAB)
        self.vmm.map(self.base, 0, 32)
        self.host = HostTier.create(32 * SLAB)
        self.vmm.register(self.host.address(0, 1), 32 * SLAB).wait()
        self.compute = torch.cuda.Stream()
        self.vmm.compute_stream = self.compute.cuda_stream
        self.first = self.vmm.stream("first")
        self.second = self.vmm.stream("second")
        self.tensor = device_bytes(self.base, 32 * SLAB, DEVICE)
        self._spin: Any = cupy.RawKernel(SPIN, "spin")
        self._spin((1,), (1,), (cupy.int64(1),))
        self.tensor.zero_()
        torch.cuda.synchronize()

    def delay(self, stream: int, seconds: float = DELAY_SECONDS) -> None:
        """Nothing given to the stream after this begins before so many seconds are over."""
        with cupy.cuda.ExternalStream(stream):
            self._spin((1,), (1,), (cupy.int64(int(seconds * 1e9)),))

    def run(self, stream: Any, kind: TransferKind, *copies: Copy, **order: Any) -> Transfer:
        nbytes = sum(copy.nbytes * copy.rows for copy in copies)
        transfer = Transfer(kind, "m", nbytes, time.monotonic())
        stream.run(transfer, copies, **order)
        return transfer

    def close(self) -> None:
        torch.cuda.synchronize()
        self.first.close()
        self.second.close()
        self.vmm.release(self.base, 32 * SLAB)
        self.vmm.close()
        self.host.close()


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def test_delays_show_a_missing_wait(device: Device) -> None:
    """What this file relies on: weights do not wait for compute, and read what was there before."""
    device.delay(device.compute.cuda_stream)
    with torch.cuda.stream(device.compute):
        device.tensor[:SLAB].fill_(7)
    out = Copy(device.host.address(0, SLAB), device.base, SLAB)
    device.run(device.first, TransferKind.WEIGHTS, out).wait()

    assert device.host.view(0, SLAB)[0] == 0


def test_kv_leaves_after_the_step_that_writes_it(device: Device) -> None:
    """A swap out comes after what compute had been given, and this thread did not wait for it."""
    device.delay(device.compute.cuda_stream)
    with torch.cuda.stream(device.compute):
        device.tensor[:SLAB].fill_(7)
    began = time.monotonic()
    out = Copy(device.host.address(0, SLAB), device.base, SLAB)
    transfer = device.run(device.first, TransferKind.KV_OUT, out)
    assert time.monotonic() - began < DELAY_SECONDS / 2
    transfer.wait()

    assert set(device.host.view(0, SLAB)) == {7}


def test_compute_reads_kv_that_is_in(device: Device) -> None:
    """Rule 1: compute given before its KV has landed finds it; this thread did not wait."""
    device.host.view(0, SLAB)[:] = b"\x05" * SLAB
    device.delay(device.first.handle)
    there = Copy(device.base, device.host.address(0, SLAB), SLAB)
    transfer = device.run(device.first, TransferKind.KV_IN, there)
    began = time.monotonic()
    device.vmm.compute_waits(transfer)
    assert time.monotonic() - began < DELAY_SECONDS / 2
    with torch.cuda.stream(device.compute):
        seen = device.tensor[:SLAB].clone()
    device.compute.synchronize()

    assert seen.unique().tolist() == [5]


def test_layers_are_computed_while_later_ones_land(device: Device) -> None:
    """Waiting for the first layer's bytes is not waiting for all: compute overtakes the copy."""
    size = 24 * SLAB
    gate = threading.Event()

    def copies() -> Iterator[Copy]:
        yield Copy(device.base, device.host.address(0, SLAB), SLAB)
        assert gate.wait(60)
        yield Copy(device.base + SLAB, device.host.address(SLAB, size - SLAB), size - SLAB)

    device.host.view(0, size)[:] = b"\x03" * size
    transfer = Transfer(TransferKind.WEIGHTS, "m", size, time.monotonic())
    device.first.run(transfer, copies())
    device.vmm.compute_waits(transfer, SLAB)
    with torch.cuda.stream(device.compute):
        first = device.tensor[:SLAB].clone()
    device.compute.synchronize()
    assert not transfer.done
    gate.set()
    device.vmm.compute_waits(transfer)
    with torch.cuda.stream(device.compute):
        last = device.tensor[SLAB:size].clone()
    device.compute.synchronize()

    assert first.unique().tolist() == [3]
    assert last.unique().tolist() == [3]
    transfer.wait()


def test_a_swap_in_comes_after_the_swap_out_it_reads(device: Device) -> None:
    """Rule 2: a reader of the host's place waits, on another stream, for who writes it."""
    device.tensor[:SLAB].fill_(9)
    torch.cuda.synchronize()
    place = device.host.address(0, SLAB)
    device.delay(device.first.handle)
    out = device.run(device.first, TransferKind.KV_OUT, Copy(place, device.base, SLAB))
    back = Copy(device.base + SLAB, place, SLAB)
    device.run(device.second, TransferKind.KV_IN, back, needs=[out]).wait()

    assert out.done
    assert device.tensor[SLAB : 2 * SLAB].unique().tolist() == [9]


def test_a_swap_in_comes_after_copies_that_still_read_its_target(device: Device) -> None:
    """Rule 3: blocks that are on their way out are not overwritten before they are out."""
    device.tensor[:SLAB].fill_(9)
    torch.cuda.synchronize()
    device.host.view(SLAB, SLAB)[:] = b"\x04" * SLAB
    device.delay(device.first.handle)
    out = Copy(device.host.address(0, SLAB), device.base, SLAB)
    leaving = device.run(device.first, TransferKind.KV_OUT, out)
    there = Copy(device.base, device.host.address(SLAB, SLAB), SLAB)
    device.run(device.second, TransferKind.KV_IN, there, after=[leaving]).wait()

    assert set(device.host.view(0, SLAB)) == {9}
    assert device.tensor[:SLAB].unique().tolist() == [4]


def test_the_trace_says_when_it_was_copied(device: Device) -> None:
    """A transfer that stood behind a delay began after it."""
    device.delay(device.first.handle)
    there = Copy(device.base, device.host.address(0, 16 * SLAB), 16 * SLAB)
    transfer = device.run(device.first, TransferKind.WEIGHTS, there)
    transfer.wait()
    trace = transfer.trace()

    assert trace.began - trace.queued >= DELAY_SECONDS * 0.9
    assert trace.ended - trace.began < DELAY_SECONDS
