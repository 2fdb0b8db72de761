"""Elastic KV bookkeeping: geometry of groups, conservation of blocks, refusal without a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.kv_pool import BLOCK_TOKENS, KvGeometry, KvPool
from tests.unit.doubles.memory import RecordingVmm

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


SERVED = {
    # layers, KV heads, bytes of a head
    "Llama 2 7B": (32, 32, 128),
    "Llama 2 13B": (40, 40, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Llama 3.1 70B": (80, 8, 128),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.2 3B": (28, 8, 128),
    "Qwen2.5 0.5B": (24, 2, 64),
    "Qwen2.5 1.5B": (28, 2, 128),
    "Qwen2.5 3B": (36, 2, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "Qwen2.5 14B": (48, 8, 128),
    "Qwen2.5 32B": (64, 8, 128),
    "Qwen2.5 72B": (80, 8, 128),
    "Qwen3 0.6B": (28, 8, 128),
    "Qwen3 4B": (36, 8, 128),
    "Qwen3 8B": (36, 8, 128),
    "Qwen3 14B": (40, 8, 128),
    "Qwen3 32B": (64, 8, 128),
    "Qwen3 30B-A3B": (48, 4, 128),
    "Qwen3 235B-A22B": (94, 4, 128),
    "Mistral 7B": (32, 8, 128),
    "Mistral Nemo 12B": (40, 8, 128),
    "Mixtral 8x7B": (32, 8, 128),
    "Gemma 2 2B": (26, 4, 256),
    "Gemma 2 9B": (42, 8, 256),
    "Gemma 3 4B": (34, 4, 256),
    "Gemma 3 12B": (48, 8, 256),
    "Gemma 3 27B": (62, 16, 128),
    "Phi-3 mini": (32, 32, 96),
    "Phi-4": (40, 10, 128),
    "gpt-oss 20B": (24, 8, 64),
    "gpt-oss 120B": (36, 8, 64),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("slab_mib", [2, 4, 16])
def test_groups_of_a_gpu_waste_little(name: str, slab_mib: int) -> None:
    """A block of 32 tokens in bfloat16, all layers of which lie side by side: up to 63 % of the
    smallest groups was never used."""
    layers, heads, size = SERVED[name]
    geometry = KvGeometry.plan(
        layers=1,
        layer_block_bytes=layers * 2 * heads * size * 2 * 32,
        slab_bytes=slab_mib << 20,
        pool_slabs=(64 << 10) // slab_mib,
        least_blocks=64,
    )
    used = geometry.group_blocks * geometry.block_bytes
    assert used >= 0.95 * geometry.group_slabs * geometry.slab_bytes
    assert geometry.extent_slabs <= 64


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("number_bytes", [2, 4])
@pytest.mark.parametrize("pool_gib", [1, 4, 16, 64])
def test_groups_of_a_host_waste_little(name: str, number_bytes: int, pool_gib: int) -> None:
    """As on a GPU, where a group is a small part of the pool: up to 38 % of the smallest groups was
    never used. In a small pool, groups stay as small as they can."""
    layers, heads, size = SERVED[name]
    geometry = KvGeometry.plan(
        layers=layers,
        layer_block_bytes=2 * heads * size * number_bytes * BLOCK_TOKENS,
        slab_bytes=2 << 20,
        pool_slabs=pool_gib << 9,
        least_blocks=64,
    )
    used = geometry.group_blocks * geometry.block_bytes
    held = geometry.group_slabs * geometry.slab_bytes
    if pool_gib >= 16:
        assert used >= 0.95 * held
    assert held <= max((pool_gib << 30) // 32, 2 * layers * geometry.slab_bytes)


def test_the_null_block_takes_no_more_than_it_needs() -> None:
    """Its group is larger: 7 slabs of 10 bytes hold two of its blocks of 35."""
    geometry = KvGeometry.plan(
        layers=1, layer_block_bytes=35, slab_bytes=10, pool_slabs=224, least_blocks=1
    )
    assert (geometry.group_slabs, geometry.group_blocks) == (7, 2)
    assert geometry.null_slots() == [0, 1, 2, 3]


def test_block_larger_than_a_slab() -> None:
    """A layer-block of 15 bytes needs groups of three ten-byte slabs."""
    geometry = KvGeometry.plan(
        layers=2, layer_block_bytes=15, slab_bytes=10, pool_slabs=12, least_blocks=1
    )
    assert (geometry.extent_slabs, geometry.group_blocks, geometry.group_slabs) == (3, 2, 6)
    assert geometry.blocks_of(1) == range(2, 4)
    assert geometry.block_bytes == 30


small_geometries = st.builds(
    KvGeometry.plan,
    layers=st.integers(1, 2),
    layer_block_bytes=st.integers(2, 12),
    slab_bytes=st.just(10),
    pool_slabs=st.integers(8, 30),
    least_blocks=st.just(1),
)
caps = st.sampled_from((30, 30, 18, 12, 8, 4))


class KvPoolMachine(RuleBasedStateMachine):
    """One pool over a real arena, whose owner remembers what it believes of every block.

    A second owner takes slabs away and gives them back, and the system refuses to map at times.
    """

    steps = 0
    events: ClassVar[Counter[str]] = Counter()

    @initialize(geometry=small_geometries, slabs=st.integers(8, 30))
    def build(self, geometry: KvGeometry, slabs: int) -> None:
        self.vmm = RecordingVmm(slabs)
        # No thread unmaps: what the system refuses would depend on how far it has come.
        self.arena = Arena(self.vmm, at_once_slabs=slabs)
        self.region = self.arena.reserve("kv", geometry.slots)
        self.other = self.arena.reserve("other", slabs)
        self.geometry = geometry
        self.pool = KvPool(geometry, self.region)
        self.used: list[int] = []
        self.cold: list[int] = []  # coldest first
        self.peak = 0

    @rule(count=st.integers(0, 12), cap=caps, fail_after=st.integers(-4, 4))
    def ensure(self, count: int, cap: int, fail_after: int) -> None:
        before, free = self.state(), self.pool.free
        groups = set(self.pool._groups)
        mappable = self.mappable(cap)
        most = free + len(self.cold) + self.blocks_in(mappable)
        self.vmm.fail_after = fail_after if fail_after >= 0 else None
        try:
            lost = self.pool.ensure(count, cap)
        except PoolExhausted:
            assert most < count
            assert self.state() == before
            self.events["exhausted"] += 1
        except OSError:
            assert self.state() == before
            self.events["refused by the system"] += 1
        else:
            assert most >= count
            new = set(self.pool._groups) - groups
            assert new == set(mappable[: len(new)])
            assert len(lost) == max(0, count - free - self.blocks_in(new))
            assert not lost or len(new) == len(mappable)
            assert lost == self.cold[: len(lost)]
            self.cold = self.cold[len(lost) :]
            assert self.pool.free >= count
            self.events["cold taken"] += bool(lost)
            self.events["mapped and cold taken"] += bool(lost and new)
        finally:
            self.vmm.fail_after = None

    @rule(count=st.integers(1, 6), cap=caps)
    def grow(self, count: int, cap: int) -> None:
        """What a step does."""
        self.ensure(count, cap, -1)
        if self.pool.free >= count:
            self.take(count)

    @precondition(lambda self: self.pool.mapped_slabs)
    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        before = self.state()
        if count > self.pool.free:
            with pytest.raises(PoolExhausted):
                self.pool.take(count)
            assert self.state() == before
            return
        if count:
            least = min(self.idle(number) for number, g in self.pool._groups.items() if g.free)
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & {*self.used, *self.cold}
        if count:
            first = self.geometry.group_of(taken[0])
            here = sum(self.geometry.group_of(block) == first for block in taken)
            assert self.idle(first) + here == least
        self.used += taken

    @precondition(lambda self: self.used)
    @rule(
        start=st.integers(0, 40),
        count=st.sampled_from((1, 3, 10, 40)),
        keep=st.sampled_from((True, True, False)),
    )
    def give(self, start: int, count: int, keep: bool) -> None:
        start %= len(self.used)
        given = self.used[start : start + count]
        self.pool.give(given, keep=keep)
        del self.used[start : start + count]
        if keep:
            self.cold += given

    @precondition(lambda self: self.cold)
    @rule(which=st.integers(0, 40))
    def revive(self, which: int) -> None:
        block = self.cold.pop(which % len(self.cold))
        self.pool.revive(block)
        self.used.append(block)

    @precondition(lambda self: self.pool.mapped_slabs)
    @rule(keep_slabs=st.none() | caps)
    def trim(self, keep_slabs: int | None) -> None:
        warmth = {self.geometry.group_of(block): age for age, block in enumerate(self.cold)}
        busy = self.groups_of(self.used)
        cold = sorted(self.groups_of(self.cold) - busy, key=lambda group: warmth[group])
        if keep_slabs is not None:
            while cold and (len(busy) + len(cold)) * self.geometry.group_slabs > keep_slabs:
                del cold[0]

        lost = self.pool.trim(keep_slabs)

        assert set(self.pool._groups) == busy | set(cold)
        kept = [b for b in self.cold if self.geometry.group_of(b) in self.pool._groups]
        assert sorted(lost) == sorted(set(self.cold) - set(kept))
        self.events["cold trimmed"] += bool(lost)
        self.events["some cold trimmed"] += bool(lost and cold)
        self.cold = kept

    @rule(first=st.integers(0, 9), last=st.integers(0, 9))
    def compete(self, first: int, last: int) -> None:
        mine = set(self.other._slabs)
        self.other.unmap(mine)
        wanted = range(first, min(last, self.other.slots))
        if len(wanted) <= self.arena.free:
            self.other.map(wanted)

    def mappable(self, cap: int) -> list[int]:
        """The groups that could be mapped, in the order in which they would be."""
        slabs = min(cap - self.pool.mapped_slabs, self.arena.free)
        unmapped = sorted(set(range(1, self.geometry.groups)) - set(self.pool._groups))
        return unmapped[: max(0, slabs // self.geometry.group_slabs)]

    def blocks_in(self, groups: Iterable[int]) -> int:
        return sum(len(self.geometry.blocks_of(group)) for group in groups)

    def groups_of(self, blocks: Iterable[int]) -> set[int]:
        return {self.geometry.group_of(block) for block in blocks}

    def idle(self, group: int) -> int:
        """Blocks of a group that nobody uses."""
        return sum(block not in self.pool._used for block in self.geometry.blocks_of(group))

    def state(self) -> Any:
        return (
            self.arena.usage(),
            self.pool.free,
            self.pool.used,
            list(self.pool._cold),
            sorted(self.pool._groups),
            sorted(self.pool._unmapped),
        )

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        KvPoolMachine.steps += 1
        self.pool.check_integrity()
        self.arena.check_integrity()
        assert self.pool._used == set(self.used)
        assert list(self.pool._cold) == self.cold
        assert self.pool.free + len(self.used) + len(self.cold) == self.blocks_in(self.pool._groups)
        assert self.region.mapped == self.pool.mapped_slabs
        cold_only = self.groups_of(self.cold) - self.groups_of(self.used)
        assert self.pool.cold_slabs == len(cold_only) * self.geometry.group_slabs
        self.peak = max(self.peak, self.pool.mapped_bytes)
        assert self.pool.peak_mapped_bytes == self.peak
        assert self.pool.held_bytes <= self.pool.mapped_bytes <= self.peak


@pytest.mark.thorough
def test_random_histories() -> None:
    """Whatever is asked, and whatever fails: no block is lost, none is in two states, and no
    content is dropped without its owner being told. Over tens of thousands of steps."""
    KvPoolMachine.steps = 0
    KvPoolMachine.events.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        KvPoolMachine,
        settings=settings(
            max_examples=450,
            stateful_step_count=100,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert KvPoolMachine.steps >= 30_000
    # What is rare must not be absent. Hypothesis draws numbers from constants in the code that is
    # loaded, too, so any change of that moves these counts; they were from 18 up.
    assert min(KvPoolMachine.events.values()) >= 5, KvPoolMachine.events


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
    assert blocks.trim() == []
    assert blocks.mapped_slabs == blocks.geometry.group_slabs


def test_cold_is_what_goes_first() -> None:
    """Without room for another group, the coldest blocks are taken, and named."""
    blocks = pool(slabs=4)
    blocks.ensure(4, 4)
    first, second, third, fourth = blocks.take(4)
    blocks.give([third, first], keep=True)
    blocks.give([second], keep=True)

    assert blocks.ensure(2, 4) == [third, first]
    assert set(blocks.take(2)) == {third, first}
    assert blocks.cold == 1
    with pytest.raises(PoolExhausted, match="1 blocks too few: 4 slabs are allowed"):
        blocks.ensure(2, 4)
    assert blocks.ensure(1, 4) == [second]
    assert blocks.used == 3
    assert fourth not in blocks.take(1)


def test_cold_stays_while_there_are_slabs() -> None:
    """As long as groups can be mapped, nothing that was kept is lost."""
    blocks = pool()
    blocks.ensure(2, 40)
    blocks.give(blocks.take(2), keep=True)

    assert blocks.ensure(2, 4) == []
    assert (blocks.cold, blocks.free, blocks.cold_slabs) == (2, 2, 2)


def test_cold_groups_go_on_demand() -> None:
    """A trim keeps the warmest groups, and never one that has a used block."""
    blocks = pool()
    blocks.ensure(6, 40)
    taken = blocks.take(6)
    pairs = [taken[:2], taken[2:4], taken[4:]]
    blocks.give([pairs[0][0]], keep=True)
    blocks.give(pairs[1], keep=True)
    blocks.give([pairs[0][1]], keep=True)
    blocks.give([pairs[2][0]], keep=True)

    assert blocks.trim() == []
    assert blocks.mapped_slabs == 6
    assert blocks.cold_slabs == 4
    assert sorted(blocks.trim(4)) == sorted(pairs[1])
    assert sorted(blocks.trim(0)) == sorted(pairs[0])
    assert (blocks.mapped_slabs, blocks.cold_slabs, blocks.cold, blocks.used) == (2, 0, 1, 1)
    blocks.revive(pairs[2][0])
    assert blocks.used == 2


def test_fragmentation_can_be_reckoned() -> None:
    """One block of a group of two is in use, one is cold, and twice as much was mapped once."""
    blocks = pool()
    blocks.ensure(4, 40)
    taken = blocks.take(4)
    blocks.give(taken[1:])
    blocks.trim()
    assert (blocks.mapped_bytes, blocks.held_bytes, blocks.peak_mapped_bytes) == (20, 10, 40)

    blocks.give(blocks.take(1), keep=True)

    assert (blocks.mapped_bytes, blocks.held_bytes) == (20, 20)


def test_wrong_blocks_are_refused() -> None:
    """A block can be given back once, and only a cold one can be revived."""
    blocks = pool()
    blocks.ensure(1, 40)
    (block,) = blocks.take(1)
    with pytest.raises(ValueError, match="not cold"):
        blocks.revive(block)
    blocks.give([block])
    with pytest.raises(ValueError, match="not in use"):
        blocks.give([block])
    with pytest.raises(ValueError, match="not cold"):
        blocks.revive(block)


def test_addresses_run_out() -> None:
    """More blocks than there are addresses is exhaustion as well."""
    blocks = pool()
    with pytest.raises(PoolExhausted, match="no address is left"):
        blocks.ensure(10_000, 100_000)
    blocks.check_integrity()


def break_free_count(blocks: KvPool) -> None:
    blocks._free_count += 1


def break_unmapped(blocks: KvPool) -> None:
    blocks._unmapped.pop()


def break_state(blocks: KvPool) -> None:
    blocks._cold[next(iter(blocks._used))] = None


def break_count(blocks: KvPool) -> None:
    next(iter(blocks._groups.values())).cold += 1


def break_empty(blocks: KvPool) -> None:
    blocks._empty.add(next(iter(blocks._groups)))


def break_shelf(blocks: KvPool) -> None:
    next(shelf for shelf in blocks._shelves if shelf).clear()


def break_mask(blocks: KvPool) -> None:
    blocks._shelf_mask = 0


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (break_free_count, "blocks are free"),
        (break_unmapped, "group is lost"),
        (break_state, "block is lost"),
        (break_count, "counts its blocks wrong"),
        (break_empty, "wrongly taken"),
        (break_shelf, "not on its shelf"),
        (break_mask, "mask"),
    ],
)
def test_damage_is_noticed(damage: Callable[[KvPool], None], complaint: str) -> None:
    """The integrity check can fail, for all that it looks at."""
    blocks = pool()
    blocks.ensure(2, 40)
    blocks.take(1)
    blocks.check_integrity()
    damage(blocks)
    with pytest.raises(AssertionError, match=complaint):
        blocks.check_integrity()
