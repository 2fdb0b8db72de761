"""State machines of the memory room, 10^5 steps each: slabs, transfer rules, ledgers.

Some of them run a second time with a rule broken, to show that a violation would be seen.
"""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.memory import mapping
from appliance.memory.arena import POISON, Arena, PoolExhausted, Region
from appliance.memory.hazards import TransferBook, TransferWaits
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.vmm_host import HostVmm
from tests.unit.memory.test_ledger import DeviceBooks, HostBooks

STEPS = 100_000
SETTINGS = settings(
    # More than the steps need: Hypothesis draws from the constants of all code that is loaded, so
    # how long the walks are depends on what ran before in this process.
    max_examples=1500,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

taken: Counter[type[RuleBasedStateMachine]] = Counter()


class Counted(RuleBasedStateMachine):
    """Counts the steps taken by all machines of a class."""

    def __init__(self) -> None:
        super().__init__()
        # Invariants are checked once before the first step.
        taken[type(self)] -= 1

    @invariant()
    def one_more_step(self) -> None:
        taken[type(self)] += 1


def walk(machine: type[RuleBasedStateMachine]) -> None:
    """Run a machine, and make sure that it took as many steps as this file promises."""
    taken[machine] = 0
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert taken[machine] >= STEPS


PAGE = mmap.PAGESIZE
SLABS = 10
SLOTS = 7


class UnreliableVmm(HostVmm):
    """Real memory; refuses to map anything at the address `refused`.

    It does not count calls: how many there are for some slots depends on which slabs are free, and
    so on how far the thread that unmaps what was vacated has come.
    """

    refused: int | None = None

    def map(self, address: int, slab: int, count: int = 1) -> None:
        if self.refused is not None and 0 <= self.refused - address < count * PAGE:
            raise OSError(errno.ENOMEM, "ENOMEM")
        super().map(address, slab, count)


class SlabPool(Counted):
    """An arena over real pages. What was written under one address is seen there and only there."""

    def __init__(self) -> None:
        super().__init__()
        self.vmm = UnreliableVmm(SLABS, PAGE)
        self.arena = Arena(self.vmm, poison=True, at_once_slabs=2)
        self.regions: list[Region] = []
        self.content: list[dict[int, int]] = []  # per region: what every mapped slot holds
        self.most = 0

    def pick(self, number: int) -> tuple[Region, dict[int, int]]:
        index = number % len(self.regions)
        return self.regions[index], self.content[index]

    @precondition(lambda self: len(self.regions) < 4)
    @rule(owner=st.sampled_from("ab"))
    def reserve(self, owner: str) -> None:
        self.regions.append(self.arena.reserve(owner, SLOTS))
        self.content.append({})

    @precondition(lambda self: self.regions)
    @rule(
        number=st.integers(0, 3),
        slots=st.integers(0, 2**SLOTS),  # a set of slots; 2**SLOTS itself is one that is none
        refused=st.sampled_from([None, None, 0, 1, 2, 3]),  # which of the slots, if it has so many
    )
    def map(self, number: int, slots: int, refused: int | None) -> None:
        region, content = self.pick(number)
        wanted = [slot for slot in range(SLOTS + 1) if slots >> slot & 1]
        legal = max(wanted, default=0) < SLOTS and not content.keys() & set(wanted)
        if refused is not None and refused < len(wanted):
            self.vmm.refused = region.slot_address(wanted[refused])
        try:
            region.map(wanted)
        except OSError:
            assert self.vmm.refused is not None
            assert legal
        except ValueError:
            assert not legal
        except PoolExhausted:
            assert legal
            assert len(wanted) > SLABS - self.held
        else:
            assert legal
            assert self.vmm.refused is None
            content.update(dict.fromkeys(wanted, POISON))
            self.most = max(self.most, self.held)
        self.vmm.refused = None

    @precondition(lambda self: any(self.content))
    @rule(number=st.integers(0, 99), value=st.integers(0, 254))
    def write(self, number: int, value: int) -> None:
        places = [
            (r, c, slot) for r, c in zip(self.regions, self.content, strict=True) for slot in c
        ]
        region, content, slot = places[number % len(places)]
        content[slot] = value
        mapping.view(region.slot_address(slot), PAGE)[:] = bytes([value]) * PAGE

    @precondition(lambda self: self.regions)
    @rule(
        number=st.integers(0, 3),
        slots=st.integers(0, 2**SLOTS),
        held=st.booleans(),
        later=st.booleans(),
    )
    def unmap(self, number: int, slots: int, held: bool, later: bool) -> None:
        region, content = self.pick(number)
        give_back = region.vacate if later else region.unmap
        chosen = [slot for slot in range(SLOTS + 1) if slots >> slot & 1]
        if held:
            chosen = [slot for slot in chosen if slot in content]
        if content.keys() >= set(chosen):
            give_back(chosen)
            for slot in chosen:
                del content[slot]
        else:
            with pytest.raises(ValueError, match="has no slab"):
                give_back(chosen)

    @precondition(lambda self: len(self.regions) > 2)
    @rule(number=st.integers(0, 3))
    def release(self, number: int) -> None:
        index = number % len(self.regions)
        self.regions.pop(index).release()
        del self.content[index]

    @property
    def held(self) -> int:
        return sum(map(len, self.content))

    @invariant()
    def nothing_lost_and_nothing_twice(self) -> None:
        self.arena.check_integrity()
        assert self.arena.free == SLABS - self.held
        assert self.arena.high_water == self.most
        for region, content in zip(self.regions, self.content, strict=True):
            assert region.mapped == len(content)
            for slot, value in content.items():
                seen = mapping.view(region.slot_address(slot), PAGE)
                assert seen[0] == seen[PAGE - 1] == value

    def teardown(self) -> None:
        for region in self.regions:
            region.release()
        assert self.arena.free == SLABS
        self.vmm.close()


@pytest.mark.thorough
def test_slabs_under_any_schedule() -> None:
    """No slab in two places, none lost, no change by a refusal, poison until it is written."""
    walk(SlabPool)


class Violation(AssertionError):
    """Bytes that had not landed were read, or bytes that were still being read overwritten."""


class TransferRules(Counted):
    """The book's orders, carried out in any order they allow, over cells that hold versions.

    A cell is worth reading only while it holds the version that was the last to be started before
    the reader was: that is what doing one transfer after the other would give. Being written, or
    after a failure, it is poisoned. Transfers run without the order of a stream: it may only help.
    """

    POISONED: ClassVar[int] = -1
    PLACES: ClassVar[int] = 5
    makes_book: ClassVar[type[TransferBook]] = TransferBook
    cancelled_waits: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.book = self.makes_book()
        self.cells = [0] * self.PLACES
        self.latest = [0] * self.PLACES  # version of the last transfer started to write it
        self.spoilt: set[int] = set()  # places whose owner knows that nothing is in them
        self.version = 0
        self.inside: list[Transfer] = []  # in the book, in the order of entry
        self.orders: dict[Transfer, TransferWaits] = {}
        self.reads: dict[Transfer, dict[int, int]] = {}  # place -> version that is to be read
        self.writes: dict[Transfer, dict[int, int]] = {}  # place -> version that it makes

    @precondition(lambda self: len(self.inside) < 12)
    @rule(reads=st.integers(0, 2**5 - 1), writes=st.integers(0, 2**5 - 1))
    def start(self, reads: int, writes: int) -> None:
        transfer = Transfer(TransferKind.KV_IN, "a", 0, 0.0)
        self.version += 1
        sources = [p for p in range(self.PLACES) if reads >> p & 1 and p not in self.spoilt]
        targets = [p for p in range(self.PLACES) if writes >> p & 1]
        self.reads[transfer] = {place: self.latest[place] for place in sources}
        self.writes[transfer] = dict.fromkeys(targets, self.version)
        for place in targets:
            self.latest[place] = self.version
            self.spoilt.discard(place)
        self.orders[transfer] = self.book.enter(transfer, sources, targets)
        self.inside.append(transfer)

    @precondition(lambda self: self.waiting())
    @rule(number=st.integers(0, 11))
    def begin(self, number: int) -> None:
        ready = [transfer for transfer in self.waiting() if self.ready(transfer)]
        if ready:
            self.begin_one(ready[number % len(ready)])

    @precondition(lambda self: self.moving())
    @rule(number=st.integers(0, 11), fails=st.sampled_from([False, False, False, True]))
    def end(self, number: int, fails: bool) -> None:
        moving = self.moving()
        self.end_one(moving[number % len(moving)], fails)

    @precondition(lambda self: self.inside)
    @rule(number=st.integers(0, 11))
    def cancel(self, number: int) -> None:
        self.inside[number % len(self.inside)].cancel()

    @precondition(lambda self: any(transfer.done for transfer in self.inside))
    @rule(number=st.integers(0, 11))
    def reap(self, number: int) -> None:
        ended = [transfer for transfer in self.inside if transfer.done]
        self.reap_one(ended[number % len(ended)])

    @rule(place=st.integers(0, 4))
    def compute(self, place: int) -> None:
        """The owner of a place that no transfer uses writes it; the book hears nothing of it."""
        if not any(place in self.reads[t] or place in self.writes[t] for t in self.inside):
            self.version += 1
            self.cells[place] = self.latest[place] = self.version
            self.spoilt.discard(place)

    def waiting(self) -> list[Transfer]:
        return [
            transfer for transfer in self.inside if not transfer.done and transfer.began is None
        ]

    def moving(self) -> list[Transfer]:
        return [t for t in self.inside if not t.done and t.began is not None]

    def ready(self, transfer: Transfer) -> bool:
        if transfer.cancelled and not self.cancelled_waits:
            return True
        order = self.orders[transfer]
        return all(earlier.done for earlier in (*order.needs, *order.after))

    def begin_one(self, transfer: Transfer) -> None:
        order = self.orders[transfer]
        if transfer.cancelled:
            transfer.fail(TransferCancelled("cancelled"), 1.0)
        elif any(earlier.error is not None for earlier in order.needs):
            transfer.fail(TransferFailed("what it reads failed"), 1.0)
        else:
            transfer.begin(1.0)
            for place, version in self.reads[transfer].items():
                if self.cells[place] == self.POISONED:
                    raise Violation(f"place {place} is read, and poisoned")
                if self.cells[place] != version:
                    raise Violation(f"place {place} is read, and not what it should be")
            for place in self.writes[transfer]:
                self.cells[place] = self.POISONED

    def end_one(self, transfer: Transfer, fails: bool) -> None:
        own = self.writes[transfer]
        for place, version in self.reads[transfer].items():
            if place not in own and self.cells[place] != version:
                raise Violation(f"place {place} was overwritten while it was read")
        if any(self.cells[place] != self.POISONED for place in own):
            raise Violation("two transfers wrote one place at the same time")
        if transfer.cancelled or fails:
            transfer.fail(OSError("injected"), 2.0)
            return
        for place, version in own.items():
            self.cells[place] = version
        transfer.finish(2.0)

    def reap_one(self, transfer: Transfer) -> None:
        self.book.leave(transfer)
        self.inside.remove(transfer)
        del self.orders[transfer], self.reads[transfer]
        for place, version in self.writes.pop(transfer).items():
            if transfer.error is not None and self.latest[place] == version:
                self.spoilt.add(place)

    @invariant()
    def never_stuck(self) -> None:
        """The transfer that was started first can always go on, in any stream's order, too."""
        oldest = next((transfer for transfer in self.inside if not transfer.done), None)
        assert oldest is None or oldest.began is not None or self.ready(oldest)

    @invariant()
    def the_book_is_no_larger_than_it_must_be(self) -> None:
        self.book.check_integrity()
        assert len(self.book) == len(self.inside)

    def teardown(self) -> None:
        while unfinished := [transfer for transfer in self.inside if not transfer.done]:
            transfer = unfinished[0]
            if transfer.began is None:
                self.begin_one(transfer)
            else:
                self.end_one(transfer, fails=False)
        for transfer in list(self.inside):
            self.reap_one(transfer)
        for place, version in enumerate(self.latest):
            if place not in self.spoilt and self.cells[place] != version:
                raise Violation(f"place {place} does not hold what was written last")
        assert len(self.book) == 0
        assert not self.book._uses


@pytest.mark.thorough
def test_transfers_under_any_schedule() -> None:
    """No read of what has not landed, no overwriting of what is read, nothing stuck or leaked."""
    walk(TransferRules)


class WithoutRule2(TransferBook):
    """Reads what another transfer is still bringing."""

    def enter(self, *arguments: object) -> TransferWaits:
        return super().enter(*arguments)._replace(needs=())  # type: ignore[arg-type]


class WithoutRule3(TransferBook):
    """Overwrites what another transfer still reads or writes."""

    def enter(self, *arguments: object) -> TransferWaits:
        return super().enter(*arguments)._replace(after=())  # type: ignore[arg-type]


class ReadsUnfinished(TransferRules):
    makes_book = WithoutRule2


class OverwritesReaders(TransferRules):
    makes_book = WithoutRule3


class CancelledLeavesEarly(TransferRules):
    cancelled_waits = False


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [ReadsUnfinished, OverwritesReaders, CancelledLeavesEarly])
def test_a_broken_rule_is_detected(machine: type[TransferRules]) -> None:
    """The same walk finds the violation if the book, or whoever follows it, is wrong."""
    found = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(Violation, match=r"is read, and|while it was read|at the same time"):
        run_state_machine_as_test(machine, settings=found)


class CountedDeviceBooks(DeviceBooks, Counted):
    pass


class CountedHostBooks(HostBooks, Counted):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [CountedDeviceBooks, CountedHostBooks])
def test_ledgers_under_any_schedule(machine: type[RuleBasedStateMachine]) -> None:
    """Free, held and in flight are the whole at all times, and no place has two owners."""
    walk(machine)
