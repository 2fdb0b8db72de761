"""Elastic KV bookkeeping: geometry of groups, conservation of blocks, refusal without a trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.kvpool import KvGeometry, KvPool
from tests.unit.memory_double import RecordingVmm

geometries = st.builds(
    KvGeometry.plan,
    layers=st.integers(1, 4),
    layer_block_bytes=st.integers(1, 30),
    slab_bytes=st.just(10),
    pool_slabs=st.integers(1, 40),
    least_blocks=st.integers(0, 12),
)


@given(geometries)
def test_groups_hold_what_they_promise(geometry: KvGeometry) -> None:
    """Each usable group has at least `group_blocks` blocks, wholly within its own slabs."""
    extent = geometry.extent_slabs * geometry.slab_bytes
    for group in range(1, geometry.groups):
        blocks = geometry.blocks_of(group)
        assert len(blocks) >= geometry.group_blocks >= 1
        for block in blocks:
            start = block * geometry.layer_block_bytes
            assert group * extent <= start
            assert start + geometry.layer_block_bytes <= (group + 1) * extent
            assert geometry.group_of(block) == group
            assert 0 < block < geometry.blocks


@given(geometries)
def test_slots_of_groups_do_not_overlap(geometry: KvGeometry) -> None:
    """Groups share no slab, in any layer, and all lie within the range."""
    slots = [slot for group in range(geometry.groups) for slot in geometry.slots_of(group)]
    assert len(set(slots)) == len(slots) == geometry.groups * geometry.group_slabs
    assert min(slots) >= 0
    assert max(slots) < geometry.slots
    assert geometry.layer_bytes % geometry.slab_bytes == 0
    assert geometry.layer_bytes % geometry.layer_block_bytes == 0


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 40), st.integers(0, 12))
def test_addresses_outlast_the_pool(layers: int, block: int, slabs: int, least: int) -> None:
    """The range has room for the whole pool and a quarter more, and for the blocks asked for."""
    geometry = KvGeometry.plan(
        layers=layers, layer_block_bytes=block, slab_bytes=10, pool_slabs=slabs, least_blocks=least
    )
    usable = geometry.groups - 1
    assert usable * geometry.group_slabs >= 1.25 * slabs
    assert usable * geometry.group_blocks >= least


def test_block_larger_than_a_slab() -> None:
    """A layer-block of 15 bytes needs groups of three ten-byte slabs."""
    geometry = KvGeometry.plan(
        layers=2, layer_block_bytes=15, slab_bytes=10, pool_slabs=12, least_blocks=1
    )
    assert (geometry.extent_slabs, geometry.group_blocks, geometry.group_slabs) == (3, 2, 6)
    assert geometry.blocks_of(1) == range(2, 4)
    assert geometry.block_bytes == 30


class KvPoolMachine(RuleBasedStateMachine):
    """One pool over a real arena; a second owner takes slabs away and gives them back."""

    @initialize(geometry=geometries, slabs=st.integers(1, 40))
    def build(self, geometry: KvGeometry, slabs: int) -> None:
        self.arena = Arena(RecordingVmm(slabs))
        self.region = self.arena.reserve("kv", geometry.slots)
        self.other = self.arena.reserve("other", slabs)
        self.pool = KvPool(geometry, self.region)
        self.used: list[int] = []

    @rule(count=st.integers(0, 20), cap=st.integers(0, 40))
    def ensure(self, count: int, cap: int) -> None:
        before = self.state()
        mapped = self.pool.mapped_slabs
        try:
            self.pool.ensure(count, cap)
        except PoolExhausted:
            assert self.state() == before
            assert self.pool.free < count
        else:
            assert self.pool.free >= count
            assert self.pool.mapped_slabs <= max(cap, mapped)

    @rule(count=st.integers(0, 20))
    def take(self, count: int) -> None:
        before = self.state()
        if count > self.pool.free:
            with pytest.raises(PoolExhausted):
                self.pool.take(count)
            assert self.state() == before
        else:
            taken = self.pool.take(count)
            assert len(set(taken)) == count
            assert not set(taken) & set(self.used)
            self.used += taken

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        given_back = data.draw(st.sets(st.sampled_from(self.used)) if self.used else st.just(set()))
        self.pool.give(given_back)
        self.used = [block for block in self.used if block not in given_back]

    @rule()
    def trim(self) -> None:
        kept = self.pool.trim()
        groups = {self.pool.geometry.group_of(block) for block in self.used}
        assert kept == len(groups) * self.pool.geometry.group_slabs

    @rule(slot=st.integers(0, 39))
    def compete(self, slot: int) -> None:
        if slot >= self.other.slots:
            return
        try:
            self.other.map([slot])
        except ValueError:
            self.other.unmap([slot])
        except PoolExhausted:
            assert self.arena.free == 0

    def state(self) -> Any:
        return (self.arena.usage(), self.pool.free, self.pool.used, self.pool.mapped_slabs)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.arena.check_integrity()
        assert self.region.mapped == self.pool.mapped_slabs
        assert self.pool.used == len(self.used)


TestKvPoolMachine = KvPoolMachine.TestCase
TestKvPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def pool(slabs: int = 40) -> KvPool:
    """Two layers, two blocks per group of two slabs."""
    geometry = KvGeometry.plan(
        layers=2, layer_block_bytes=5, slab_bytes=10, pool_slabs=slabs, least_blocks=1
    )
    arena = Arena(RecordingVmm(slabs))
    return KvPool(geometry, arena.reserve("kv", geometry.slots))


def test_fullest_group_first() -> None:
    """New blocks fill a half-used group, so that the empty one can be given back."""
    blocks = pool()
    blocks.ensure(4, 40)
    first, second, third, fourth = blocks.take(4)
    blocks.give([first, second, fourth])

    (again,) = blocks.take(1)

    assert again == fourth
    assert blocks.geometry.group_of(third) == blocks.geometry.group_of(again)
    assert blocks.trim() == blocks.geometry.group_slabs


def test_wrong_blocks_are_refused() -> None:
    """A block can be given back once."""
    blocks = pool()
    blocks.ensure(1, 40)
    (block,) = blocks.take(1)
    blocks.give([block])
    with pytest.raises(ValueError, match="not in use"):
        blocks.give([block])


def test_addresses_run_out() -> None:
    """More blocks than there are addresses is exhaustion as well."""
    blocks = pool()
    with pytest.raises(PoolExhausted, match="beyond the address range"):
        blocks.ensure(10_000, 100_000)
    blocks.check_integrity()


def test_lost_blocks_are_noticed() -> None:
    """The integrity check can fail, for blocks and for groups."""
    blocks = pool()
    blocks.ensure(2, 40)
    blocks._free_count += 1
    with pytest.raises(AssertionError, match="block is lost"):
        blocks.check_integrity()
    blocks._free_count -= 1
    blocks._unmapped.pop()
    with pytest.raises(AssertionError, match="group is lost"):
        blocks.check_integrity()
