"""Copies, mapping and page-locking are measured: on a clock of the test's, the host and CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.ceilings.copies import CHUNKS, MAPPED_SLABS, measure_copies, measure_host
from appliance.memory.ceilings.stopwatch import MOST_ROUNDS, Stopwatch
from appliance.memory.ceilings.stored import ChunkRates, MemoryCeilings
from appliance.memory.cuda.ceilings import measure_gpu
from appliance.memory.cuda.driver import CudaContext, CudaError
from appliance.memory.cuda.plain_copies import plain_copies
from appliance.memory.host_tier import HostTier
from appliance.memory.vmm_host import HostVmm
from tests.stand_in.driver import CudaCode, StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]

MIB = 1 << 20


class Clock:
    """Goes on when it is told to, and a little at every look."""

    def __init__(self, look_seconds: float = 0.0) -> None:
        self.now = 0.0
        self._look_seconds = look_seconds

    def __call__(self) -> float:
        self.now += self._look_seconds
        return self.now

    def taking(self, *seconds: float) -> Callable[[], None]:
        """Work that takes so long, each time; the last one goes on."""
        left = list(seconds)

        def work() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_the_fastest_round_counts_and_the_first_does_not() -> None:
    """Until the time is over, at least two and at most eight; or as many as are asked for."""
    clock = Clock()
    assert Stopwatch(100.0, 1, clock).fastest(clock.taking(0.5, 3.0, 2.0, 4.0)) == 2.0
    assert clock.now == 9.5 + 4.0 * (MOST_ROUNDS - 3)

    clock.now = 0.0
    assert Stopwatch(1.0, 1, clock).fastest(clock.taking(5.0, 3.0, 2.0, 1.0)) == 2.0
    clock.now = 0.0
    assert Stopwatch(0.0, 1, clock).fastest(clock.taking(5.0, 3.0, 2.0, 1.0), rounds=3) == 1.0
    assert clock.now == 11.0


def test_rates_are_bytes_over_seconds() -> None:
    """In both directions by chunk, within the pool, and mapping by slab."""
    clock = Clock()
    tier, vmm = HostTier.create(20 * MIB), HostVmm(MAPPED_SLABS, SLAB)
    arena, start = Arena(vmm), tier.address(0, 20 * MIB)
    seen: set[tuple[int, int, bool]] = set()

    def copy(places: list[tuple[int, int]], nbytes: int) -> None:
        into = start <= places[0][1] < start + tier.nbytes
        inside = not into and not start <= places[0][0] < start + tier.nbytes
        seen.add((len(places), nbytes, inside))
        clock.now += 2**-10 if into else 2**-8 if inside else 2**-9

    found = measure_copies(arena, start, 20 * MIB, copy, 7.0, 1.0, clock)

    assert found == MemoryCeilings(
        copied_bytes=20 * MIB,
        chunks=tuple(
            ChunkRates(chunk_bytes=size * MIB, into_pool=n * 1024.0, out_of_pool=n * 512.0)
            for size, n in ((1, 20 * MIB), (4, 20 * MIB), (16, 16 * MIB))
        ),
        within_pool=10 * MIB * 256.0,
        slab_bytes=SLAB,
        map_slab_seconds=0.0,
        unmap_slab_seconds=0.0,
        lock=7.0,
    )
    assert seen == {
        (20, MIB, False), (5, 4 * MIB, False), (1, 16 * MIB, False), (1, 10 * MIB, True)
    }  # fmt: skip
    assert (found.into_pool, found.out_of_pool) == (20 * MIB * 1024.0, 20 * MIB * 512.0)
    assert arena.free == MAPPED_SLABS
    arena.check_integrity()
    vmm.close()
    tier.close()


def test_what_fails_gives_the_pool_back() -> None:
    """The error is the caller's, and no slab stays mapped."""
    vmm = HostVmm(MAPPED_SLABS, SLAB)
    arena = Arena(vmm)

    def copy(places: object, nbytes: int) -> None:
        raise OSError("the link is down")

    with pytest.raises(OSError, match="the link is down"):
        measure_copies(arena, 0, SLAB, copy, None, 1.0, Clock())

    assert arena.usage() == {"free": MAPPED_SLABS}
    vmm.close()


def test_host_memory_is_measured_really() -> None:
    """Copies move bytes and take time; what is taken is given back."""
    found = measure_host(8 * MIB, SLAB, 0.01)

    assert [chunk.chunk_bytes for chunk in found.chunks] == [MIB, 4 * MIB]
    assert min(found.into_pool, found.out_of_pool, found.within_pool) > 0
    assert found.map_slab_seconds > 0


def test_a_gpu_is_measured_by_the_classes_of_the_product(driver: StandIn) -> None:
    """On the stand-in, whose speed means nothing: page-locked chunks in both directions, slabs
    mapped one by one, a look at the link during copies, and nothing left in the driver."""
    looks: list[bool] = []
    driver.reset(budget_bytes=1 << 30)

    found = measure_gpu(0, 8 * MIB, SLAB, 0.01, lambda: looks.append(True))

    assert [chunk.chunk_bytes for chunk in found.chunks] == [
        chunk for chunk in CHUNKS if chunk <= 8 * MIB
    ]
    assert looks == [True]
    assert found.lock is not None
    assert found.slab_bytes == SLAB
    assert driver.pageable_copies() == 0
    calls = driver.calls()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == 1
    assert calls.count("cuMemCreate") == MAPPED_SLABS


@pytest.mark.parametrize(
    "name", ["cuMemHostRegister", "cuMemcpyAsync", "cuStreamCreate", "cuMemMap", "cuMemCreate"]
)
def test_a_driver_that_refuses_is_an_error(name: str, driver: StandIn) -> None:
    """With nothing left behind."""
    driver.fail(name, 1, CudaCode.OUT_OF_MEMORY)

    with pytest.raises(CudaError, match=f"CUDA_ERROR_OUT_OF_MEMORY from {name}"):
        measure_gpu(0, 4 * MIB, SLAB, 0.01, lambda: None)

    assert not any(driver.live())


def test_plain_copies_of_two_streams_arrive(driver: StandIn) -> None:
    """All lists are in line before the first wait, and are there when it returns."""
    context, host = CudaContext(0), HostTier.create(4 * MIB)
    context.use()
    host.view(0, 4)[:] = b"abcd"
    first = host.address(0, 4 * MIB)
    order: list[str] = []

    plain_copies(
        context,
        [[(first + 8, first)], [(first + 12, first)]],
        4,
        lambda: order.extend(driver.calls()),
    )

    assert bytes(mapping.view(first + 8, 8)) == b"abcdabcd"
    assert order.count("cuMemcpyAsync") == 2
    assert "cuStreamSynchronize" not in order
    host.close()
    context.close()
