"""The host tier: one shared memory file of the box, mapped whole by every process that uses it.

The daemon creates it; workers inherit the descriptor. Which bytes belong to whom is decided by
the machine's ledger, so there is no allocator here.
"""

from __future__ import annotations

import fcntl
import os

from appliance.memory import mapping


class HostTier:
    """`nbytes` bytes of shared host memory; pages come with the first touch."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes the descriptor over. Use `create` or `attach`."""
        self.fd = fd
        self.nbytes = nbytes
        self._address = mapping.map_file(fd, 0, nbytes)

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

    def close(self) -> None:
        """Unmap and close; idempotent."""
        if self.fd >= 0:
            mapping.release(self._address, self.nbytes)
            os.close(self.fd)
            self.fd = -1
