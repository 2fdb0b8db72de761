"""Device memory, streams and swaps on a GPU: the suite that the host and the stand-in pass."""

from __future__ import annotations

import pytest
import torch

from appliance.memory.cuda.driver import CudaError
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from tests.devices.bench import Bench
from tests.devices.streams import StreamConformance, floor
from tests.devices.swapping import SwapConformance
from tests.devices.vmm import VmmConformance
from tests.gpu.conftest import DEVICE, SLAB

__all__ = ["floor"]


class TestVmm(VmmConformance):
    def test_the_driver_knows_what_is_mapped(self, bench: Bench) -> None:
        """Mapping twice is the driver's error. Unmapping nothing is not: CUDA 13 ignores it."""
        vmm = bench.vmm(2)
        base = vmm.reserve(2 * SLAB)
        vmm.map(base, 0)
        with pytest.raises(CudaError, match=r"^CUDA_ERROR_\w+ from cuMem"):
            vmm.map(base, 1)
        vmm.unmap(base + SLAB)
        vmm.release(base, 2 * SLAB)

    def test_a_size_below_the_granularity(self, bench: Bench) -> None:
        """The device's granularity is named."""
        with pytest.raises(ValueError, match=r"not a multiple of \d+, .* set devices\.slab"):
            bench.vmm(1, 4096)

    def test_a_pool_larger_than_the_device(self) -> None:
        """It is refused by its CUDA name, and all that was taken is free again."""
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info(DEVICE)
        big = 1 << 30
        with pytest.raises(CudaError, match=r"^CUDA_ERROR_OUT_OF_MEMORY from cuMemCreate of"):
            CudaVmm(DEVICE, total // big + 1, big)

        assert torch.cuda.mem_get_info(DEVICE)[0] >= free - (64 << 20)

    def test_tensors_over_it(self, bench: Bench) -> None:
        """A tensor made before anything is mapped sees the slab that is mapped later."""
        from appliance.kernels.arrays import device_bytes

        vmm = bench.vmm(2)
        base = vmm.reserve(SLAB)
        tensor = device_bytes(base, SLAB, DEVICE).view(torch.float32)
        vmm.map(base, 0)
        tensor.fill_(1.5)
        torch.cuda.synchronize()
        vmm.unmap(base)
        vmm.map(base, 1)
        tensor.fill_(2.5)
        torch.cuda.synchronize()
        vmm.unmap(base)
        vmm.map(base, 0)

        assert tensor.sum().item() == 1.5 * SLAB / 4
        torch.cuda.synchronize()
        vmm.release(base, SLAB)

    def test_a_cuda_graph_survives_other_slabs(self, bench: Bench) -> None:
        """A captured graph reads what is under its addresses now, not what was at its capture."""
        from appliance.kernels.arrays import device_bytes

        vmm = bench.vmm(2)
        base = vmm.reserve(SLAB)
        vmm.map(base, 0)
        source = device_bytes(base, SLAB, DEVICE).view(torch.float32)
        source.fill_(1.0)
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(source * 2)
        vmm.unmap(base)
        vmm.map(base, 1)
        source.fill_(5.0)
        graph.replay()
        torch.cuda.synchronize()

        assert target.unique().tolist() == [10.0]
        vmm.release(base, SLAB)


class TestStreams(StreamConformance):
    def test_memory_that_is_not_registered(self, bench: Bench) -> None:
        """Page-locked or not, across the border between two registrations: the bytes arrive."""
        host = HostTier.create(16 << 20)
        vmm = CudaVmm(DEVICE, 8, SLAB)
        base = vmm.reserve(8 * SLAB)
        vmm.map(base, 0, 8)
        data = bytes(range(256)) * (12 << 12)
        host.view(100, len(data))[:] = data
        for pinned in (False, True):
            if pinned:
                vmm.register(host.address(0, 1), 16 << 20, chunk_bytes=4 << 20).wait()
            vmm.copy(base, host.address(100, 1), len(data))
            host.view(100, len(data))[:] = bytes(len(data))
            vmm.copy(host.address(100, 1), base, len(data))
            assert bytes(host.view(100, len(data))) == data
        vmm.release(base, 8 * SLAB)
        vmm.close()
        host.close()


class TestSwaps(SwapConformance):
    rounds = 1000

    def test_it_is_a_thousand(self) -> None:
        """What the issue asks for."""
        assert self.rounds >= 1000
