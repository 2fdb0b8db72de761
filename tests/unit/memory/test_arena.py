"""The arena: every slab in one place, whatever is mapped, refused or released."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from appliance.memory import mapping
from appliance.memory.arena import POISON, Arena, PoolExhausted, Region
from appliance.memory.vmm_host import HostVmm
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.memory import RecordingVmm


class ArenaMachine(RuleBasedStateMachine):
    """Regions come and go over twelve slabs; the model is a dictionary of mapped slots."""

    regions: Bundle[Region] = Bundle("regions")

    def __init__(self) -> None:
        super().__init__()
        self.vmm = RecordingVmm(12)
        self.arena = Arena(self.vmm, at_once_slabs=2)
        self.mapped: dict[Region, set[int]] = {}
        self.aside: dict[Region, set[int]] = {}
        self.most = 0

    @rule(target=regions, slots=st.integers(1, 9), owner=st.sampled_from("ab"))
    def reserve(self, slots: int, owner: str) -> Region:
        region = self.arena.reserve(owner, slots)
        self.mapped[region] = set()
        self.aside[region] = set()
        return region

    @rule(
        region=regions,
        slots=st.sets(st.integers(-1, 9), max_size=6),
        aside=st.booleans(),
    )
    def map(self, region: Region, slots: set[int], aside: bool) -> None:
        take = region.set_aside if aside else region.map
        legal = slots <= set(range(region.slots)) - self.mapped[region]
        room = len(slots) <= 12 - self.held
        if legal and room:
            take(sorted(slots))
            self.mapped[region] |= slots
            self.aside[region] |= slots if aside else set()
            self.most = max(self.most, self.held)
        else:
            with pytest.raises(PoolExhausted if legal else ValueError):
                take(sorted(slots))

    @rule(region=regions, slots=st.sets(st.integers(-1, 9), max_size=6))
    def map_aside(self, region: Region, slots: set[int]) -> None:
        if slots <= self.aside[region]:
            region.map_aside(sorted(slots))
            self.aside[region] -= slots
        else:
            with pytest.raises(ValueError, match="no slab is set aside"):
                region.map_aside(sorted(slots))

    @rule(region=regions, slots=st.sets(st.integers(-1, 9), max_size=6))
    def unmap(self, region: Region, slots: set[int]) -> None:
        if slots <= self.mapped[region]:
            region.unmap(sorted(slots))
            self.mapped[region] -= slots
            self.aside[region] -= slots
        else:
            with pytest.raises(ValueError, match="has no slab"):
                region.unmap(sorted(slots))

    @rule(region=regions, slots=st.sets(st.integers(-1, 9), max_size=6), refused=st.booleans())
    def vacate(self, region: Region, slots: set[int], refused: bool) -> None:
        if slots <= self.mapped[region]:
            self.vmm.refusals = int(refused)
            region.vacate(sorted(slots))
            if refused:  # whatever is tried first, and not what a later rule does
                self.arena.settle()
                self.vmm.refusals = 0
            self.mapped[region] -= slots
            self.aside[region] -= slots
        else:
            with pytest.raises(ValueError, match="has no slab"):
                region.vacate(sorted(slots))

    @rule(region=consumes(regions))
    def release(self, region: Region) -> None:
        region.release()
        del self.mapped[region]
        del self.aside[region]

    @property
    def held(self) -> int:
        return sum(map(len, self.mapped.values()))

    @invariant()
    def conserved(self) -> None:
        self.arena.check_integrity()
        usage = self.arena.usage()
        assert usage.pop("free") == self.arena.free == 12 - self.held
        assert sum(usage.values()) == self.held
        assert self.arena.high_water == self.most
        for region, slots in self.mapped.items():
            assert region.mapped == len(slots)
            there = slots - self.aside[region]
            assert {region.slot_address(slot) for slot in there} <= set(self.vmm.placed)

    def teardown(self) -> None:
        for region in self.mapped:
            region.release()
        assert (self.vmm.placed, self.arena.free) == ({}, 12)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_failure_half_way_maps_nothing() -> None:
    """A system that refuses the third mapping leaves the first two unmapped as well."""
    vmm = RecordingVmm(9, fail_after=3)
    arena = Arena(vmm)
    region = arena.reserve("a", 9)
    region.map([4])

    with pytest.raises(OSError, match="ENOMEM"):
        region.map([0, 1, 3, 6, 7])

    assert list(vmm.placed) == [region.slot_address(4)]
    assert arena.free == 8
    assert region.mapped == 1
    arena.check_integrity()


def test_what_is_set_aside_waits_for_its_mapping() -> None:
    """A system that refuses one leaves it set aside: it can be given back without having been
    mapped, and no other region gets it before."""
    vmm = RecordingVmm(6, fail_after=2)
    arena = Arena(vmm)
    region, other = arena.reserve("a", 6), arena.reserve("b", 6)
    region.set_aside(range(5))
    region.map_aside([0, 1])

    with pytest.raises(OSError, match="ENOMEM"):
        region.map_aside([2, 4])  # the second of two calls

    assert [region.slot_address(slot) for slot in (0, 1, 2)] == list(vmm.placed)
    with pytest.raises(PoolExhausted):
        other.map([0, 1])
    region.unmap(range(5))
    assert (vmm.placed, arena.free, arena.high_water) == ({}, 6, 5)
    arena.check_integrity()


def test_neighbours_are_mapped_by_one_call() -> None:
    """Consecutive slots get consecutive slabs when there are such, in the order of the slots."""
    vmm = RecordingVmm(10)
    arena = Arena(vmm)
    regions = [arena.reserve(owner, 10) for owner in "ab"]
    regions[0].map(range(10))
    regions[0].unmap([1, 4, 5, 6, 8])
    del vmm.calls[:]

    regions[1].map([0, 1, 2, 7])

    a, b = regions
    assert [vmm.placed[a.slot_address(slot)] for slot in (0, 2, 3, 7, 9)] == [0, 2, 3, 7, 9]
    assert vmm.calls == [(b.slot_address(0), 4, 3), (b.slot_address(7), 8, 1)]


class HeldVmm(RecordingVmm):
    """Unmaps nothing on another thread than the test's before it may `go_on`."""

    def __init__(self, slabs: int) -> None:
        super().__init__(slabs)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.unmapped: list[tuple[int, int]] = []
        self._test = threading.get_ident()

    def unmap(self, address: int, count: int = 1) -> None:
        if threading.get_ident() != self._test:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_SECONDS)
        super().unmap(address, count)
        self.unmapped.append((address, count))


def test_many_slabs_are_vacated_without_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """They are free at once. A mapping takes others first, or unmaps those that it takes; it waits
    only for what is being unmapped. A few are unmapped at once."""
    vmm = HeldVmm(80)
    arena = Arena(vmm)
    a, b = arena.reserve("a", 70), arena.reserve("b", 80)
    a.map(range(70))
    a.vacate([69, 67])
    assert vmm.unmapped == [(a.slot_address(67), 1), (a.slot_address(69), 1)]

    a.vacate(range(66))
    assert vmm.reached.wait(PATIENCE_SECONDS)  # at the first 32, of which none is needed until
    assert arena.usage() == {"a": 2, "b": 0, "free": 78}
    b.map(range(12))  # slabs that lay nowhere, or are unmapped by now
    b.set_aside(range(12, 78))
    with pytest.raises(PoolExhausted):
        b.map([78])
    assert len(vmm.placed) == 80
    b.map_aside(range(12 + 32, 78))
    assert vmm.unmapped[2:] == [(a.slot_address(32), 34)]

    mapper = threading.Thread(target=b.map_aside, args=(range(12, 12 + 32),))
    mapper.start()
    vmm.go_on.set()
    mapper.join()
    arena.settle()
    assert vmm.unmapped[3:] == [(a.slot_address(0), 32)]
    assert "stay mapped" not in caplog.text  # as for slabs that are unmapped twice
    assert len(vmm.placed) == 80
    arena.check_integrity()


def test_an_address_is_unmapped_before_another_slab_comes_there() -> None:
    """A model that is loaded again while its old slabs are still in line gets others, or these."""
    vmm = HeldVmm(80)
    arena = Arena(vmm)
    region = arena.reserve("a", 40)
    region.map(range(40))
    region.vacate(range(40))
    assert vmm.reached.wait(PATIENCE_SECONDS)

    region.map(range(39, 31, -1))
    vmm.go_on.set()
    region.map(range(32))

    arena.settle()
    assert sorted(vmm.placed) == [region.slot_address(slot) for slot in range(40)]
    assert min(vmm.placed.values()) == 40  # slabs that lay nowhere come first
    arena.check_integrity()


@pytest.mark.parametrize("slabs", [3, 20])
def test_what_cannot_be_unmapped_is_tried_again(
    slabs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is mapped anew; that it is refused again is an error then, and changes nothing."""
    vmm = RecordingVmm(20)
    arena = Arena(vmm)
    a, b = arena.reserve("a", 20), arena.reserve("b", 20)
    a.map(range(slabs))
    vmm.refusals = 1
    a.vacate(range(slabs))
    arena.settle()
    assert (len(vmm.placed), arena.free) == (slabs, 20)
    assert "stay mapped" in caplog.text

    b.map(range(20 - slabs))
    vmm.refusals = 1
    with pytest.raises(OSError, match="not unmapped"):
        b.map(range(20 - slabs, 20))
    assert arena.free == slabs
    b.map(range(20 - slabs, 20))

    assert len(vmm.placed) == 20
    arena.check_integrity()


def test_slabs_are_unmapped_when_they_are_needed_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a system has no room for another one: they are free at once all the same."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    vmm = RecordingVmm(40)
    arena = Arena(vmm)
    a, b = arena.reserve("a", 40), arena.reserve("b", 40)
    a.map(range(40))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        a.vacate(range(30))
    assert (len(vmm.placed), arena.free) == (40, 30)
    arena.check_integrity()

    b.map(range(10))
    assert len(vmm.placed) == 40
    a.vacate(range(30, 40))  # by a thread, with those that are left
    arena.settle()
    assert sorted(vmm.placed) == [b.slot_address(slot) for slot in range(10)]
    arena.check_integrity()


def test_the_unmapping_thread_goes_on_after_any_error(caplog: pytest.LogCaptureFixture) -> None:
    """Else a mapping of those slabs would wait without end."""

    class ForgetfulVmm(RecordingVmm):
        failures = 1

        def unmap(self, address: int, count: int = 1) -> None:
            if self.failures:
                self.failures -= 1
                raise MemoryError("no memory for a list")
            super().unmap(address, count)

    vmm = ForgetfulVmm(40)
    arena = Arena(vmm)
    a, b = arena.reserve("a", 40), arena.reserve("b", 40)
    a.map(range(40))
    a.vacate(range(40))
    arena.settle()
    assert "no memory for a list" in caplog.text

    b.map(range(40))
    assert len(vmm.placed) == 40
    arena.check_integrity()


def test_the_unmapping_thread_is_made_ready_first() -> None:
    """A GPU's driver refuses a thread that has no context."""
    ready: list[int] = []

    class StrictVmm(RecordingVmm):
        def adopt_thread(self) -> None:
            ready.append(threading.get_ident())

        def unmap(self, address: int, count: int = 1) -> None:
            assert threading.get_ident() in ready
            super().unmap(address, count)

    vmm = StrictVmm(40)
    arena = Arena(vmm)
    region = arena.reserve("a", 40)
    region.map(range(40))
    region.vacate(range(40))
    arena.settle()
    assert vmm.placed == {}


def test_a_region_is_released_with_what_was_vacated() -> None:
    """Its addresses may be another's afterwards, so nothing may lie there any more."""
    vmm = HeldVmm(80)
    arena = Arena(vmm)
    region = arena.reserve("a", 80)
    region.map(range(80))
    region.vacate(range(80))
    assert vmm.reached.wait(PATIENCE_SECONDS)
    vmm.go_on.set()

    region.release()  # asserts that nothing is placed there

    arena.settle()
    assert arena.usage() == {"free": 80}
    arena.check_integrity()


def test_poison_shows_until_it_is_written() -> None:
    """What was never written reads as NaN in every floating point format, even in a used slab."""
    arena = Arena(HostVmm(2, mmap.PAGESIZE), poison=True)
    first, second = arena.reserve("a", 2), arena.reserve("b", 2)
    first.map([0, 1])
    mapping.view(first.slot_address(0), 2 * mmap.PAGESIZE)[:] = bytes(2 * mmap.PAGESIZE)
    first.unmap([0, 1])
    second.map([0, 1])

    content = np.frombuffer(mapping.view(second.slot_address(0), 2 * mmap.PAGESIZE), np.uint8)
    assert (content == POISON).all()
    assert np.isnan(content.view(np.float32)).all()
    assert np.isnan(content.view(np.float16)).all()
    # A bfloat16 is the upper half of a float32.
    assert np.isnan((content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)).all()


def test_what_cannot_be_poisoned_is_not_mapped() -> None:
    """A mapping whose filling fails is taken back like one that fails itself."""
    vmm = RecordingVmm(3)
    vmm.copy = lambda *_: (_ for _ in ()).throw(OSError("bad copy"))  # type: ignore[method-assign]
    arena = Arena(vmm, poison=True)
    region = arena.reserve("a", 3)

    with pytest.raises(OSError, match="bad copy"):
        region.map([0, 2])

    assert not vmm.placed
    assert (arena.free, region.mapped) == (3, 0)


def test_a_region_is_released_once() -> None:
    """Its addresses may be another's by then: nothing of that one is taken away."""
    arena = Arena(HostVmm(4, mmap.PAGESIZE))
    region = arena.reserve("a", 2)
    region.map([0])
    region.release()
    other = arena.reserve("b", 2)
    other.map([0, 1])

    with pytest.raises(ValueError, match="a region of a is released twice"):
        region.release()

    ctypes.memset(other.address, 1, 2 * mmap.PAGESIZE)
    arena.check_integrity()


def test_slots_named_twice_are_refused() -> None:
    """A slot has one slab; naming it twice would lose one."""
    region = Arena(RecordingVmm(5)).reserve("a", 3)
    with pytest.raises(ValueError, match="twice"):
        region.map([1, 1])
    region.map([1])
    with pytest.raises(ValueError, match="twice"):
        region.unmap([1, 1])
    with pytest.raises(ValueError, match="0 slots"):
        Arena(RecordingVmm(1)).reserve("a", 0)


def test_a_lost_slab_is_noticed() -> None:
    """The integrity check can fail."""
    arena = Arena(RecordingVmm(3))
    arena._free.take(1)
    with pytest.raises(AssertionError, match="lost"):
        arena.check_integrity()


@pytest.mark.parametrize("give_back", [Region.unmap, Region.vacate])
def test_threads_share_the_pool(give_back: Callable[[Region, range], None]) -> None:
    """Two threads that map and unmap real memory never hold more than there is."""
    arena = Arena(HostVmm(8, mmap.PAGESIZE), at_once_slabs=3)
    refused: list[PoolExhausted] = []

    def work(owner: str) -> None:
        region = arena.reserve(owner, 6)
        for _ in range(200):
            try:
                region.map(range(6))
            except PoolExhausted as exhausted:
                refused.append(exhausted)
            else:
                give_back(region, range(6))
        region.release()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    arena.check_integrity()
    assert arena.free == 8
    assert arena.high_water == 6
