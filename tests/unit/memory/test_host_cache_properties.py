"""The host cache under any schedule: images come and go, workers die in mid-fill, KV takes room."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.memory.ledger import HostLedger
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import ModelSpec, Slo

SLAB = 100
LEAST_STEPS = 100_000
MODELS = tuple("abcdef")
INSTANCES = (0, 1)

steps = 0
fills_lost = 0
gave_way = 0


class HostCache(RuleBasedStateMachine):
    """A fake tier remembers who wrote each slab last; whoever reads must find its own."""

    @initialize(
        slabs=st.integers(4, 24),
        cluster=st.integers(0, 4),
        sizes=st.lists(st.integers(1, 6), min_size=6, max_size=6),
        pinned=st.sets(st.sampled_from(MODELS), max_size=2),
    )
    def open(self, slabs: int, cluster: int, sizes: list[int], pinned: set[str]) -> None:
        self.sizes = dict(zip(MODELS, sizes, strict=True))
        self.pinned = pinned
        self.cluster = cluster
        self.ledger = HostLedger(slabs * SLAB, SLAB, cluster)
        slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
        specs = {
            name: ModelSpec(
                name=name,
                weight_bytes=self.sizes[name] * SLAB,
                max_context_tokens=1,
                max_batch=1,
                slo=slo,
                pinned=name in pinned,
            )
            for name in MODELS
        }
        self.weight_cache = HostWeightCache(specs, self.ledger)
        self.tier: dict[int, str] = {}
        """slab offset -> whose bytes are there; "half a" while they are being written."""
        self.filling: dict[str, tuple[int, int]] = {}
        """model -> (the instance that writes, the version)."""
        self.doomed: set[str] = set()
        self.reading: dict[str, int] = {}
        """model -> the version of the image that an instance is loading from."""
        self.kv: list[tuple[int, ...]] = []
        self.now = 0.0

    @rule(model=st.sampled_from(MODELS), instance=st.sampled_from(INSTANCES), evict=st.booleans())
    def take(self, model: str, instance: int, evict: bool) -> None:
        if self.weight_cache.get(model) is not None:
            return
        global gave_way
        held = {m for m in MODELS if self.weight_cache.get(m) is not None}
        spared = set(self.reading) if evict else None
        self.now += 1
        master = self.weight_cache.take(model, self.sizes[model], instance, self.now, spared)
        gone = held - {m for m in MODELS if self.weight_cache.get(m) is not None}
        gave_way += len(gone)
        assert evict or not gone, "nothing goes unless it may"
        assert not gone & (self.pinned | set(self.reading) | set(self.filling))
        assert master is not None or not gone, "nothing goes in vain"
        if master is not None:
            assert len(master.offsets) == self.sizes[model]
            self.tier |= dict.fromkeys(master.offsets, f"half {model}")
            self.filling[model] = (instance, master.version)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.filling)))
        _, version = self.filling.pop(model)
        master = self.weight_cache.get(model)
        assert master is not None
        self.tier |= dict.fromkeys(master.offsets, model)
        self.weight_cache.filled(model, version)
        self.weight_cache.reap(self.reading)
        assert (self.weight_cache.get(model) is None) == (model in self.doomed)
        self.doomed.discard(model)

    @rule(instance=st.sampled_from(INSTANCES))
    def worker_dies(self, instance: int) -> None:
        """In the middle of whatever it was filling."""
        global fills_lost
        lost = {model for model, (filler, _) in self.filling.items() if filler == instance}
        self.weight_cache.lost(instance)
        for model in lost:
            fills_lost += 1
            del self.filling[model]
            self.doomed.discard(model)
            assert self.weight_cache.get(model) is None, "half an image is none"

    @rule(model=st.sampled_from(MODELS))
    def begin_load(self, model: str) -> None:
        master = self.weight_cache.get(model)
        if master is not None and master.filler is None and model not in self.doomed:
            self.reading[model] = master.version
            self.now += 1
            self.weight_cache.touch(model, self.now)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.reading)))
        version = self.reading.pop(model)
        master = self.weight_cache.get(model)
        assert master is not None, "an image goes while it is being read"
        assert master.version == version, "another image is where one was being read"
        assert {self.tier[offset] for offset in master.offsets} == {model}
        self.weight_cache.reap(self.reading)
        assert (self.weight_cache.get(model) is None) == (model in self.doomed)
        self.doomed.discard(model)

    @rule(model=st.sampled_from(MODELS), instance=st.sampled_from(INSTANCES))
    def give_up(self, model: str, instance: int) -> None:
        """An instance cannot read its files; what another one writes, or somebody reads, is kept
        until that is done."""
        self.weight_cache.give_up(model, instance)
        self.weight_cache.reap(self.reading)
        written = model in self.filling and self.filling[model][0] != instance
        if written or model in self.reading:
            assert self.weight_cache.get(model) is not None
            self.doomed.add(model)
        else:
            self.filling.pop(model, None)
            self.doomed.discard(model)
            assert self.weight_cache.get(model) is None

    @rule(size=st.sampled_from([30, 100, 250]), count=st.integers(1, 6))
    def take_kv(self, size: int, count: int) -> None:
        offsets = self.ledger.take_blocks(size, count)
        if offsets is not None:
            for offset in offsets:
                first, last = offset // SLAB, (offset + size - 1) // SLAB
                self.tier |= {slab * SLAB: "kv" for slab in range(first, last + 1)}
            self.kv.append(offsets)

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def give_kv(self, data: st.DataObject) -> None:
        self.ledger.give_blocks(self.kv.pop(data.draw(st.integers(0, len(self.kv) - 1))))

    @invariant()
    def whole_images_are_whole(self) -> None:
        global steps
        steps += 1
        if not hasattr(self, "weight_cache"):
            return
        self.ledger.check_integrity()
        for model in MODELS:
            master = self.weight_cache.get(model)
            if master is not None:
                wanted = model if master.filler is None else f"half {model}"
                assert {self.tier[offset] for offset in master.offsets} == {wanted}
        assert self.ledger.weight_slabs <= max(0, self.ledger.total_slabs - self.cluster)


@pytest.mark.thorough
def test_images_under_any_schedule() -> None:
    """No image is overwritten, read before it is whole, or gone while it is read; none leaks."""
    run_state_machine_as_test(
        HostCache,
        settings=settings(
            # Hypothesis draws from the constants of all code that is loaded: how many steps these
            # are depends on what ran before in this process.
            max_examples=3000,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert steps >= LEAST_STEPS
    assert min(fills_lost, gave_way) >= 100, "the rare things happened, too"
