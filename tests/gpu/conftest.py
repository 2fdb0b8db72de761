"""A real GPU, or an end at once that says what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from appliance.memory.cuda.vmm import CudaVmm
from tests.devices.bench import Bench

SLAB = 2 << 20
PRETENDS = os.environ.get("PRETEND") == "1"
"""On a driver that computes nothing. CuPy has a runtime of its own, which does not start on it."""
DEVICE = 0


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without a GPU these tests fail; they are not skipped, for nobody asked for nothing."""
    try:
        import cuda.bindings.driver  # noqa: F401
        import torch

        if not PRETENDS:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        found = torch.cuda.device_count()
    except Exception as error:  # each library has its own words for a GPU that is not there
        missing = f"{type(error).__name__}: {error}"
    else:
        if found:
            return
        missing = "torch finds no GPU"
    pytest.exit(
        f"tests/gpu needs an NVIDIA GPU, its driver, torch, CuPy and cuda-bindings: {missing}",
        returncode=1,
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    """The GPU's memory, and a window of host memory."""
    bench = Bench("gpu", SLAB, lambda slabs, size: CudaVmm(DEVICE, slabs, size))
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def fingerprint() -> Callable[[int, int], int]:
    """Of device memory, by the kernel; by the reference on the pretend driver, which has no
    kernels, and whose device memory the host can read."""
    if PRETENDS:
        return of_memory()
    from appliance.kernels.loader import Kernels

    return Kernels().fingerprint


@pytest.fixture(scope="session")
def host_fingerprint() -> Callable[[int, int], int]:
    """Of host memory, by the reference."""
    return of_memory()


def of_memory() -> Callable[[int, int], int]:
    import torch

    from appliance.kernels import reference
    from appliance.memory import mapping

    return lambda address, nbytes: reference.fingerprint(
        torch.frombuffer(mapping.view(address, nbytes), dtype=torch.uint8)
    )
