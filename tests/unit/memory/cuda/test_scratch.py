"""Scratch, on the stand-in driver: one slab under many addresses, and none left behind."""

from __future__ import annotations

import ctypes

import pytest

from appliance.memory.cuda.driver import CudaError
from appliance.memory.cuda.scratch import Scratch
from appliance.memory.cuda.vmm import CudaVmm
from tests.stand_in.driver import StandIn
from tests.unit.doubles.device_backends import SLAB, driver

__all__ = ["driver"]

OUT_OF_MEMORY = 2


def test_every_address_of_a_range_is_there(driver: StandIn) -> None:
    """All of them lead to one slab, of which there is one."""
    scrap = Scratch(0, SLAB)
    address = scrap.reserve(3 * SLAB - 1)

    ctypes.memset(address + 2 * SLAB, 7, SLAB)

    assert ctypes.string_at(address, 1) == b"\7"
    assert driver.live().handles == 1
    assert scrap.holds(address)
    assert scrap.holds(address + 3 * SLAB - 1)
    assert not scrap.holds(address + 3 * SLAB)
    scrap.release()
    assert not scrap.holds(address)
    assert driver.live().mappings == 0
    scrap.close()


def test_a_region_without_memory_can_be_touched(driver: StandIn) -> None:
    """For the time of the context; then it is free for its own slabs."""
    vmm, scrap = CudaVmm(0, 2, SLAB), Scratch(0, SLAB)
    region = vmm.reserve(2 * SLAB)

    with scrap.under(region, 2):
        ctypes.memset(region, 1, 2 * SLAB)

    vmm.map(region, 0, 2)
    vmm.release(region, 2 * SLAB)
    scrap.close()
    vmm.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_mapping_that_fails_leaves_none(driver: StandIn, nth: int) -> None:
    """The driver's refusal is named, and what was mapped before it is not any more."""
    vmm, scrap = CudaVmm(0, 1, SLAB), Scratch(0, SLAB)
    region = vmm.reserve(3 * SLAB)
    driver.fail("cuMemMap", nth, OUT_OF_MEMORY)

    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY from cuMemMap"):
        with scrap.under(region, 3):
            raise AssertionError("it was not mapped")

    assert driver.live().mappings == 0
    vmm.release(region, 3 * SLAB)
    scrap.close()
    vmm.close()
