"""Virtual memory management: one pool of physical slabs, mapped under reserved addresses.

The interface is the same for host memory (``memfd`` + ``mmap``) and for a GPU's VMM calls.
A slab may lie under one address at a time; the arena keeps that promise, a backend need not.
"""

from __future__ import annotations

from typing import Protocol

from appliance.memory.streams import Stream


class Vmm(Protocol):
    """`slabs` physical slabs of `slab_bytes` each, numbered from 0."""

    slabs: int
    slab_bytes: int

    def reserve(self, nbytes: int) -> int:
        """Address of a range with nothing behind it; touching it is a fault. Raises `OSError`."""

    def map(self, address: int, slab: int, count: int = 1) -> None:
        """Put slabs `slab`, `slab + 1`, ... under `address`, readable and writable.

        `address` is a slab's place in a reserved range, with room for `count` of them. What the
        slabs held before shows through. Raises `OSError` with nothing mapped.
        """

    def unmap(self, address: int, count: int = 1) -> None:
        """Take away the `count` slabs from `address` on; the range stays reserved.

        They need not have been mapped by one call. Raises `OSError`, with some taken away perhaps;
        then the call can be repeated.
        """

    def release(self, address: int, nbytes: int) -> None:
        """Give a reserved range back, with whatever is mapped in it."""

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, each of this memory or of the host tier; returns when done.

        Other Python threads run meanwhile.
        """

    def stream(self, name: str) -> Stream:
        """A new stream for copies between addresses of this memory and of the host tier."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread, which only maps and unmaps. Raises `OSError`."""

    def close(self) -> None:
        """Let go of the physical memory; mappings still in place keep theirs."""
