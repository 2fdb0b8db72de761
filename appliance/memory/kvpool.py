"""Elastic KV pool of one model: which blocks exist right now, and which are in use.

The cache is one address range, layer outermost: layer ``l`` owns the bytes from ``l *
layer_bytes``, and block ``b`` lies at ``b * layer_block_bytes`` in every layer. A *group* is the
same stretch of `extent_slabs` slabs in every layer; its blocks are usable while it is mapped:

    layer 0  |-- group 0 --|-- group 1 --|-- group 2 --| ...
             [b0][b1][b2][b 3 ][b4][b5][ b 6 ][b7][b8]
    layer 1  |-- group 0 --|-- group 1 --|-- group 2 --| ...

Blocks that straddle two groups (b3, b6) are never used. Neither is group 0: the engine keeps
block 0 as its null block, which must have no memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, gcd, lcm
from typing import Final, Protocol

from appliance.memory.arena import PoolExhausted

BLOCK_TOKENS: Final = 32
"""Tokens of a block. vLLM's CPU attention wants a multiple of this; the least wastes least."""

# Address space beyond what the pool can hold, for groups that are only partly used.
SLACK: Final = 1.25


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Where blocks and groups lie; made by `plan`."""

    layers: int
    layer_block_bytes: int
    slab_bytes: int
    extent_slabs: int
    layer_bytes: int
    group_blocks: int

    @classmethod
    def plan(
        cls,
        *,
        layers: int,
        layer_block_bytes: int,
        slab_bytes: int,
        pool_slabs: int,
        least_blocks: int,
    ) -> KvGeometry:
        """The smallest groups that always hold a block, in a range that outgrows the pool.

        `least_blocks` are addressable whatever the pool's size.
        """
        extent_slabs = -(-layer_block_bytes // slab_bytes)
        while not (blocks := _fewest_blocks(extent_slabs * slab_bytes, layer_block_bytes)):
            extent_slabs += 1
        groups = max(ceil(SLACK * pool_slabs / (layers * extent_slabs)), -(-least_blocks // blocks))
        # Layers begin on slab boundaries, and hold a whole number of blocks.
        unit = lcm(slab_bytes, layer_block_bytes)
        layer_bytes = -(-(groups + 1) * extent_slabs * slab_bytes // unit) * unit
        return cls(layers, layer_block_bytes, slab_bytes, extent_slabs, layer_bytes, blocks)

    @property
    def group_slabs(self) -> int:
        return self.layers * self.extent_slabs

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    @property
    def blocks(self) -> int:
        """Block numbers that exist, usable or not."""
        return self.layer_bytes // self.layer_block_bytes

    @property
    def groups(self) -> int:
        """Groups that exist, with the unusable group 0."""
        return self.layer_bytes // (self.extent_slabs * self.slab_bytes)

    @property
    def slots(self) -> int:
        """Slabs that the whole address range spans."""
        return self.layers * self.layer_bytes // self.slab_bytes

    def blocks_of(self, group: int) -> range:
        """The blocks that lie wholly in a group."""
        extent = self.extent_slabs * self.slab_bytes
        first = -(-group * extent // self.layer_block_bytes)
        return range(first, (group + 1) * extent // self.layer_block_bytes)

    def group_of(self, block: int) -> int:
        return block * self.layer_block_bytes // (self.extent_slabs * self.slab_bytes)

    def slots_of(self, group: int) -> list[int]:
        """The slots of the address range that a group covers, in every layer."""
        per_layer = self.layer_bytes // self.slab_bytes
        return [
            layer * per_layer + group * self.extent_slabs + slab
            for layer in range(self.layers)
            for slab in range(self.extent_slabs)
        ]


def _fewest_blocks(extent: int, block: int) -> int:
    """Blocks that lie wholly in a stretch of `extent` bytes, wherever its boundaries fall."""
    period = block // gcd(extent, block)
    return min((j + 1) * extent // block - -(-j * extent // block) for j in range(period))


class Slots(Protocol):
    """What a pool needs of `appliance.memory.arena.Region`."""

    def map(self, slots: Sequence[int]) -> None: ...

    def unmap(self, slots: Iterable[int]) -> None: ...


class KvPool:
    """Blocks of mapped groups, free and used. Not thread-safe: an engine has one thread."""

    def __init__(self, geometry: KvGeometry, slots: Slots) -> None:
        self.geometry = geometry
        self._slots = slots
        self._unmapped = list(range(1, geometry.groups))  # a heap: lowest addresses first
        self._free: dict[int, list[int]] = {}  # mapped group -> its free blocks
        self._free_count = 0
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out without mapping anything."""
        return self._free_count

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def mapped_slabs(self) -> int:
        return len(self._free) * self.geometry.group_slabs

    def ensure(self, blocks: int, max_slabs: int) -> None:
        """Map groups until `blocks` blocks are free.

        Raises `PoolExhausted`, with nothing changed, when that takes more than `max_slabs` slabs
        in all, more slabs than the arena has, or more addresses than there are.
        """
        groups: list[int] = []
        missing = blocks - self._free_count
        while missing > 0 and self._unmapped:
            groups.append(heapq.heappop(self._unmapped))
            missing -= len(self.geometry.blocks_of(groups[-1]))
        try:
            if missing > 0:
                raise PoolExhausted(f"{missing} blocks lie beyond the address range")
            slabs = self.mapped_slabs + len(groups) * self.geometry.group_slabs
            if groups and slabs > max_slabs:
                raise PoolExhausted(f"{blocks} blocks need {slabs} slabs, {max_slabs} are allowed")
            self._slots.map([slot for group in groups for slot in self.geometry.slots_of(group)])
        except BaseException:
            for group in groups:
                heapq.heappush(self._unmapped, group)
            raise
        for group in groups:
            # Reversed, because `take` pops from the end: lowest block first.
            self._free[group] = list(reversed(self.geometry.blocks_of(group)))
            self._free_count += len(self._free[group])

    def take(self, count: int) -> list[int]:
        """Blocks of mapped groups, fullest group first, so that the others can become empty.

        Raises `PoolExhausted`, with nothing changed, when fewer are free.
        """
        if count > self._free_count:
            raise PoolExhausted(f"{count} blocks wanted, {self._free_count} are free")
        taken: list[int] = []
        while len(taken) < count:
            free = min((blocks for blocks in self._free.values() if blocks), key=len)
            part = min(count - len(taken), len(free))
            taken.extend(free.pop() for _ in range(part))
        self._free_count -= count
        self._used.update(taken)
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back. Raises `ValueError` for one that is not in use."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            self._free[self.geometry.group_of(block)].append(block)
            self._free_count += 1

    def trim(self) -> int:
        """Unmap the groups without a used block; slabs still mapped."""
        blocks_of = self.geometry.blocks_of
        empty = [group for group, free in self._free.items() if len(free) == len(blocks_of(group))]
        self._slots.unmap([slot for group in empty for slot in self.geometry.slots_of(group)])
        for group in empty:
            self._free_count -= len(self._free.pop(group))
            heapq.heappush(self._unmapped, group)
        return self.mapped_slabs

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block of a mapped group is either free or used."""
        free = [block for blocks in self._free.values() for block in blocks]
        mapped = [block for group in self._free for block in self.geometry.blocks_of(group)]
        if sorted([*free, *self._used]) != sorted(mapped) or len(free) != self._free_count:
            raise AssertionError("a block is lost, or both free and used")
        if sorted([*self._unmapped, *self._free]) != list(range(1, self.geometry.groups)):
            raise AssertionError("a group is lost, or both mapped and not")
