"""Who has which slab: the device pool of one instance, and the address ranges it is mapped into.

    region "weights:a"  |s3|s7|s1|        address ranges, reserved once per engine,
    region "kv:a"       |  |  |s0|  |  |  cut in slots of one slab each
    region "kv:b"       |s2|  |  |  |
    free                 s4 s5 s6

Every slab is in exactly one place: free, or under one slot of one region. One that was vacated is
free and taken last: until it is mapped again it may lie under its old address, which nothing uses.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from appliance.memory.vacated import AT_ONCE_SLABS, VacatedSlabs
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

    def vacate(self, slots: Iterable[int]) -> None:
        """Give the slabs of these slots back without waiting for them to be unmapped, if they are
        many. As with `unmap`, nothing that runs or is in line may touch them. Raises `ValueError`
        for a slot without one."""
        self._arena._vacate(self, list(slots))

    def release(self) -> None:
        """Give back the slabs and the address range; the region must not be used afterwards.

        Raises `OSError` when the system refuses; then it can be called again. Raises `ValueError`
        when it has been released."""
        self._arena._release(self)


class Arena:
    """The slabs of one `Vmm`, and every region reserved over them. Safe to use from threads."""

    def __init__(
        self, vmm: Vmm, poison: bool = False, *, at_once_slabs: int = AT_ONCE_SLABS
    ) -> None:
        """With `poison`, a slab that is mapped holds nothing but `POISON` until it is written.

        That costs a write of the whole slab per mapping: it is for tests, where a read of what
        never landed is to be seen. Of slabs that are vacated, at most `at_once_slabs` are unmapped
        by the thread that vacates them.
        """
        self.vmm = vmm
        self.slabs = vmm.slabs
        self.slab_bytes = vmm.slab_bytes
        self._lock = threading.Condition(threading.Lock())
        self._free = _FreeSlabs(vmm.slabs)
        self._vacated = VacatedSlabs(vmm, self._lock, self._free.clear, at_once_slabs)
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
            vacated = [slab for slab in self._free.numbers(vacated=True) if slab in self._vacated]
            if vacated != self._free.numbers(vacated=True):
                raise AssertionError("a slab is taken for vacated, and is not")
        if sorted(seen) != list(range(self.slabs)):
            raise AssertionError(f"slabs lost or in two places: {sorted(seen)} of {self.slabs}")

    def settle(self) -> None:
        """Return when all that was vacated is unmapped, but for what the system refused."""
        with self._lock:
            self._vacated.settle()

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
        self._vacated.clear_for(map(region.slot_address, slots), slabs)
        for first, slab, count in _runs(slots, slabs):
            self.vmm.map(region.slot_address(first), slab, count)
            region._aside.difference_update(range(first, first + count))
            self._fill_poison(region, range(first, first + count))

    def _unmap(self, region: Region, slots: list[int]) -> None:
        with self._lock:
            _check_held(region, slots)
            self._give_back(region, slots)

    def _vacate(self, region: Region, slots: list[int]) -> None:
        with self._lock:
            _check_held(region, slots)
            self._give_back_aside(region, slots)
            left = {slot: region._slabs.pop(slot) for slot in slots if slot in region._slabs}
            self._vacated.add({region.slot_address(slot): slab for slot, slab in left.items()})
            self._free_up(left.values())

    def _give_back(self, region: Region, slots: Iterable[int]) -> None:
        self._give_back_aside(region, slots)
        ordered = sorted(region._slabs.keys() & set(slots))
        for first, _, count in _runs(ordered, ordered):
            self.vmm.unmap(region.slot_address(first), count)
            self._free_up(region._slabs.pop(first + i) for i in range(count))

    def _give_back_aside(self, region: Region, slots: Iterable[int]) -> None:
        """Those of them that are not mapped yet."""
        aside = region._aside.intersection(slots)
        region._aside -= aside
        self._free_up(region._slabs.pop(slot) for slot in aside)

    def _free_up(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self._free.give(slab, vacated=slab in self._vacated)

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
            self._give_back(region, list(region._slabs))
            self._vacated.clear_within(region.address, region.slots * self.slab_bytes)
            self.vmm.release(region.address, region.slots * self.slab_bytes)
            self._regions.remove(region)


def _check_held(region: Region, slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise ValueError(f"{region.owner} names a slot twice")
    for slot in slots:
        if slot not in region._slabs:
            raise ValueError(f"slot {slot} of {region.owner} has no slab")


_FREE, _TAKEN, _VACATED = range(3)


class _FreeSlabs:
    """Slab numbers that are free, handed out in runs as long as they come, vacated ones last.

    A byte per slab, searched in C: a pool of tens of thousands costs microseconds a run.
    """

    def __init__(self, slabs: int) -> None:
        self._states = bytearray(slabs)
        self._counts = {_FREE: slabs, _VACATED: 0}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def numbers(self, *, vacated: bool = False) -> list[int]:
        """All of them, or those that were vacated."""
        wanted = (_VACATED,) if vacated else (_FREE, _VACATED)
        return [slab for slab, state in enumerate(self._states) if state in wanted]

    def take(self, count: int) -> list[int]:
        """`count` of them, which there are: the first run that is long enough, else more."""
        slabs = self._take(min(count, self._counts[_FREE]), _FREE)
        return slabs + self._take(count - len(slabs), _VACATED)

    def _take(self, count: int, state: int) -> list[int]:
        slabs: list[int] = []
        wanted, start = count, 0
        while missing := count - len(slabs):
            wanted = min(wanted, missing)
            first = self._states.find(bytes([state]) * wanted, start)
            if first < 0:
                # Nothing this long: from the start again, for half of it.
                wanted, start = (wanted if start else wanted // 2), 0
                continue
            others = (self._states.find(other, first) for other in range(3) if other != state)
            end = min((at for at in others if at >= 0), default=len(self._states))
            size = min(end - first, missing)
            start = first + size
            self._states[first:start] = bytes([_TAKEN]) * size
            slabs.extend(range(first, start))
        self._counts[state] -= count
        return slabs

    def give(self, slab: int, *, vacated: bool) -> None:
        state = _VACATED if vacated else _FREE
        self._states[slab] = state
        self._counts[state] += 1

    def clear(self, slab: int) -> None:
        """It lies under no address any more; it may have been taken."""
        if self._states[slab] == _VACATED:
            self._states[slab] = _FREE
            self._counts[_VACATED] -= 1
            self._counts[_FREE] += 1


def _runs(slots: Sequence[int], slabs: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First slot, first slab and length of every stretch in which both go up by one."""
    start = 0
    for i in range(len(slots)):
        last = i + 1 == len(slots)
        if last or slots[i + 1] != slots[i] + 1 or slabs[i + 1] != slabs[i] + 1:
            yield slots[start], slabs[start], i + 1 - start
            start = i + 1
