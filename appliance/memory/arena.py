"""Who has which slab: the device pool of one instance, and the address ranges it is mapped into.

    region "weights:a"  |s3|s7|s1|        address ranges, reserved once per engine,
    region "kv:a"       |  |  |s0|  |  |  cut in slots of one slab each
    region "kv:b"       |s2|  |  |  |
    free                 s4 s5 s6

Every slab is in exactly one place: free, or under one slot of one region.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from appliance.memory.vmm import Vmm

POISON: Final = 0xFF
"""Byte of which float32, bfloat16, float16 and float8 make NaNs, and int32 -1."""


class PoolExhausted(Exception):
    """Not enough free slabs; nothing was mapped. The answer is to free some, not to fail."""


class Holding(NamedTuple):
    """What a region has: its slots that have a slab, and which."""

    owner: str
    address: int
    slabs: dict[int, int]


class Region:
    """One reserved address range of `slots` slots, made by `Arena.reserve`."""

    def __init__(self, arena: Arena, owner: str, slots: int, address: int) -> None:
        self.owner = owner
        self.slots = slots
        self.address = address
        self._arena = arena
        self._slabs: dict[int, int] = {}  # slot -> slab; guarded by the arena's lock
        self._aside: set[int] = set()  # slots among these that the slab is not mapped under yet

    @property
    def mapped(self) -> int:
        """Slots that have a slab, or one put aside."""
        return len(self._slabs)

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self._arena.slab_bytes

    def map(self, slots: Sequence[int]) -> None:
        """Put free slabs under these slots: all of them, or none.

        Raises `PoolExhausted` when too few slabs are free, `ValueError` for a slot that is
        mapped already or is no slot, `OSError` when the system refuses.
        """
        self._arena._map(self, slots)

    def set_aside(self, slots: Sequence[int]) -> None:
        """Take free slabs for these slots, all of them or none, to be put under them by
        `map_aside`. To other regions they are taken from now on. Raises as `map` does."""
        self._arena._set_aside(self, slots)

    def map_aside(self, slots: Iterable[int]) -> None:
        """Put the slabs there that were set aside for these slots. Raises `ValueError` for a slot
        that none is set aside for, `OSError` when the system refuses."""
        self._arena._map_aside(self, list(slots))

    def unmap(self, slots: Iterable[int]) -> None:
        """Give the slabs of these slots back. Raises `ValueError` for a slot without one, `OSError`
        when the system refuses: those that `mapped` still counts can be unmapped again."""
        self._arena._unmap(self, list(slots))

    def release(self) -> None:
        """Give back the slabs and the address range; the region must not be used afterwards.

        Raises `OSError` when the system refuses; then it can be called again. Raises `ValueError`
        when it has been released."""
        self._arena._release(self)


class Arena:
    """The slabs of one `Vmm`, and every region reserved over them. Safe to use from threads."""

    def __init__(self, vmm: Vmm, poison: bool = False) -> None:
        """With `poison`, a slab that is mapped holds nothing but `POISON` until it is written.

        That costs a write of the whole slab per mapping: it is for tests, where a read of what
        never landed is to be seen.
        """
        self.vmm = vmm
        self.slabs = vmm.slabs
        self.slab_bytes = vmm.slab_bytes
        self._lock = threading.Lock()
        self._free = _FreeSlabs(vmm.slabs)
        self._poison = ctypes.create_string_buffer(vmm.slab_bytes) if poison else None
        if self._poison is not None:
            ctypes.memset(self._poison, POISON, vmm.slab_bytes)
        self._regions: list[Region] = []
        self._high_water = 0

    @property
    def free(self) -> int:
        """Slabs that are free."""
        return len(self._free)

    @property
    def high_water(self) -> int:
        """The most slabs that were ever mapped at the same time."""
        return self._high_water

    def reserve(self, owner: str, slots: int) -> Region:
        """Reserve addresses for `slots` slabs. Raises `OSError` if the system refuses."""
        if slots < 1:
            raise ValueError(f"{owner} asks for {slots} slots")
        region = Region(self, owner, slots, self.vmm.reserve(slots * self.slab_bytes))
        with self._lock:
            self._regions.append(region)
        return region

    def usage(self) -> dict[str, int]:
        """Mapped slabs by owner, and ``free``; they sum to `slabs`."""
        with self._lock:
            usage: dict[str, int] = {}
            for region in self._regions:
                usage[region.owner] = usage.get(region.owner, 0) + region.mapped
            return usage | {"free": len(self._free)}

    def holdings(self) -> list[Holding]:
        """What every region has at one moment, those that have nothing left out."""
        with self._lock:
            return [
                Holding(region.owner, region.address, dict(region._slabs))
                for region in self._regions
                if region._slabs
            ]

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every slab is in exactly one place."""
        with self._lock:
            seen = self._free.numbers()
            for region in self._regions:
                seen.extend(region._slabs.values())
        if sorted(seen) != list(range(self.slabs)):
            raise AssertionError(f"slabs lost or in two places: {sorted(seen)} of {self.slabs}")

    def _map(self, region: Region, slots: Sequence[int]) -> None:
        with self._lock:
            self._take(region, slots)
            try:
                self._put(region, slots)
            except BaseException:
                self._give_back(region, slots)
                raise
            self._note_high_water()

    def _set_aside(self, region: Region, slots: Sequence[int]) -> None:
        with self._lock:
            self._take(region, slots)
            self._note_high_water()

    def _map_aside(self, region: Region, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                if slot not in region._aside:
                    raise ValueError(f"no slab is set aside for slot {slot} of {region.owner}")
            self._put(region, slots)

    def _take(self, region: Region, slots: Sequence[int]) -> None:
        """Set free slabs aside for these slots, all or none."""
        if len(set(slots)) != len(slots):
            raise ValueError(f"{region.owner} names a slot twice")
        for slot in slots:
            if not 0 <= slot < region.slots or slot in region._slabs:
                raise ValueError(f"slot {slot} of {region.owner} cannot be mapped")
        if len(slots) > len(self._free):
            raise PoolExhausted(
                f"{region.owner} needs {len(slots)} slabs, {len(self._free)} are free"
            )
        region._slabs.update(zip(slots, self._free.take(len(slots)), strict=True))
        region._aside.update(slots)

    def _note_high_water(self) -> None:
        self._high_water = max(self._high_water, self.slabs - len(self._free))

    def _put(self, region: Region, slots: Sequence[int]) -> None:
        """Map the slabs that are set aside for these slots."""
        slabs = [region._slabs[slot] for slot in slots]
        for first, slab, count in _runs(slots, slabs):
            self.vmm.map(region.slot_address(first), slab, count)
            region._aside.difference_update(range(first, first + count))
            self._fill_poison(region, range(first, first + count))

    def _unmap(self, region: Region, slots: list[int]) -> None:
        with self._lock:
            if len(set(slots)) != len(slots):
                raise ValueError(f"{region.owner} names a slot twice")
            for slot in slots:
                if slot not in region._slabs:
                    raise ValueError(f"slot {slot} of {region.owner} has no slab")
            self._give_back(region, slots)

    def _give_back(self, region: Region, slots: Iterable[int]) -> None:
        aside = region._aside.intersection(slots)
        region._aside -= aside
        self._free.give(region._slabs.pop(slot) for slot in aside)
        ordered = sorted(set(slots) - aside)
        for first, _, count in _runs(ordered, ordered):
            self.vmm.unmap(region.slot_address(first), count)
            self._free.give(region._slabs.pop(first + i) for i in range(count))

    def _fill_poison(self, region: Region, slots: range) -> None:
        if self._poison is not None:
            for slot in slots:
                source = ctypes.addressof(self._poison)
                self.vmm.copy(region.slot_address(slot), source, self.slab_bytes)

    def _release(self, region: Region) -> None:
        with self._lock:
            if region not in self._regions:
                # Its addresses may be another's by now.
                raise ValueError(f"a region of {region.owner} is released twice")
            self._give_back(region, region._slabs)
            self.vmm.release(region.address, region.slots * self.slab_bytes)
            self._regions.remove(region)


class _FreeSlabs:
    """Slab numbers that are free, handed out in runs as long as they come.

    A byte per slab, searched in C: a pool of tens of thousands costs microseconds a run.
    """

    def __init__(self, slabs: int) -> None:
        self._taken = bytearray(slabs)
        self._count = slabs

    def __len__(self) -> int:
        return self._count

    def numbers(self) -> list[int]:
        return [slab for slab, taken in enumerate(self._taken) if not taken]

    def take(self, count: int) -> list[int]:
        """`count` of them, which there are: the first run that is long enough, else more."""
        slabs: list[int] = []
        wanted, start = count, 0
        while missing := count - len(slabs):
            wanted = min(wanted, missing)
            first = self._taken.find(bytes(wanted), start)
            if first < 0:
                # Nothing this long: from the start again, for half of it.
                wanted, start = (wanted if start else wanted // 2), 0
                continue
            end = self._taken.find(1, first)
            size = min((len(self._taken) if end < 0 else end) - first, missing)
            start = first + size
            self._taken[first:start] = b"\1" * size
            slabs.extend(range(first, start))
        self._count -= count
        return slabs

    def give(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self._taken[slab] = 0
            self._count += 1


def _runs(slots: Sequence[int], slabs: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First slot, first slab and length of every stretch in which both go up by one."""
    start = 0
    for i in range(len(slots)):
        last = i + 1 == len(slots)
        if last or slots[i + 1] != slots[i] + 1 or slabs[i + 1] != slabs[i] + 1:
            yield slots[start], slabs[start], i + 1 - start
            start = i + 1
