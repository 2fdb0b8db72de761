"""Scratch: one slab of a GPU under as many addresses as wanted, for what must be mapped, not kept.

A model is built, and its CUDA graphs are captured, before its weights have any memory. Until then
their addresses lead to this slab: whatever is written there is lost, and what is read means
nothing, but nothing faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from appliance.memory.cuda.vmm import CudaVmm


class Scratch:
    """One slab outside the pool. Used from one thread."""

    def __init__(self, device: int, slab_bytes: int) -> None:
        """Raises what `CudaVmm` raises."""
        self._vmm = CudaVmm(device, 1, slab_bytes)
        self._ranges: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        """Address of a range of so many bytes, all of it on the slab. Raises `OSError`."""
        size = -(-nbytes // self._vmm.slab_bytes) * self._vmm.slab_bytes
        address = self._vmm.reserve(size)
        self._ranges[address] = size
        self._cover(address, size)
        return address

    def holds(self, address: int) -> bool:
        """Whether this is an address of a range that is still reserved."""
        return any(start <= address < start + size for start, size in self._ranges.items())

    def release(self) -> None:
        """Give all ranges back; they may not be touched any more.

        Raises `OSError` when the system refuses one; then it can be called again.
        """
        while self._ranges:
            address, size = next(iter(self._ranges.items()))
            self._vmm.release(address, size)
            del self._ranges[address]

    @contextmanager
    def under(self, address: int, slots: int) -> Iterator[None]:
        """Within, so many slabs' worth of an owner's unmapped addresses lead to the slab.

        Raises `OSError`. The GPU must be done with them when the context ends.
        """
        size = slots * self._vmm.slab_bytes
        self._cover(address, size)
        try:
            yield
        finally:
            self._vmm.unmap(address, slots)

    def close(self) -> None:
        """Idempotent. Raises `OSError` when a range is refused; then it can be called again.

        The slab is given back nonetheless, as soon as no range leads to it.
        """
        try:
            self.release()
        finally:
            self._vmm.close()

    def _cover(self, address: int, size: int) -> None:
        covered = 0
        try:
            for covered in range(0, size, self._vmm.slab_bytes):
                self._vmm.map(address + covered, 0)
        except BaseException:
            self._vmm.unmap(address, covered // self._vmm.slab_bytes)
            raise
