"""Runtime memory: slabs of the pool for what is neither weights nor KV cache.

A GPU's activations, workspaces and CUDA graphs come from here, of all its models together. What
they may take was set aside when the pool was made, so it is never taken from weights or KV that
were promised room:

    pool     |         weights and KV: the machine's ledger          | runtime: counted here |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from appliance.memory.arena import Arena, PoolExhausted, Region

OWNER: Final = "runtime"


class RuntimeMemory:
    """Ranges of mapped memory, `slabs` slabs in all at most. Used from one thread."""

    def __init__(self, arena: Arena, slabs: int) -> None:
        self.slabs = slabs
        self.used = 0
        """Slabs that are given out or charged."""
        self._arena = arena
        self._regions: dict[int, Region] = {}

    def take(self, nbytes: int) -> int:
        """Address of `nbytes` bytes of their own. Raises `PoolExhausted`, `OSError`."""
        slabs = -(-nbytes // self._arena.slab_bytes)
        self.charge(slabs)
        try:
            region = self._arena.reserve(OWNER, slabs)
            try:
                region.map(range(slabs))
            except BaseException:
                region.release()
                raise
        except BaseException:
            self.used -= slabs
            raise
        self._regions[region.address] = region
        return region.address

    def give(self, address: int) -> None:
        """Take back what `take` returned. Raises `ValueError` for any other address, `OSError`
        when the system refuses; then it is still given out, and can be given back again."""
        region = self._regions.get(address)
        if region is None:
            raise ValueError(f"{address:#x} is no runtime memory")
        region.release()
        del self._regions[address]
        self.used -= region.slots

    def keep(self, region: Region, slots: Sequence[int]) -> None:
        """Map slots of another owner's region, and count them until `discharge`. Raises what `take`
        raises."""
        self.charge(len(slots))
        try:
            region.map(slots)
        except BaseException:
            self.discharge(len(slots))
            raise

    def charge(self, slabs: int) -> None:
        """Count slabs that are mapped elsewhere, until `discharge`. Raises `PoolExhausted`."""
        if self.used + slabs > self.slabs:
            raise PoolExhausted(
                f"{slabs} more slabs for activations, workspaces and CUDA graphs: {self.used} of "
                f"{self.slabs} are in use; set devices.runtime to more"
            )
        self.used += slabs

    def discharge(self, slabs: int) -> None:
        """Count slabs no longer that `charge` counted."""
        self.used -= slabs
