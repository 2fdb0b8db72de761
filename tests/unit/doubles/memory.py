"""A `Vmm` without memory, for tests of the bookkeeping above it."""

from __future__ import annotations

import errno
import threading

from appliance.memory.streams import Stream


class RecordingVmm:
    """Remembers what lies where; can be told to fail after some mappings."""

    def __init__(self, slabs: int, fail_after: int | None = None) -> None:
        self.slabs = slabs
        self.slab_bytes = 10
        self.placed: dict[int, int] = {}
        self.calls: list[tuple[int, int, int]] = []
        self.fail_after = fail_after
        self.refusals = 0
        """So many calls to unmap are refused."""
        self.threads: set[int] = set()
        """That mapped or unmapped."""
        self._next = 1000
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> int:
        address = self._next
        self._next += nbytes
        return address

    def map(self, address: int, slab: int, count: int = 1) -> None:
        if self.fail_after is not None:
            if not self.fail_after:
                raise OSError(errno.ENOMEM, "ENOMEM")
            self.fail_after -= 1
        with self._lock:
            self.threads.add(threading.get_ident())
            for i in range(count):
                assert address + i * self.slab_bytes not in self.placed
                assert slab + i not in self.placed.values()
                self.placed[address + i * self.slab_bytes] = slab + i
            self.calls.append((address, slab, count))

    def unmap(self, address: int, count: int = 1) -> None:
        with self._lock:
            self.threads.add(threading.get_ident())
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.ENOMEM, "not unmapped")
            for i in range(count):
                del self.placed[address + i * self.slab_bytes]

    def adopt_thread(self) -> None:
        """Any thread will do."""

    def stream(self, name: str) -> Stream:
        raise AssertionError("the arena copies nothing")

    def release(self, address: int, nbytes: int) -> None:
        assert not any(address <= place < address + nbytes for place in self.placed)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        raise AssertionError("the arena copies nothing")

    def close(self) -> None:
        """Nothing to let go of."""
