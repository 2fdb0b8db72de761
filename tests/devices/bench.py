"""A backend of device memory, and host memory to look at it through."""

from __future__ import annotations

from collections.abc import Callable

from appliance.memory.host_tier import HostTier
from appliance.memory.vmm import Vmm

WINDOW_BYTES = 64 << 20


class Bench:
    """Makes `Vmm`s of one backend, and reads and writes their memory by their own copies."""

    def __init__(self, name: str, slab_bytes: int, make: Callable[[int, int], Vmm]) -> None:
        """`make` takes slabs, and bytes of a slab."""
        self.name = name
        self.slab_bytes = slab_bytes
        self.host = HostTier.create(WINDOW_BYTES)
        self._make = make
        self._made: list[Vmm] = []

    def vmm(self, slabs: int, slab_bytes: int | None = None) -> Vmm:
        vmm = self._make(slabs, self.slab_bytes if slab_bytes is None else slab_bytes)
        self._made.append(vmm)
        return vmm

    def write(self, vmm: Vmm, address: int, data: bytes) -> None:
        window = WINDOW_BYTES - len(data)
        self.host.view(window, len(data))[:] = data
        vmm.copy(address, self.host.address(window, len(data)), len(data))

    def read(self, vmm: Vmm, address: int, nbytes: int) -> bytes:
        window = WINDOW_BYTES - nbytes
        self.host.view(window, nbytes)[:] = bytes(nbytes)
        vmm.copy(self.host.address(window, nbytes), address, nbytes)
        return bytes(self.host.view(window, nbytes))

    def close(self) -> None:
        for vmm in self._made:
            vmm.close()
        self.host.close()
