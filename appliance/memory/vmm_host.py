"""The `Vmm` of host memory: one sealed ``memfd`` as the pool of slabs, ``mmap`` to place them."""

from __future__ import annotations

import fcntl
import mmap
import os

from appliance.memory import mapping
from appliance.memory.streams import HostStream, Stream
from appliance.platform import machine_memory


class HostVmm:
    """Slabs of host memory.

    The pool file is sealed at its size, so neither this process nor one that inherits the
    descriptor can make the pool larger than it was declared. All its physical pages are there from
    the start and stay until `close`; huge ones, if slabs are whole huge pages and the kernel has
    them: mapping a slab is one entry of the page table then, rather than hundreds.
    """

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        """Raises `ValueError` for sizes that cannot be mapped, `OSError` if the system refuses, or
        has less memory available.

        Its streams may run on the CPUs that the calling thread may use now, whatever compute is
        bound to later.
        """
        if slabs < 1:
            raise ValueError(f"a pool needs at least one slab, not {slabs}")
        if slab_bytes < 1 or slab_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"slab size {slab_bytes} is not a multiple of the page size {mmap.PAGESIZE}"
            )
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        machine_memory.refuse_more(slabs * slab_bytes)
        self._cpus = frozenset(os.sched_getaffinity(0))
        self._alignment = mmap.PAGESIZE if slab_bytes % mapping.HUGE_BYTES else mapping.HUGE_BYTES
        self.fd = os.memfd_create("appliance-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, slabs * slab_bytes)
            self._huge = self._make_huge()
            # All of it now: a slab's first use would cost a page fault for every page of it.
            os.posix_fallocate(self.fd, 0, slabs * slab_bytes)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def huge(self) -> bool:
        """Whether the slabs are huge pages."""
        return self._huge

    def reserve(self, nbytes: int) -> int:
        return mapping.reserve(nbytes, self._alignment)

    def map(self, address: int, slab: int, count: int = 1) -> None:
        if slab < 0 or count < 1 or slab + count > self.slabs:
            last = slab + count - 1
            raise ValueError(f"slab {slab if slab < 0 else last} is not one of {self.slabs}")
        # Populated at once: page tables are part of the cost of mapping, not of the first step.
        mapping.map_file(
            self.fd,
            slab * self.slab_bytes,
            count * self.slab_bytes,
            at=address,
            flags=mapping.POPULATE,
        )

    def unmap(self, address: int, count: int = 1) -> None:
        mapping.vacate(address, count * self.slab_bytes)

    def release(self, address: int, nbytes: int) -> None:
        mapping.release(address, nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        mapping.copy(destination, source, nbytes)

    def stream(self, name: str) -> Stream:
        return HostStream(name, self._cpus)

    def adopt_thread(self) -> None:
        """It may run on the CPUs that copies may run on: the thread that starts it may be bound."""
        os.sched_setaffinity(0, self._cpus)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _make_huge(self) -> bool:
        if self._alignment != mapping.HUGE_BYTES:
            return False
        nbytes = self.slabs * self.slab_bytes
        address = mapping.reserve(nbytes, mapping.HUGE_BYTES)
        try:
            mapping.map_file(self.fd, 0, nbytes, at=address)
            return mapping.make_huge(address, nbytes)
        finally:
            mapping.release(address, nbytes)
