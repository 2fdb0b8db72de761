"""The ledgers: whatever is taken and given back, in any order, the books balance."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.errors import LedgerError
from appliance.memory.ledger import DeviceLedger, DiskLedger, HostLedger

MODELS = st.sampled_from("abcd")
SLAB = 100
BLOCK_BYTES = st.sampled_from([7, 30, 50, 100, 101, 250])


class DeviceBooks(RuleBasedStateMachine):
    """A device ledger against a plain count of who holds what."""

    @initialize(total=st.integers(0, 20))
    def open(self, total: int) -> None:
        self.ledger = DeviceLedger(total)
        self.total = total
        self.weights: dict[str, int] = {}
        self.loading: set[str] = set()
        self.kv: dict[str, int] = {}
        self.most = 0

    def free(self) -> int:
        return self.total - sum(self.weights.values()) - sum(self.kv.values())

    @rule(model=MODELS, slabs=st.integers(1, 8))
    def begin_load(self, model: str, slabs: int) -> None:
        if model in self.weights or slabs > self.free():
            with pytest.raises(LedgerError):
                self.ledger.begin_load(model, slabs)
        else:
            self.ledger.begin_load(model, slabs)
            self.weights[model] = slabs
            self.loading.add(model)

    @rule(model=MODELS)
    def loaded(self, model: str) -> None:
        self.ledger.loaded(model)
        self.loading.discard(model)

    @precondition(lambda self: self.weights)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.weights)))
        self.ledger.evict(model)
        del self.weights[model]
        self.loading.discard(model)

    @rule(model=MODELS, slabs=st.integers(0, 12))
    def set_kv(self, model: str, slabs: int) -> None:
        if slabs - self.kv.get(model, 0) > self.free():
            with pytest.raises(LedgerError):
                self.ledger.set_kv(model, slabs)
        else:
            self.ledger.set_kv(model, slabs)
            self.kv[model] = slabs

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        self.most = max(self.most, self.total - self.free())
        assert self.ledger.free_slabs == self.free()
        assert self.ledger.weights == self.weights
        assert self.ledger.loading == self.loading
        assert self.ledger.kv == {model: slabs for model, slabs in self.kv.items() if slabs}
        assert self.ledger.high_water_slabs == self.most


class HostBooks(RuleBasedStateMachine):
    """A host ledger against a map of every byte that was handed out."""

    @initialize(slabs=st.integers(0, 24), kv_floor=st.integers(0, 4))
    def open(self, slabs: int, kv_floor: int) -> None:
        self.ledger = HostLedger(slabs * SLAB + 99, SLAB, kv_floor)
        self.kv_floor = kv_floor
        self.slabs = slabs
        self.weights: dict[str, tuple[int, ...]] = {}
        self.blocks: list[tuple[int, tuple[int, ...]]] = []
        self.held_back: dict[str, int] = {}

    def owned(self) -> list[tuple[int, int]]:
        """Start and end of every place in use."""
        slabs = [(start, SLAB) for offsets in self.weights.values() for start in offsets]
        blocks = [(start, size) for size, offsets in self.blocks for start in offsets]
        return [(start, start + size) for start, size in slabs + blocks]

    def free_runs(self, needed: int) -> int:
        """How many times there are so many slabs in a row that KV may have."""
        taken = {slab for start, end in self.owned() for slab in range(start // SLAB, end // SLAB)}
        taken |= {(end - 1) // SLAB for _, end in self.owned()}
        runs = row = 0
        for slab in range(self.slabs):
            row = 0 if slab in taken else row + 1
            runs += row > 0 and row % needed == 0
        held_back = sum(self.held_back.values())
        return min(runs, max(0, self.ledger.free_slabs - held_back) // needed)

    @rule(model=MODELS, slabs=st.integers(0, 6))
    def hold_back(self, model: str, slabs: int) -> None:
        if model not in self.weights:
            self.ledger.hold_back(model, slabs)
            self.held_back[model] = slabs

    @precondition(lambda self: self.weights)
    @rule(data=st.data())
    def give_weights(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.weights)))
        self.ledger.give_weights(model)
        del self.weights[model]

    @precondition(lambda self: self.weights)
    @rule(data=st.data(), slabs=st.integers(0, 8))
    def shrink_weights(self, data: st.DataObject, slabs: int) -> None:
        model = data.draw(st.sampled_from(sorted(self.weights)))
        self.ledger.shrink_weights(model, slabs)
        self.weights[model] = self.weights[model][:slabs]

    @rule(model=MODELS, slabs=st.integers(1, 8))
    def take_weights(self, model: str, slabs: int) -> None:
        if model in self.weights:
            return
        free = self.ledger.free_slabs
        others = sum(count for name, count in self.held_back.items() if name != model)
        others += max(0, self.kv_floor - self.ledger.kv_slabs)
        offsets = self.ledger.take_weights(model, slabs)
        if offsets is None:
            assert slabs > free - others
            assert self.ledger.free_slabs == free
        else:
            assert len(offsets) == slabs <= free - others
            assert all(offset % SLAB == 0 for offset in offsets)
            self.weights[model] = offsets
            self.held_back.pop(model, None)

    @rule(size=BLOCK_BYTES, count=st.integers(0, 12))
    def take_blocks(self, size: int, count: int) -> None:
        free, kv_slabs = self.ledger.free_slabs, self.ledger.kv_slabs
        runs = self.free_runs(-(-size // SLAB))
        offsets = self.ledger.take_blocks(size, count)
        if size >= SLAB:
            assert (offsets is None) == (count > runs)
        if offsets is None:
            assert count > runs * (SLAB // size or 1)
            assert (self.ledger.free_slabs, self.ledger.kv_slabs) == (free, kv_slabs)
            return
        assert len(offsets) == count
        assert self.ledger.free_slabs == free or self.ledger.free_slabs >= sum(
            self.held_back.values()
        )
        self.blocks.append((size, offsets))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def give_blocks(self, data: st.DataObject) -> None:
        size, offsets = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        kept = data.draw(st.integers(0, len(offsets)))
        self.ledger.give_blocks(offsets[kept:])
        if kept:
            self.blocks.append((size, offsets[:kept]))

    @invariant()
    def nothing_overlaps(self) -> None:
        if not hasattr(self, "ledger"):
            return
        places = sorted(self.owned())
        for (_, end), (start, _) in pairwise(places):
            assert end <= start
        assert all(start >= 0 and end <= self.slabs * SLAB for start, end in places)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        held = self.ledger.weight_slabs + self.ledger.kv_slabs
        assert self.ledger.free_slabs + held == self.slabs
        assert self.ledger.weight_slabs == sum(map(len, self.weights.values()))

    @invariant()
    def whose_each_slab_is(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = [(f"weights:{model}", SLAB, places) for model, places in self.weights.items()]
        held += [(f"kv:{size}", size, places) for size, places in self.blocks]
        expected = {
            slab: name
            for name, size, places in held
            for start in places
            for slab in range(start // SLAB, (start + size - 1) // SLAB + 1)
        }
        rows = self.ledger.rows()
        assert {slab: name for name in rows for row in rows[name] for slab in row} == expected
        assert sum(len(row) for name in rows for row in rows[name]) == len(expected)
        for found in rows.values():
            assert all(one.stop < other.start for one, other in pairwise(found))

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for _, offsets in self.blocks:
            self.ledger.give_blocks(offsets)
        assert self.ledger.kv_slabs == 0
        assert self.ledger.free_slabs == self.slabs - self.ledger.weight_slabs


@pytest.mark.parametrize("books", [DeviceBooks, HostBooks])
def test_the_books_balance(books: type[RuleBasedStateMachine]) -> None:
    """Free, held and in flight are the whole at all times, and no place has two owners."""
    run_state_machine_as_test(
        books, settings=settings(max_examples=100, stateful_step_count=30, deadline=None)
    )


def test_blocks_fill_the_fullest_slab_first() -> None:
    """New blocks go where the fewest places are free, so that whole slabs come free."""
    ledger = HostLedger(10 * SLAB, SLAB)
    first = ledger.take_blocks(25, 4)
    second = ledger.take_blocks(25, 4)
    assert first is not None
    assert second is not None
    ledger.give_blocks(first[:3])
    ledger.give_blocks(second[:1])

    again = ledger.take_blocks(25, 1)

    assert again == second[:1]


def test_blocks_larger_than_a_slab_lie_in_slabs_in_a_row() -> None:
    """A block of two and a half slabs takes a run of three; two such blocks do not share one."""
    ledger = HostLedger(7 * SLAB, SLAB)

    assert ledger.take_blocks(250, 2) == (400, 100)
    assert ledger.take_blocks(250, 1) is None
    assert ledger.free_slabs == 1


def test_blocks_do_not_take_what_is_held_back() -> None:
    """Slabs promised to weights that are yet to come are not used for KV, but by those weights."""
    ledger = HostLedger(10 * SLAB, SLAB)
    ledger.hold_back("a", 6)

    assert ledger.take_blocks(SLAB, 5) is None
    assert ledger.take_blocks(SLAB, 4) is not None
    assert ledger.take_weights("b", 1) is None
    assert ledger.take_weights("a", 6) is not None


@given(
    held_back=st.integers(0, 8),
    size=st.integers(10, SLAB),
    taken=st.integers(0, 30),
    given=st.integers(0, 30),
)
def test_the_room_for_blocks_is_what_can_be_taken(
    held_back: int, size: int, taken: int, given: int
) -> None:
    """Exactly so many blocks, no longer than a slab, may still be taken."""
    ledger = HostLedger(10 * SLAB, SLAB)
    ledger.hold_back("a", held_back)
    assert ledger.held_back == ({"a": held_back} if held_back else {})
    offsets = ledger.take_blocks(size, taken) or ()
    ledger.give_blocks(offsets[:given])
    room = ledger.room_for_blocks(size)

    assert ledger.take_blocks(size, room + 1) is None
    assert len(ledger.take_blocks(size, room) or ()) == room
    ledger.check_integrity()


def test_a_block_is_returned_once() -> None:
    """Returning a place that is not in use is a defect."""
    ledger = HostLedger(10 * SLAB, SLAB)
    offsets = ledger.take_blocks(30, 2)
    assert offsets is not None
    ledger.give_blocks(offsets)

    with pytest.raises(LedgerError, match="not in use"):
        ledger.give_blocks(offsets)


def test_host_books_that_do_not_balance_are_noticed() -> None:
    """A slab nobody knows of, or a block that is in no run, is a `LedgerError`."""
    lost_slab = HostLedger(10 * SLAB, SLAB)
    lost_slab._free_slabs -= 1
    with pytest.raises(LedgerError, match="9 free"):
        lost_slab.check_integrity()

    lost_block = HostLedger(10 * SLAB, SLAB)
    lost_block.take_blocks(30, 2)
    lost_block._run_of.popitem()
    with pytest.raises(LedgerError, match="2 blocks out of runs, 1 in use"):
        lost_block.check_integrity()


@pytest.mark.parametrize("kv", [{"a": 11}, {"a": -1}, {"a": 0}])
def test_device_books_that_do_not_balance_are_noticed(kv: dict[str, int]) -> None:
    """More KV than there are slabs, or none or less of it under a model's name, is a defect."""
    ledger = DeviceLedger(10)
    ledger.kv = kv

    with pytest.raises(LedgerError):
        ledger.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60))))
def test_the_disk_holds_no_more_than_it_has(steps: list[tuple[str, int]]) -> None:
    """A request that holds room gives it back; others get room as long as there is some."""
    ledger = DiskLedger(100)
    held: dict[str, int] = {}
    for request, nbytes in steps:
        if request in held:
            with pytest.raises(LedgerError, match="on disk already"):
                ledger.take(request, nbytes)
            ledger.give(request)
            del held[request]
        elif ledger.take(request, nbytes):
            held[request] = nbytes
        else:
            assert sum(held.values()) + nbytes > 100
        assert (ledger.held, ledger.held_bytes) == (held, sum(held.values()))
        ledger.check_integrity()


def test_disk_books_that_do_not_balance_are_noticed() -> None:
    ledger = DiskLedger(10)
    ledger.take("a", 4)
    ledger.held_bytes = 5
    with pytest.raises(LedgerError, match="5 of 10 bytes are held"):
        ledger.check_integrity()


def test_the_room_that_kv_could_have() -> None:
    """What it has, and what is neither of weights nor held back for them."""
    ledger = HostLedger(10 * SLAB, SLAB)
    ledger.take_weights("a", 2)
    ledger.hold_back("b", 3)
    ledger.take_blocks(SLAB, 1)

    assert (ledger.kv_free_slabs, ledger.kv_room_slabs) == (4, 5)
    ledger.hold_back("c", 9)
    assert (ledger.kv_free_slabs, ledger.kv_room_slabs) == (0, 1)


def test_a_refused_claim_changes_nothing() -> None:
    """Claiming what is not free raises and says what was asked for and what there is."""
    ledger = DeviceLedger(10)
    ledger.begin_load("a", 8)

    with pytest.raises(LedgerError, match="the KV of a need 3 slabs, 2 are free"):
        ledger.set_kv("a", 3)
    with pytest.raises(LedgerError, match="already on the device"):
        ledger.begin_load("a", 1)

    assert (ledger.free_slabs, ledger.kv, ledger.high_water_slabs) == (2, {}, 8)
