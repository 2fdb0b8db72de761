"""Runtime memory: within what was set aside for it, and no further."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.runtime import RuntimeMemory
from appliance.memory.vmm_host import HostVmm

SLAB = 4096


def test_memory_is_taken_and_given_back() -> None:
    """Whole slabs, that can be written to; what is given back can be taken again."""
    arena = Arena(HostVmm(8, SLAB))
    runtime = RuntimeMemory(arena, 3)

    first = runtime.take(SLAB + 1)
    arena.vmm.copy(first + SLAB, first, SLAB)

    assert runtime.used == 2
    assert arena.usage() == {"runtime": 2, "free": 6}
    with pytest.raises(PoolExhausted, match=r"2 of 3 are in use; set devices\.runtime to more"):
        runtime.take(2 * SLAB)
    runtime.give(first)
    assert (runtime.used, arena.free) == (0, 8)
    assert runtime.take(3 * SLAB)


def test_slabs_mapped_elsewhere_count() -> None:
    """What an engine keeps for its life is of the same budget."""
    runtime = RuntimeMemory(Arena(HostVmm(8, SLAB)), 2)

    runtime.charge(1)

    with pytest.raises(PoolExhausted):
        runtime.take(2 * SLAB)
    with pytest.raises(PoolExhausted):
        runtime.charge(2)
    assert runtime.used == 1
    runtime.discharge(1)
    assert runtime.take(2 * SLAB)


def test_a_pool_that_others_emptied_leaves_no_trace() -> None:
    """Refused by the pool itself: nothing is counted, and no range stays reserved."""
    arena = Arena(HostVmm(4, SLAB))
    others = arena.reserve("others", 4)
    others.map(range(4))
    runtime = RuntimeMemory(arena, 2)

    with pytest.raises(PoolExhausted):
        runtime.take(SLAB)

    assert runtime.used == 0
    others.unmap(range(4))
    assert arena.usage() == {"others": 0, "free": 4}


def test_what_was_never_given_out_cannot_come_back() -> None:
    """A stranger's address, or one that came back before, is a defect."""
    runtime = RuntimeMemory(Arena(HostVmm(4, SLAB)), 2)
    address = runtime.take(1)
    runtime.give(address)

    with pytest.raises(ValueError, match="is no runtime memory"):
        runtime.give(address)


@given(st.lists(st.integers(min_value=1, max_value=5 * SLAB), max_size=30), st.randoms())
def test_the_books_balance(sizes: list[int], dice: object) -> None:
    """Whatever is taken and given back in whatever order, used slabs are mapped slabs."""
    vmm = HostVmm(8, SLAB)
    arena = Arena(vmm)
    runtime = RuntimeMemory(arena, 6)
    held: list[int] = []
    for size in sizes:
        try:
            held.append(runtime.take(size))
        except PoolExhausted:
            assert runtime.used + -(-size // SLAB) > 6
            dice.shuffle(held)  # type: ignore[attr-defined]
            while held:
                runtime.give(held.pop())
        assert arena.usage().get("runtime", 0) == runtime.used <= 6
        arena.check_integrity()
    for address in held:
        runtime.give(address)
    assert runtime.used == 0
    vmm.close()
