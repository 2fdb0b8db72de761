"""`CudaVmm` on a stand-in driver: what the driver is asked, and what is left when it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.cuda.driver import CudaError
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from tests.stand_in.driver import Audit, CudaCode, StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]


@pytest.fixture
def vmm(driver: StandIn) -> Iterator[CudaVmm]:
    vmm = CudaVmm(0, 4, SLAB)
    yield vmm
    vmm.close()


def test_all_slabs_are_taken_at_the_start(driver: StandIn) -> None:
    """The pool is there from the start; nothing is asked of the driver's allocator later."""
    vmm = CudaVmm(0, 4, SLAB)
    assert driver.live().handles == 4
    base = vmm.reserve(4 * SLAB)
    vmm.map(base, 0, 4)
    vmm.release(base, 4 * SLAB)
    assert driver.calls().count("cuMemCreate") == 4
    vmm.close()


def test_a_pool_that_does_not_fit_gives_all_back(driver: StandIn) -> None:
    """Exhaustion while the pool is made is a named error, and nothing stays behind."""
    driver.reset(budget_bytes=3 * SLAB)
    with pytest.raises(
        CudaError,
        match=rf"^CUDA_ERROR_OUT_OF_MEMORY from cuMemCreate of {SLAB} bytes \(slab 4 of 5\)",
    ):
        CudaVmm(0, 5, SLAB)

    CudaVmm(0, 3, SLAB).close()
    driver.reset()


@pytest.mark.parametrize("slab_bytes", [1 << 20, 3 << 20, 0, -SLAB])
def test_slabs_are_what_the_device_maps(driver: StandIn, slab_bytes: int) -> None:
    """A size below the device's granularity is refused with the granularity and the remedy."""
    with pytest.raises(ValueError, match=r"not a multiple of 2097152, .* set devices\.slab to"):
        CudaVmm(0, 1, slab_bytes)


def test_access_is_set_once_for_a_run(driver: StandIn, vmm: CudaVmm) -> None:
    """However many slabs a call maps, access is set by one call."""
    base = vmm.reserve(4 * SLAB)
    before = len(driver.calls())
    vmm.map(base, 0, 4)

    calls = driver.calls()[before:]
    assert calls.count("cuMemMap") == 4
    assert calls.count("cuMemSetAccess") == 1
    vmm.release(base, 4 * SLAB)


@pytest.mark.parametrize(("name", "nth"), [("cuMemMap", 1), ("cuMemMap", 3), ("cuMemSetAccess", 1)])
def test_a_refused_mapping_maps_nothing(driver: StandIn, vmm: CudaVmm, name: str, nth: int) -> None:
    """Whatever call of a run fails, the addresses and the slabs are free again."""
    base = vmm.reserve(4 * SLAB)
    driver.fail(name, nth, CudaCode.OUT_OF_MEMORY)
    with pytest.raises(CudaError, match=f"^CUDA_ERROR_OUT_OF_MEMORY from {name} of"):
        vmm.map(base, 0, 4)

    assert driver.live().mappings == 0
    vmm.map(base, 0, 4)
    vmm.release(base, 4 * SLAB)


def test_the_driver_knows_what_is_mapped(driver: StandIn, vmm: CudaVmm) -> None:
    """Mapping twice, addresses that are of no range: the driver's errors."""
    base = vmm.reserve(2 * SLAB)
    vmm.map(base, 0)
    for wrong in (
        lambda: vmm.map(base, 1),
        lambda: vmm.map(base + 64 * SLAB, 1),
        lambda: vmm.release(base + SLAB, SLAB),
    ):
        with pytest.raises(CudaError, match=r"^CUDA_ERROR_INVALID_VALUE from cuMem"):
            wrong()
    assert driver.audit() == Audit(mapped_twice=1, freed_twice=1)
    driver.pardon()
    vmm.release(base, 2 * SLAB)


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuStreamSynchronize", "cuEventRecord"])
def test_a_refused_copy_is_an_error(driver: StandIn, vmm: CudaVmm, name: str) -> None:
    """A copy that fails says so, and the next one works."""
    host = HostTier.create(4096)
    base = vmm.reserve(SLAB)
    vmm.map(base, 0)
    driver.fail(name, 1, 999)
    with pytest.raises(CudaError, match=f"^CUDA_ERROR_UNKNOWN from {name}"):
        vmm.copy(base, host.address(0, 8), 8)
    vmm.copy(base, host.address(0, 8), 8)
    vmm.release(base, SLAB)
    host.close()


def test_a_copy_to_nowhere(driver: StandIn) -> None:
    """Addresses without a slab are not written: the device breaks when it comes to them."""
    vmm = CudaVmm(0, 2, SLAB)
    base = vmm.reserve(2 * SLAB)
    vmm.map(base, 0)
    expected = r"^CUDA_ERROR_ILLEGAL_ADDRESS from cuStreamSynchronize of a copy of 8 bytes"
    with pytest.raises(CudaError, match=expected):
        vmm.copy(base, base + SLAB - 4, 8)
    with pytest.raises(CudaError, match=r"^CUDA_ERROR_ILLEGAL_ADDRESS"):
        vmm.map(base + SLAB, 1)
    vmm.close()
    driver.forget()


def test_close_gives_back_what_a_broken_context_allows(driver: StandIn) -> None:
    """What the driver refuses to take back does not keep the rest."""
    vmm = CudaVmm(0, 2, SLAB)
    for name in ("cuMemRelease", "cuStreamDestroy"):
        driver.fail(name, 1, CudaCode.UNKNOWN)
    vmm.close()
    live = driver.live()

    # The two that were refused are lost with the context; all else was given back.
    assert live.handles == 1
    assert (live.streams, live.events, live.contexts) == (1, 0, 0)
    driver.forget()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["map", "unmap", "refuse"]),
            st.integers(0, 2),
            st.sets(st.integers(0, 3), min_size=1),
            st.integers(1, 4),
        ),
        max_size=30,
    )
)
def test_arena_and_driver_agree(
    driver: StandIn, steps: list[tuple[str, int, set[int], int]]
) -> None:
    """Whatever is mapped, unmapped or refused: the driver has what the arena believes it has."""
    before = driver.live()
    arena = Arena(CudaVmm(0, 6, SLAB))
    regions = [arena.reserve(f"r{i}", 4) for i in range(3)]
    mapped: list[set[int]] = [set(), set(), set()]
    for what, which, slots, nth in steps:
        region, held = regions[which], mapped[which]
        if what == "unmap":
            region.unmap(slots & held)
            held -= slots
            continue
        wanted = sorted(slots - held)
        if what == "refuse":
            driver.fail("cuMemMap" if nth % 2 else "cuMemSetAccess", nth, CudaCode.OUT_OF_MEMORY)
        try:
            region.map(wanted)
            held |= set(wanted)
        except (CudaError, PoolExhausted):
            pass
        driver.reset()
        arena.check_integrity()
        assert driver.live().mappings == sum(map(len, mapped))
        assert [region.mapped for region in regions] == [len(held) for held in mapped]
    for region in regions:
        region.release()
    arena.vmm.close()
    assert driver.live() == before
