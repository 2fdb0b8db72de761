"""Measures the copies of a GPU: page-locked host memory, its pool, and the link under load."""

from __future__ import annotations

import time
from collections.abc import Callable

from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.ceilings.copies import Places, measure_copies, needed_slabs
from appliance.memory.ceilings.stopwatch import Clock
from appliance.memory.ceilings.stored import MemoryCeilings
from appliance.memory.cuda.plain_copies import plain_copies
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier


def measure_gpu(
    device: int,
    nbytes: int,
    slab_bytes: int,
    seconds: float,
    meanwhile: Callable[[], object],
    clock: Clock = time.perf_counter,
) -> MemoryCeilings:
    """Of the driver's device of this number; its pool takes `nbytes`, and so does the host.
    `meanwhile` is called during copies from the host. Raises `OSError` or `ValueError`, as
    `CudaVmm` does."""
    tier = HostTier.create(nbytes)
    try:
        vmm = CudaVmm(device, needed_slabs(nbytes, slab_bytes), slab_bytes)
        try:
            address = tier.address(0, nbytes)
            # Before the driver locks them: what it makes itself takes several times as long.
            mapping.populate(address, nbytes)
            began = clock()
            # In one piece, as plain copies may not cross from one to another.
            vmm.register(address, nbytes, chunk_bytes=nbytes).wait()
            lock = nbytes / (clock() - began)

            def copy(places: Places, size: int) -> None:
                plain_copies(vmm.context, [places], size)

            found = measure_copies(Arena(vmm), address, nbytes, copy, lock, seconds, clock)
            _busy(vmm, address, nbytes, meanwhile)
            return found
        finally:
            vmm.close()
    finally:
        tier.close()


def _busy(vmm: CudaVmm, address: int, nbytes: int, meanwhile: Callable[[], object]) -> None:
    """Call something while the link is used."""
    arena = Arena(vmm)
    region = arena.reserve("ceilings", needed_slabs(nbytes, vmm.slab_bytes))
    try:
        region.map(range(region.slots))
        plain_copies(vmm.context, [[(region.address, address)] * 8], nbytes, meanwhile)
    finally:
        region.release()
