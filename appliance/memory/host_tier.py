"""The host tier: one shared memory file of the box, mapped whole by every process that uses it.

The daemon creates it; workers inherit the descriptor. Which bytes belong to whom is decided by
the machine's ledger, so there is no allocator here.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from appliance.memory import mapping
from appliance.platform import machine_memory, numa

LOCK_BYTES: Final = 64 << 20
"""What `HostTier.lock` fills at one go: the grain of its progress, and what `close` waits for."""


class HostTier:
    """`nbytes` bytes of shared host memory; pages come with the first touch, or with `lock`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes the descriptor over. Use `create` or `attach`."""
        self.fd = fd
        self.nbytes = nbytes
        self.locked = False
        """Whether all of it is in memory, page-locked."""
        self.unlocked_because = "it was not asked for"
        self._filling = threading.Lock()
        # Where huge pages of the file can be huge pages of the mapping.
        self._address = mapping.reserve(nbytes, mapping.HUGE_BYTES)
        try:
            mapping.map_file(fd, 0, nbytes, at=self._address)
        except OSError:
            mapping.release(self._address, nbytes)
            raise

    @classmethod
    def create(cls, nbytes: int) -> HostTier:
        """A new, empty tier. Raises `OSError` if the system refuses, `ValueError` for no bytes."""
        if nbytes < 1:
            raise ValueError(f"a host tier of {nbytes} bytes")
        fd = os.memfd_create("appliance-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, nbytes)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> HostTier:
        """The tier behind an inherited descriptor. Raises `ValueError` if the sizes differ."""
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise ValueError(f"the host tier has {size} bytes, not {nbytes}")
        return cls(fd, nbytes)

    def address(self, offset: int, nbytes: int) -> int:
        """Where the `nbytes` bytes at `offset` lie. Raises `ValueError` outside the tier."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are outside of {self.nbytes}")
        return self._address + offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, writable; not to be kept beyond `close`."""
        return mapping.view(self.address(offset, nbytes), nbytes)

    def spread(
        self, nodes: Sequence[int], place: Callable[[int, int, int], None] = numa.place_memory
    ) -> None:
        """Have pages come from these NUMA nodes, in turns, whichever thread of whichever process
        touches them first; for a tier that nothing has touched. `place` does so for an address,
        a size and a node. Raises `OSError`; then some parts may be placed, and all can be used.

        In parts of several MiB: of single pages in turns, huge ones would all be of one node.
        """
        # A mapping of its own: each part becomes one, in the mapping that it is placed by.
        address = mapping.map_file(self.fd, 0, self.nbytes)
        try:
            for start, nbytes, node in numa.stripes(self.nbytes, nodes):
                place(address + start, nbytes, node)
        finally:
            mapping.release(address, self.nbytes)

    def lock(self, progress: Callable[[int], None] | None = None) -> bool:
        """Have all pages in memory, huge ones if the kernel has them, and lock them; `locked`.

        Takes seconds per GiB, so it is for a thread of its own, once; uses of the tier
        meanwhile are not disturbed. `progress` hears after every piece how many bytes are there.
        It stops where the machine has no memory left. Being refused is no error:
        `unlocked_because` says why and what to do.
        """
        try:
            for start in range(0, self.nbytes, LOCK_BYTES):
                size = min(LOCK_BYTES, self.nbytes - start)
                with self._filling:
                    if self.fd < 0:
                        self.unlocked_because = "it was closed meanwhile"
                        return False
                    if left := self._left_out(size):
                        self.unlocked_because = left
                        return False
                    self._fill(self._address + start, size)
                if progress is not None:
                    progress(start + size)
            with self._filling:
                if self.fd >= 0:
                    mapping.lock(self._address, self.nbytes)
                    self.locked, self.unlocked_because = True, ""
        except OSError as error:
            self.unlocked_because = f"{error}; allow it with LimitMEMLOCK= or `ulimit -l`"
        return self.locked

    def close(self) -> None:
        """Unmap and close; idempotent."""
        with self._filling:
            if self.fd >= 0:
                mapping.release(self._address, self.nbytes)
                os.close(self.fd)
                self.fd = -1
                self.locked = False

    def _left_out(self, size: int) -> str:
        """Why so many bytes more cannot be brought in; "" if they can."""
        try:
            machine_memory.refuse_more(size)
        except OSError as error:
            return (
                f"{error.strerror}; end what else uses memory, or make devices.host_cache smaller"
            )
        return ""

    def _fill(self, address: int, nbytes: int) -> None:
        mapping.make_huge(address, nbytes // mapping.HUGE_BYTES * mapping.HUGE_BYTES)
        mapping.populate(address, nbytes)
