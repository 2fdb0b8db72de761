"""Elastic KV pool of one model: which blocks exist now, which are in use, which are worth keeping.

The cache is one address range, layer outermost: layer ``l`` owns the bytes from ``l *
layer_bytes``, and block ``b`` lies at ``b * layer_block_bytes`` in every layer. A *group* is the
same stretch of `extent_slabs` slabs in every layer; its blocks are usable while it is mapped:

    layer 0  |-- group 0 --|-- group 1 --|-- group 2 --| ...
             [b0][b1][b2][b 3 ][b4][b5][ b 6 ][b7][b8]
    layer 1  |-- group 0 --|-- group 1 --|-- group 2 --| ...

Blocks that straddle two groups (b3, b6) are never used. Neither is group 0: the engine keeps
block 0 as its null block, which must have no memory.

A block of a mapped group is *used* (a request's KV), *cold* (unused, but its content may be
needed again: the prefix cache) or *free*. Cold blocks count for nothing when room is needed:

    ensure:  free blocks, then groups not mapped yet, then cold blocks, coldest first
    trim:    empty groups go; on demand those with cold blocks only, too, coldest first
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, gcd, lcm
from typing import Final, Protocol

from appliance.memory.arena import PoolExhausted

BLOCK_TOKENS: Final = 32
"""Tokens of a block. vLLM's CPU attention wants a multiple of this; the least wastes least."""

# Address space beyond what the pool can hold, for groups that are only partly used.
SLACK: Final = 1.25

WASTE: Final = 0.05
"""The part of a group that may lie in blocks that straddle it, where larger groups can help it."""

MOST_SLABS: Final = 64
SHARE: Final = 1 / 32
"""Groups are made larger, so that they waste less, up to so many slabs in each layer, and up to
this share of the pool: many models have to find room for one."""


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
        """The smallest groups that always hold a block and waste next to nothing, as far as their
        size allows, in a range that outgrows the pool.

        `least_blocks` are addressable whatever the pool's size.
        """
        most_slabs = min(MOST_SLABS, int(SHARE * pool_slabs / layers))
        extent_slabs, blocks = _extent(layer_block_bytes, slab_bytes, most_slabs)
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

    def null_slots(self) -> list[int]:
        """The slots in which block 0 lies, in every layer: a part of group 0."""
        per_layer = self.layer_bytes // self.slab_bytes
        slabs = -(-self.layer_block_bytes // self.slab_bytes)
        return [layer * per_layer + slab for layer in range(self.layers) for slab in range(slabs)]

    def slots_of(self, group: int) -> list[int]:
        """The slots of the address range that a group covers, in every layer."""
        per_layer = self.layer_bytes // self.slab_bytes
        return [
            layer * per_layer + group * self.extent_slabs + slab
            for layer in range(self.layers)
            for slab in range(self.extent_slabs)
        ]


def _extent(block_bytes: int, slab_bytes: int, most_slabs: int) -> tuple[int, int]:
    """Slabs of a group in one layer, and the blocks that each such group holds at least.

    The smallest that wastes at most `WASTE` of its bytes; if there is none up to `most_slabs`, the
    one up to there that wastes least, or else the smallest that holds a block.
    """
    least = -(-block_bytes // slab_bytes)
    best: tuple[float, int, int] | None = None
    for slabs in count(least):
        blocks = _fewest_blocks(slabs * slab_bytes, block_bytes)
        wasted = 1 - blocks * block_bytes / (slabs * slab_bytes)
        if blocks and (best is None or wasted < best[0]):
            best = (wasted, slabs, blocks)
        if best is not None and (best[0] <= WASTE or slabs >= most_slabs):
            return best[1:]
    raise AssertionError("a range without end has ended")


def _fewest_blocks(extent: int, block: int) -> int:
    """Blocks that lie wholly in a stretch of `extent` bytes, wherever its boundaries fall."""
    period = block // gcd(extent, block)
    return min((j + 1) * extent // block - -(-j * extent // block) for j in range(period))


class Slots(Protocol):
    """What a pool needs of `appliance.memory.arena.Region`."""

    def map(self, slots: Sequence[int]) -> None: ...

    def vacate(self, slots: Iterable[int]) -> None: ...


class _Group:
    """A mapped group: its free blocks by number, its other blocks by count."""

    __slots__ = ("cold", "free", "shelf", "used")

    def __init__(self, blocks: range) -> None:
        # Reversed, because `KvPool.take` pops from the end: lowest block first.
        self.free = list(reversed(blocks))
        self.used = 0
        self.cold = 0
        self.shelf = 0


class KvPool:
    """Blocks of mapped groups: free, used and cold. Not thread-safe: an engine has one thread.

    What is done in a step costs O(1) for each block, however many groups there are. `trim` costs
    O(groups unmapped), and O(cold blocks) when it has to choose among them.
    """

    def __init__(self, geometry: KvGeometry, slots: Slots) -> None:
        self.geometry = geometry
        self._slots = slots
        self._unmapped = list(range(1, geometry.groups))  # a heap: lowest addresses first
        self._groups: dict[int, _Group] = {}
        self._empty: set[int] = set()  # groups without a used or a cold block
        self._cold_only: set[int] = set()  # groups without a used block, but with cold ones
        # Groups with a free block, by how many of their blocks are not used. Bit `n` of the mask
        # says that shelf `n` has one, so the fullest group is found without a search.
        most = geometry.extent_slabs * geometry.slab_bytes // geometry.layer_block_bytes
        self._shelves: list[dict[int, None]] = [{} for _ in range(most + 1)]
        self._shelf_mask = 0
        self._free_count = 0
        self._used: set[int] = set()
        self._cold: OrderedDict[int, None] = OrderedDict()  # coldest first
        self._peak_groups = 0

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out now."""
        return self._free_count

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def cold(self) -> int:
        """Blocks that are not in use, and whose content is still good."""
        return len(self._cold)

    @property
    def mapped_slabs(self) -> int:
        return len(self._groups) * self.geometry.group_slabs

    @property
    def cold_slabs(self) -> int:
        """Slabs of groups that have cold blocks and no used one: `trim` can give them back."""
        return len(self._cold_only) * self.geometry.group_slabs

    @property
    def mapped_bytes(self) -> int:
        """What the pool takes from the device now."""
        return self.mapped_slabs * self.geometry.slab_bytes

    @property
    def held_bytes(self) -> int:
        """What used and cold blocks fill of it.

        Fragmentation (Aegaeon §7.3, figure 16) is unused by peak memory: ``(mapped_bytes -
        held_bytes) / peak_mapped_bytes``; of a shape or overall, the same with sums over pools
        (the sum of peaks is an upper bound of the peak of the sum).
        """
        return (len(self._used) + len(self._cold)) * self.geometry.block_bytes

    @property
    def peak_mapped_bytes(self) -> int:
        """The most that the pool ever took from the device."""
        return self._peak_groups * self.geometry.group_slabs * self.geometry.slab_bytes

    def ensure(self, blocks: int, max_slabs: int) -> list[int]:
        """Make at least `blocks` blocks free; the cold ones that lost their content for it.

        Maps groups while no more than `max_slabs` slabs are mapped, the arena has some and there
        are addresses; what is still missing then is taken from the cold blocks. Raises
        `PoolExhausted` when that is not enough, and `OSError` when the system refuses to map;
        nothing has changed then.
        """
        missing = blocks - self._free_count
        if missing <= 0:
            return []
        plan = self._plan(missing, max_slabs)
        mapped: list[int] = []
        try:
            short = missing - self._blocks_in(plan) - len(self._cold)
            if short > 0:
                reason = (
                    f"{max_slabs} slabs are allowed" if self._unmapped else "no address is left"
                )
                raise PoolExhausted(f"{short} blocks too few: {reason}")
            for number in plan:
                self._slots.map(self.geometry.slots_of(number))
                mapped.append(number)
        except BaseException as failure:
            # That the arena has no more slabs is no failure if cold blocks make up for it.
            short = missing - self._blocks_in(mapped) - len(self._cold)
            if not isinstance(failure, PoolExhausted) or short > 0:
                self._vacate(mapped)
                self._unplan(plan)
                raise
        self._unplan(plan[len(mapped) :])
        # Reversed, because `take` looks at the group filed last: lowest addresses first.
        for number in reversed(mapped):
            group = self._groups[number] = _Group(self.geometry.blocks_of(number))
            self._free_count += len(group.free)
            self._file(number, group)
        self._peak_groups = max(self._peak_groups, len(self._groups))
        missing -= self._blocks_in(mapped)
        lost = [self._cold.popitem(last=False)[0] for _ in range(missing)]
        self._lose(lost)
        return lost

    def take(self, count: int) -> list[int]:
        """Free blocks, now used; of the fullest groups first, so that the others can empty.

        Raises `PoolExhausted`, with nothing changed, when fewer are free.
        """
        if count > self._free_count:
            raise PoolExhausted(f"{count} blocks wanted, {self._free_count} are free")
        taken: list[int] = []
        while (missing := count - len(taken)) > 0:
            # The mask's lowest bit is the shelf of the groups with the fewest unused blocks.
            fullest = (self._shelf_mask & -self._shelf_mask).bit_length() - 1
            number = next(reversed(self._shelves[fullest]))
            group = self._groups[number]
            part = group.free[-missing:]
            del group.free[-missing:]
            group.used += len(part)
            taken.extend(reversed(part))
            self._file(number, group)
        self._free_count -= count
        self._used.update(taken)
        return taken

    def give(self, blocks: Iterable[int], *, keep: bool = False) -> None:
        """Take used blocks back: to be free, or with `keep` to be cold, the first the coldest.

        Raises `ValueError` for one that is not in use.
        """
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            number = self.geometry.group_of(block)
            group = self._groups[number]
            group.used -= 1
            if keep:
                group.cold += 1
                self._cold[block] = None
            else:
                group.free.append(block)
                self._free_count += 1
            self._file(number, group)

    def revive(self, block: int) -> None:
        """A cold block is wanted again: it is used now. Raises `ValueError` if it is not cold."""
        if block not in self._cold:
            raise ValueError(f"block {block} is not cold")
        del self._cold[block]
        self._used.add(block)
        number = self.geometry.group_of(block)
        group = self._groups[number]
        group.cold -= 1
        group.used += 1
        self._file(number, group)

    def trim(self, keep_slabs: int | None = None) -> list[int]:
        """Unmap the groups without a used or a cold block; the cold blocks given up for it.

        With `keep_slabs`, give up groups that have no used block, too, those first whose warmest
        block is the coldest, until at most `keep_slabs` slabs are mapped or no such group is left.
        """
        lost: list[int] = []
        if keep_slabs is not None and self._cold_only:
            kept = len(self._groups) - len(self._empty)
            excess = kept - keep_slabs // self.geometry.group_slabs
            for number in self._coldest_groups(excess):
                lost += [b for b in self.geometry.blocks_of(number) if b in self._cold]
            for block in lost:
                del self._cold[block]
            self._lose(lost)
        empty = sorted(self._empty)
        self._vacate(empty)
        self._unplan(empty)
        for number in empty:
            group = self._groups.pop(number)
            self._free_count -= len(group.free)
            self._unshelve(number, group)
        self._empty.clear()
        return lost

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block of a mapped group is in exactly one state."""
        free = [block for group in self._groups.values() for block in group.free]
        mapped = [block for group in self._groups for block in self.geometry.blocks_of(group)]
        if sorted([*free, *self._used, *self._cold]) != sorted(mapped):
            raise AssertionError("a block is lost, or in two states")
        if len(free) != self._free_count:
            raise AssertionError(f"{len(free)} blocks are free, not {self._free_count}")
        if sorted([*self._unmapped, *self._groups]) != list(range(1, self.geometry.groups)):
            raise AssertionError("a group is lost, or both mapped and not")
        shelves: dict[int, set[int]] = {}
        for number, group in self._groups.items():
            blocks = self.geometry.blocks_of(number)
            used = sum(block in self._used for block in blocks)
            cold = sum(block in self._cold for block in blocks)
            if (group.used, group.cold) != (used, cold):
                raise AssertionError(f"group {number} counts its blocks wrong")
            if (number in self._empty, number in self._cold_only) != (
                not used and not cold,
                not used and cold > 0,
            ):
                raise AssertionError(f"group {number} is wrongly taken for empty or cold, or not")
            if group.free:
                shelves.setdefault(len(blocks) - used, set()).add(number)
        if shelves != {shelf: set(groups) for shelf, groups in enumerate(self._shelves) if groups}:
            raise AssertionError("a group is not on its shelf")
        if self._shelf_mask != sum(1 << shelf for shelf in shelves):
            raise AssertionError("the mask of the shelves is wrong")

    # --- inside ----------------------------------------------------------------------------------

    def _plan(self, missing: int, max_slabs: int) -> list[int]:
        """Groups to map for `missing` blocks, as many as are allowed, off the heap."""
        allowed = max_slabs // self.geometry.group_slabs - len(self._groups)
        plan: list[int] = []
        while missing > 0 and len(plan) < allowed and self._unmapped:
            plan.append(heapq.heappop(self._unmapped))
            missing -= len(self.geometry.blocks_of(plan[-1]))
        return plan

    def _unplan(self, groups: Iterable[int]) -> None:
        for number in groups:
            heapq.heappush(self._unmapped, number)

    def _blocks_in(self, groups: Iterable[int]) -> int:
        return sum(len(self.geometry.blocks_of(number)) for number in groups)

    def _vacate(self, groups: Iterable[int]) -> None:
        self._slots.vacate([slot for number in groups for slot in self.geometry.slots_of(number)])

    def _lose(self, blocks: Iterable[int]) -> None:
        """Blocks that were cold are free."""
        for block in blocks:
            number = self.geometry.group_of(block)
            group = self._groups[number]
            group.cold -= 1
            group.free.append(block)
            self._free_count += 1
            self._file(number, group)

    def _coldest_groups(self, count: int) -> list[int]:
        """At most `count` groups without a used block, by the age of their warmest block."""
        warmest_first: dict[int, None] = {}
        for block in reversed(self._cold):
            number = self.geometry.group_of(block)
            if number in self._cold_only:
                warmest_first.setdefault(number)
        return list(reversed(warmest_first))[: max(count, 0)]

    def _file(self, number: int, group: _Group) -> None:
        """Note where `take` and `trim` find a group whose counts changed."""
        shelf = len(group.free) + group.cold if group.free else 0
        if shelf != group.shelf:
            self._unshelve(number, group)
            if shelf:
                self._shelves[shelf][number] = None
                self._shelf_mask |= 1 << shelf
                group.shelf = shelf
        if group.used:
            self._empty.discard(number)
            self._cold_only.discard(number)
        elif group.cold:
            self._empty.discard(number)
            self._cold_only.add(number)
        else:
            self._empty.add(number)
            self._cold_only.discard(number)

    def _unshelve(self, number: int, group: _Group) -> None:
        if group.shelf:
            groups = self._shelves[group.shelf]
            del groups[number]
            if not groups:
                self._shelf_mask ^= 1 << group.shelf
            group.shelf = 0
