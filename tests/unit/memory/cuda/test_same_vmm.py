"""Device memory of the host and of CUDA's driver (a stand-in) does the same."""

from __future__ import annotations

import pytest

from tests.devices.bench import Bench
from tests.devices.vmm import VmmConformance
from tests.unit.doubles.device_backends import bench

__all__ = ["bench"]


class TestVmm(VmmConformance):
    def test_the_backend_refuses_with_a_name(self, bench: Bench) -> None:
        """What the system refuses is an `OSError` that carries the system's own name for it."""
        vmm = bench.vmm(1)
        with pytest.raises(
            OSError, match=r"^(\[Errno \d+\] )?(E[A-Z]+|CUDA_ERROR_\w+) from \w+ of"
        ):
            vmm.reserve(1 << 60)
