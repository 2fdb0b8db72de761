"""Prefixes that were computed once are found again, and never after their memory was taken away.

The arena of these tests is poisoned: a slab holds NaN whenever it is mapped anew.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.engines.protocol import KvExhausted, KvUse, Produced
from appliance.memory.vmm_host import HostVmm
from tests.engine.house import POOL_SLABS, SLAB, VOCAB, Baseline, House, Sampling, sequence, tokens

MODEL = "llama-96"
OTHER = "qwen2-gqa"
BLOCK = 32
PLENTY = 60

GREEDY = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=20, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True)
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


class PoisonVmm(HostVmm):
    """Fills a slab with 0xFF, NaN in any type, when it is taken away from an address."""

    def unmap(self, address: int, count: int = 1) -> None:
        ctypes.memset(address, 0xFF, count * self.slab_bytes)
        super().unmap(address, count)


@pytest.fixture(scope="module")
def _poisoned(checkpoints: dict[str, str]) -> House:
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper

    arena = Arena(PoisonVmm(POOL_SLABS, SLAB))
    house = House(arena, HostTier.create(64 << 20), Swapper(arena.vmm.stream))
    for model in (MODEL, OTHER):
        house.build(model, checkpoints[model])
    everything = house.arena.reserve("poison", house.arena.slabs)
    everything.map(range(everything.slots))
    everything.release()
    return house


@pytest.fixture
def house(_poisoned: House) -> Iterator[House]:
    """Two models over poisoned memory; empty before and after every test."""
    yield _poisoned
    _poisoned.idle()


@pytest.fixture
def engine(house: House) -> Any:
    """The engine of `MODEL`, with its weights in place."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    return engine


@pytest.fixture
def computed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens every step of the engine computed so far."""
    counts: list[int] = []
    schedule = engine._scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(engine._scheduler, "schedule", counting)
    return counts


def prompt(length: int, start: int = 3) -> tuple[int, ...]:
    return tuple(3 + (start + i * 7) % (VOCAB - 3) for i in range(length))


def start(engine: Any, name: str, words: tuple[int, ...], sampling: Sampling) -> list[int]:
    engine.add(sequence(MODEL, name, words, sampling))
    return tokens(engine.prefill(name, PLENTY))


def go_on(engine: Any, name: str) -> list[int]:
    """All further tokens of a request."""
    output: list[int] = []
    while engine.knows(name):
        output += tokens(engine.step([name], PLENTY))
    return output


def run(engine: Any, words: tuple[int, ...], sampling: Sampling) -> list[int]:
    return start(engine, "r", words, sampling) + go_on(engine, "r")


@BOTH
def test_hits_change_no_token(
    engine: Any, computed: list[int], plain_vllm: Baseline, sampling: Sampling
) -> None:
    """Repeated, extended and diverging prompts answer as without a cache, for less computing."""
    prompts = [prompt(100), prompt(100), prompt(150), prompt(70) + prompt(50, start=200)]
    expected = plain_vllm(MODEL, prompts, [sampling] * len(prompts))
    for words, output, fresh in zip(prompts, expected, [100, 4, 54, 56], strict=True):
        computed.clear()
        assert run(engine, words, sampling) == output
        assert computed[0] == fresh


def test_last_token_is_always_computed(engine: Any, computed: list[int]) -> None:
    """A prompt that is in the cache to its last token still has something to compute."""
    first = run(engine, prompt(3 * BLOCK), GREEDY)
    computed.clear()

    assert run(engine, prompt(3 * BLOCK), GREEDY) == first
    assert computed[0] == BLOCK


@BOTH
def test_restart_finds_its_own_output(
    engine: Any, computed: list[int], plain_vllm: Baseline, sampling: Sampling
) -> None:
    """Prompt and output so far, after a loss, are found like any prefix."""
    words = prompt(50)
    (expected,) = plain_vllm(MODEL, [words], [sampling])
    assert run(engine, words, sampling) == expected
    computed.clear()

    engine.add(sequence(MODEL, "again", words, sampling, tuple(expected[:16])))
    output = tokens(engine.prefill("again", PLENTY)) + go_on(engine, "again")

    assert expected[:16] + output == expected
    assert computed[0] == 66 - 2 * BLOCK


def test_chunks_begin_behind_the_hit(engine: Any, computed: list[int]) -> None:
    """A chunked prefill computes what is missing, and all of it is found afterwards."""
    expected = run(engine, prompt(300), GREEDY)
    engine.trim(0)
    run(engine, prompt(100), GREEDY)
    whole = engine._scheduler.max_num_scheduled_tokens
    engine._scheduler.max_num_scheduled_tokens = 2 * BLOCK
    try:
        computed.clear()
        assert run(engine, prompt(300), GREEDY) == expected
        assert computed[:4] == [64, 64, 64, 12]
        computed.clear()
        assert run(engine, prompt(300), GREEDY) == expected
        assert computed[0] == 300 - 9 * BLOCK
    finally:
        engine._scheduler.max_num_scheduled_tokens = whole


def test_shared_blocks_outlive_either_sharer(
    house: House, engine: Any, plain_vllm: Baseline
) -> None:
    """One sharer's end and the other's swap leave a third one's prefix where it is."""
    prompts = [prompt(64) + prompt(20, start=s) for s in (100, 200, 300)]
    expected = plain_vllm(MODEL, prompts, [GREEDY] * 3)
    places = house.swap_places(engine, 84 + 20)
    outputs = {
        name: start(engine, name, words, GREEDY) for name, words in zip("abc", prompts, strict=True)
    }
    manager = engine._scheduler.kv_cache_manager
    shared = {tuple(manager.get_block_ids(name)[0][:2]) for name in "abc"}
    assert len(shared) == 1

    house.swap_out(engine, "b", places)
    engine.forget("a")
    outputs["c"] += tokens(engine.step(["c"], PLENTY))
    engine.swap_in("b", places, PLENTY)
    for _ in range(5):
        for one in engine.step(["b", "c"], PLENTY):
            outputs[one.request].append(one.token)
    outputs["c"] += go_on(engine, "c")
    outputs["b"] += go_on(engine, "b")

    assert [outputs["b"], outputs["c"]] == expected[1:]


def test_swap_in_copies_what_the_cache_lost(house: House, engine: Any) -> None:
    """Full blocks that are still there need no copy; after a trim all of them do."""
    expected = run(engine, prompt(100), GREEDY)
    engine.trim(0)
    places = house.swap_places(engine, 120)
    output = start(engine, "r", prompt(100), GREEDY)

    assert house.swap_out(engine, "r", places) == 4 * engine.kv.block_bytes
    assert engine.swap_in("r", places, PLENTY).nbytes == engine.kv.block_bytes
    output += tokens(engine.step(["r"], PLENTY))
    house.swap_out(engine, "r", places)
    assert engine.trim(0) == KvUse(0, 0)
    assert engine.swap_in("r", places, PLENTY).nbytes == 4 * engine.kv.block_bytes

    assert output + go_on(engine, "r") == expected


def test_swapped_in_blocks_are_found(house: House, engine: Any, computed: list[int]) -> None:
    """What came in from the host tier is cached as if it had been computed here."""
    places = house.swap_places(engine, 120)
    start(engine, "r", prompt(100), GREEDY)
    house.swap_out(engine, "r", places)
    engine.trim(0)
    engine.swap_in("r", places, PLENTY)
    computed.clear()

    start(engine, "other", prompt(100), GREEDY)

    assert computed == [4]
    engine.forget("r")
    engine.forget("other")


def test_cold_blocks_make_room(engine: Any, computed: list[int]) -> None:
    """A request that needs the memory of cold prefixes gets it, the coldest first."""
    allowed = 3 * engine.kv.group_slabs
    room = sum(len(engine._cache.pool.geometry.blocks_of(group)) for group in (1, 2, 3))
    old, new = prompt(4 * BLOCK, start=100), prompt(4 * BLOCK, start=200)
    expected = [run(engine, words, GREEDY) for words in (old, new)]
    engine.trim(0)
    for words in (old, new):
        engine.add(sequence(MODEL, "r", words, Sampling(max_tokens=1, temperature=0.0)))
        engine.prefill("r", allowed)
    assert engine._cache.pool.cold == 8

    engine.add(sequence(MODEL, "big", prompt((room - 5) * BLOCK), GREEDY))
    engine.prefill("big", allowed)

    assert engine._cache.pool.mapped_slabs == allowed
    assert engine._cache.pool.cold == 5
    engine.add(sequence(MODEL, "more", prompt(6 * BLOCK, start=300), GREEDY))
    with pytest.raises(KvExhausted):
        engine.prefill("more", allowed)
    assert engine._cache.pool.cold == 5
    engine.forget("more")
    engine.forget("big")
    computed.clear()
    assert run(engine, new, GREEDY) == expected[1]
    assert computed[0] == BLOCK
    computed.clear()
    assert run(engine, old, GREEDY) == expected[0]
    assert computed[0] == 3 * BLOCK


def test_exhausted_prefill_keeps_the_hit_cold(engine: Any) -> None:
    """A prefix that was found for a prompt that does not fit is cold again, and still right."""
    expected = run(engine, prompt(400), GREEDY)
    engine.trim(0)
    run(engine, prompt(100), GREEDY)
    use = engine.trim()
    cold = engine._cache.pool.cold
    engine.add(sequence(MODEL, "r", prompt(400), GREEDY))

    with pytest.raises(KvExhausted):
        engine.prefill("r", use.slabs)

    assert engine.trim() == use == KvUse(use.slabs, use.slabs)
    assert (engine._cache.pool.used, engine._cache.pool.cold) == (0, cold)
    assert tokens(engine.prefill("r", PLENTY)) + go_on(engine, "r") == expected


def test_trim_takes_cold_blocks_on_demand_only(engine: Any, computed: list[int]) -> None:
    """Without a limit a trim keeps what is cached; with one it gives up as much as it must."""
    expected = run(engine, prompt(600), GREEDY)
    use = engine.trim()
    assert use.slabs == use.cold_slabs > 2 * engine.kv.group_slabs

    half = engine.trim(2 * engine.kv.group_slabs)
    assert half == KvUse(2 * engine.kv.group_slabs, 2 * engine.kv.group_slabs)
    assert engine.trim(0) == KvUse(0, 0)
    assert len(engine._scheduler.blocks.cached_block_hash_to_block) == 0

    computed.clear()
    assert run(engine, prompt(600), GREEDY) == expected
    assert computed[0] == 600


def test_switch_that_takes_every_slab(
    house: House, engine: Any, computed: list[int], plain_vllm: Baseline
) -> None:
    """Another model and another owner had all the memory; what comes back is computed anew."""
    words = prompt(200)
    (expected,) = plain_vllm(MODEL, [words], [GREEDY])
    assert run(engine, words, GREEDY) == expected
    engine.trim(0)
    engine.evict_weights()

    other = house.engines[OTHER]
    other.begin_load().wait()
    rest = house.arena.reserve("rest", house.arena.free - other.kv.group_slabs)
    rest.map(range(rest.slots))
    other.add(sequence(OTHER, "o", words, GREEDY))
    produced: list[Produced] = other.prefill("o", PLENTY)
    while other.knows("o"):
        produced += other.step(["o"], PLENTY)
    assert [tokens(produced)] == plain_vllm(OTHER, [words], [GREEDY])
    assert house.arena.free == 0
    rest.release()
    other.trim(0)
    other.evict_weights()

    engine.begin_load().wait()
    computed.clear()
    assert run(engine, words, GREEDY) == expected
    assert computed[0] == 200


@BOTH
def test_failed_prefill_leaves_nothing_to_find(
    engine: Any, computed: list[int], monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """Blocks that a failed step was to compute are not in the cache, and the request can retry."""
    expected = run(engine, prompt(200), sampling)
    engine.trim(0)
    run(engine, prompt(70), sampling)
    engine.add(sequence(MODEL, "failed", prompt(200), sampling))
    with monkeypatch.context() as broken:
        break_executor(engine, broken)
        with pytest.raises(OSError, match="broken"):
            engine.prefill("failed", PLENTY)
    assert engine._cache.pool.used == 0
    computed.clear()

    assert run(engine, prompt(200), sampling) == expected
    assert computed[0] == 200 - 2 * BLOCK
    assert tokens(engine.prefill("failed", PLENTY)) + go_on(engine, "failed") == expected


@BOTH
def test_failed_step_leaves_its_requests_added(
    engine: Any, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """After a step that failed, a prefill goes on where it stood, with the tokens it had."""
    expected = run(engine, prompt(60), sampling)
    engine.trim(0)
    output = start(engine, "r", prompt(60), sampling)
    while len(output) < 4:  # the fifth's step computes the last token of a block
        output += tokens(engine.step(["r"], PLENTY))
    with monkeypatch.context() as broken:
        break_executor(engine, broken)
        with pytest.raises(OSError, match="broken"):
            engine.step(["r"], PLENTY)
    assert engine._cache.pool.used == 0
    with pytest.raises(ValueError, match="not computed"):
        engine.step(["r"], PLENTY)

    output += tokens(engine.prefill("r", PLENTY)) + go_on(engine, "r")

    assert output == expected


def break_executor(engine: Any, patch: pytest.MonkeyPatch) -> None:
    def execute_model(*args: Any, **kwargs: Any) -> None:
        raise OSError("broken")

    patch.setattr(engine._core.model_executor, "execute_model", execute_model)


def test_reset_forgets_everything(engine: Any, computed: list[int]) -> None:
    """vLLM's own reset works, and refuses while a request uses a block."""
    start(engine, "r", prompt(100), GREEDY)
    assert not engine._scheduler.kv_cache_manager.reset_prefix_cache()
    engine.forget("r")
    assert engine._scheduler.kv_cache_manager.reset_prefix_cache()
    computed.clear()

    run(engine, prompt(100), GREEDY)

    assert computed[0] == 100


class Crowd:
    """Requests with common prefixes, to whom things happen at random."""

    def __init__(self, house: House, engine: Any, dice: random.Random) -> None:
        self.house = house
        self.engine = engine
        self.dice = dice
        self.sampling = [GREEDY, SEEDED]
        self.words = [
            prompt(dice.choice((0, 40, 64, 130)), start=50 * (n % 2))
            + prompt(dice.randint(1, 70), start=100 + n)
            for n in range(12)
        ]
        self.outputs: list[list[int]] = [[] for _ in self.words]
        self.places = [house.swap_places(engine, len(words) + 20) for words in self.words]
        self.away = dict.fromkeys(range(12), "new")
        self.here: list[int] = []
        self.begun: list[int] = []
        self.deferred = 0
        self.mixed = 0

    def do_anything(self, slabs: int) -> None:
        action = self.dice.choice(
            (self.arrive, self.arrive, self.step, self.step, self.step, self.leave, self.lose)
        )
        try:
            action(slabs)
        except KvExhausted:
            self.deferred += 1
        if self.dice.random() < 0.2:
            self.engine.trim(self.dice.choice((None, 0, 2, 4)))
        self.engine._cache.pool.check_integrity()

    def arrive(self, slabs: int) -> None:
        if not self.away:
            return
        number = self.dice.choice(list(self.away))
        name = str(number)
        if not self.engine.knows(name):
            output = tuple(self.outputs[number])
            words, sampling = self.words[number], self.sampling[number % 2]
            self.engine.add(sequence(MODEL, name, words, sampling, output))
        if self.away[number] == "swapped":
            self.engine.swap_in(name, self.places[number], slabs)
        elif self.dice.random() < 0.5:
            self.engine.begin_prefill(name, slabs)
            del self.away[number]
            self.begun.append(number)
            return
        else:
            self.take(self.engine.prefill(name, slabs))
        del self.away[number]
        if self.engine.knows(name):
            self.here.append(number)

    def step(self, slabs: int) -> None:
        batch = [n for n in self.here if self.dice.random() < 0.7]
        prompts = [n for n in self.begun if self.dice.random() < 0.7]
        for _ in range(self.dice.randint(1, 4)):
            batch = [n for n in batch if self.engine.knows(str(n))]
            prompts = [n for n in prompts if n in self.begun]
            beside = [str(n) for n in prompts]
            self.mixed += bool(batch and beside)
            chunk = self.dice.randint(1, 64)
            self.take(self.engine.step([str(n) for n in batch], slabs, beside, chunk))

    def leave(self, slabs: int) -> None:
        if self.here:
            number = self.here.pop(self.dice.randrange(len(self.here)))
            self.house.swap_out(self.engine, str(number), self.places[number])
            self.away[number] = "swapped"

    def lose(self, slabs: int) -> None:
        some = self.dice.choice((self.here, self.begun))
        if some and self.dice.random() < 0.3:
            number = some.pop(self.dice.randrange(len(some)))
            self.engine.forget(str(number))
            self.away[number] = "lost"

    def take(self, produced: list[Produced]) -> None:
        for one in produced:
            number = int(one.request)
            self.outputs[number].append(one.token)
            if number in self.begun:
                self.begun.remove(number)
                self.here.append(number)
            if one.finished and number in self.here:
                self.here.remove(number)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_happens_outputs_are_those_of_plain_vllm(
    house: House, engine: Any, plain_vllm: Baseline, seed: int
) -> None:
    """Hits, swaps, losses, trims, prompts beside others and too little room, at random: every token
    is the right one."""
    dice = random.Random(seed)
    crowd = Crowd(house, engine, dice)
    while crowd.here or crowd.away or crowd.begun:
        crowd.do_anything(dice.choice((4, 6, 8)))

    samplings = [crowd.sampling[n % 2] for n in range(12)]
    assert crowd.deferred
    assert crowd.mixed
    assert crowd.outputs == plain_vllm(MODEL, crowd.words, samplings)
