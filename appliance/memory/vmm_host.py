"""The `Vmm` of host memory: one sealed ``memfd`` as the pool of slabs, ``mmap`` to place them."""

from __future__ import annotations

import fcntl
import mmap
import os

from appliance.memory import mapping


class HostVmm:
    """Slabs of host memory.

    The pool file is sealed at its size, so neither this process nor one that inherits the
    descriptor can make the pool larger than it was declared. All its physical pages are there from
    the start and stay until `close`.
    """

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        """Raises `ValueError` for sizes that cannot be mapped, `OSError` if the system refuses."""
        if slabs < 1:
            raise ValueError(f"a pool needs at least one slab, not {slabs}")
        if slab_bytes < 1 or slab_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"slab size {slab_bytes} is not a multiple of the page size {mmap.PAGESIZE}"
            )
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self.fd = os.memfd_create("appliance-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, slabs * slab_bytes)
            # All of it now: a slab's first use would cost a page fault for every page of it.
            os.posix_fallocate(self.fd, 0, slabs * slab_bytes)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise

    def reserve(self, nbytes: int) -> int:
        return mapping.reserve(nbytes)

    def map(self, address: int, slab: int) -> None:
        if not 0 <= slab < self.slabs:
            raise ValueError(f"slab {slab} is not one of {self.slabs}")
        # Populated at once: page tables are part of the cost of mapping, not of the first step.
        mapping.map_file(
            self.fd, slab * self.slab_bytes, self.slab_bytes, at=address, flags=mapping.POPULATE
        )

    def unmap(self, address: int) -> None:
        mapping.vacate(address, self.slab_bytes)

    def release(self, address: int, nbytes: int) -> None:
        mapping.release(address, nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        mapping.copy(destination, source, nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
