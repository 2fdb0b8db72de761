"""The backends of device memory that this machine can run: the host's, and CUDA on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.vmm_host import HostVmm
from tests.devices.bench import Bench
from tests.stand_in.driver import Audit, StandIn, stand_in

SLAB = 2 << 20
"""What a GPU maps at least."""


@pytest.fixture(params=["host", "cuda"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """One backend after the other; what is left behind in the driver, or its audit notes, fails."""
    if request.param == "host":
        bench = Bench("host", SLAB, HostVmm)
        yield bench
        bench.close()
        return
    driver = stand_in()
    driver.forget()  # what a test that failed has left
    bench = Bench("cuda", SLAB, lambda slabs, size: CudaVmm(0, slabs, size))
    yield bench
    bench.close()
    assert not any(driver.live())
    assert driver.audit() == Audit()


@pytest.fixture
def driver() -> Iterator[StandIn]:
    """The stand-in, with nothing injected before or after; see `bench`."""
    driver = stand_in()
    driver.forget()  # what a test that failed has left
    yield driver
    driver.reset()
    assert not any(driver.live())
    assert driver.audit() == Audit()
