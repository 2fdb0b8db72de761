"""Measures copies, mapping and page-locking of a device's memory, in a time that is given.

Copies are plain ones, without the bookkeeping of transfers: what a link, or the processor, can do
at best. The fastest of a few rounds counts, as all that is in the way makes them slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.ceilings.stopwatch import Clock, Stopwatch
from appliance.memory.ceilings.stored import ChunkRates, MemoryCeilings
from appliance.memory.host_tier import HostTier
from appliance.memory.vmm_host import HostVmm

MIB: Final = 1 << 20
CHUNKS: Final = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MAPPED_SLABS: Final = 64
"""Mapped at once to see what a slab costs."""

Places = Sequence[tuple[int, int]]
"""Destination and source of each chunk."""


class PlainCopy(Protocol):
    """Copies chunks of one size, one after the other, and returns when all are there."""

    def __call__(self, places: Places, nbytes: int, /) -> None: ...


def needed_slabs(nbytes: int, slab_bytes: int) -> int:
    """Slabs of the pool that `measure_copies` wants."""
    return max(-(-nbytes // slab_bytes), MAPPED_SLABS)


def measure_copies(
    arena: Arena,
    host_address: int,
    nbytes: int,
    copy: PlainCopy,
    lock: float | None,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> MemoryCeilings:
    """Copies of `nbytes` between the pool and host memory at an address, and mapping of slabs; of
    the arena nothing may be mapped. `lock` is the rate of page-locking, which was measured before.
    Takes about so many seconds. Raises what the backend raises; what was mapped is given back."""
    chunks = [chunk for chunk in CHUNKS if chunk <= nbytes] or [nbytes]
    watch = Stopwatch(seconds, 2 * len(chunks) + 1, clock)
    region = arena.reserve("ceilings", needed_slabs(nbytes, arena.slab_bytes))
    try:
        mapped, unmapped = watch.mapping(region, MAPPED_SLABS)
        region.map(range(region.slots))
        device, half = region.address, nbytes // 2

        def rate(to: int, start: int, size: int, chunk: int) -> float:
            places = [(to + at, start + at) for at in _whole(size, chunk)]
            return len(places) * chunk / watch.fastest(lambda: copy(places, chunk))

        rates = tuple(
            ChunkRates(
                chunk_bytes=chunk,
                into_pool=rate(device, host_address, nbytes, chunk),
                out_of_pool=rate(host_address, device, nbytes, chunk),
            )
            for chunk in chunks
        )
        within = rate(device, device + half, half, half)
    finally:
        region.release()
    return MemoryCeilings(
        copied_bytes=nbytes,
        chunks=rates,
        within_pool=within,
        slab_bytes=arena.slab_bytes,
        map_slab_seconds=mapped / MAPPED_SLABS,
        unmap_slab_seconds=unmapped / MAPPED_SLABS,
        lock=lock,
    )


def measure_host(
    nbytes: int, slab_bytes: int, seconds: float, clock: Clock = time.perf_counter
) -> MemoryCeilings:
    """The memory of the host, with a pool of the CPU's and a host tier of their own, each of
    `nbytes`. Raises `OSError` if there is no such memory."""
    tier = HostTier.create(nbytes)
    try:
        began = clock()
        locked = tier.lock()
        lock = nbytes / (clock() - began) if locked else None
        vmm = HostVmm(needed_slabs(nbytes, slab_bytes), slab_bytes)
        try:
            address = tier.address(0, nbytes)
            return measure_copies(Arena(vmm), address, nbytes, _copy, lock, seconds, clock)
        finally:
            vmm.close()
    finally:
        tier.close()


def _copy(places: Places, nbytes: int) -> None:
    """In one thread, as a stream of the host does it."""
    for destination, source in places:
        mapping.copy(destination, source, nbytes)


def _whole(nbytes: int, chunk: int) -> Iterator[int]:
    """Where whole chunks begin."""
    return iter(range(0, nbytes - chunk + 1, chunk))
