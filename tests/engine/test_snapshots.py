"""Prefixes of models with states, and of those with compressed KV, are found again, and answers are
those of plain vLLM. The arena is poisoned: a slab holds NaN whenever it is mapped anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.engines.vllm.kv.placement import KvTable
from appliance.engines.vllm.kv.snapshots import EVERY_TOKENS, can_be_kept
from appliance.engines.vllm.messages import decode_output
from appliance.memory.transfers import Transfer, TransferFailed
from appliance.platform.cpus import computes_linear_attention
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import SLAB, House, Sampling, sequence, tokens
from tests.engine.shrunken import make_shrunken
from tests.engine.test_prefix import Crowd, PoisonVmm, break_executor, prompt

MLA = "deepseek-v2-lite"
GLM = "glm-4.7-flash"
"""Compressed KV, too, of queries that vLLM rotates wrongly (`appliance.engines.vllm.layers`)."""
STATES = [
    "granite-4.0-h-tiny",
    "nemotron-h-8b",
    "falcon-h1-1.5b-instruct",
    "lfm2-1.2b",
    "mamba-codestral-7b-v0.1",
]
"""Falcon-H1 has both in each layer, and Mamba 2 has states only; LFM2's blocks are short, and a
snapshot ends with one."""
HYBRID = STATES[0]
LINEAR = ["qwen3-next-80b-a3b-instruct", "qwen3.5-27b-text"]
"""They are computed in bfloat16, and on some CPUs only."""
CONTEXT = 2048
PLENTY = 120
GREEDY = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=20, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True)

Answers = Callable[[str, Sequence[tuple[int, ...]], Sequence[Sampling]], list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def built(folder: Path) -> House:
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper

    arena = Arena(PoisonVmm(2 * PLENTY, SLAB))
    house = House(arena, HostTier.create(256 << 20), Swapper(arena.vmm.stream))
    for name in (MLA, GLM, *STATES):
        path = make_shrunken(folder, name, CONFIGS[name])
        house.build(name, path, dtype="float32", max_context=CONTEXT)
    for name in LINEAR if computes_linear_attention() else ():
        path = make_shrunken(folder, name, CONFIGS[name])
        house.build(name, path, dtype="bfloat16", max_context=CONTEXT)
    everything = arena.reserve("poison", arena.slabs)
    everything.map(range(everything.slots))
    everything.release()
    return house


@pytest.fixture
def house(built: House) -> Iterator[House]:
    """In which no model holds anything, before and after."""
    yield built
    built.forget_all()


@pytest.fixture(scope="module")
def answers(built: House, folder: Path) -> Iterator[Answers]:
    """Of each prompt alone. The process's first model has experts: vLLM has no others in it after
    one without."""
    with plain_process() as plain:

        def ask(
            model: str, words: Sequence[tuple[int, ...]], sampling: Sequence[Sampling]
        ) -> list[list[int]]:
            said = []
            for one, wanted in zip(words, sampling, strict=True):
                path, longest = str(folder / model), {"max_model_len": CONTEXT}
                (answer,) = plain(path, "float32", [one], [wanted], **longest)
                said.append(answer["sequences"][0])
            return said

        ask(MLA, [(3, 4, 5)], [GREEDY])
        yield ask


class Served:
    """One model, whose steps are counted in tokens."""

    def __init__(self, house: House, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.house, self.model = house, model
        self.engine: Any = house.engines[model]
        self.engine.begin_load().wait()
        self.computed: list[int] = []
        schedule = self.engine._scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.computed.append(output.total_num_scheduled_tokens)
            return output

        monkeypatch.setattr(self.engine._scheduler, "schedule", counting)

    def add(
        self,
        name: str,
        words: tuple[int, ...],
        sampling: Sampling = GREEDY,
        output: tuple[int, ...] = (),
        salt: str = "",
    ) -> None:
        spec = sequence(self.model, name, words, sampling, output)
        self.engine.add(msgspec.structs.replace(spec, prefix_salt=salt))

    def start(self, name: str, words: tuple[int, ...], sampling: Sampling = GREEDY) -> list[int]:
        self.add(name, words, sampling)
        return tokens(self.engine.prefill(name, PLENTY))

    def go_on(self, name: str) -> list[int]:
        output: list[int] = []
        while self.engine.knows(name):
            output += tokens(self.engine.step([name], PLENTY))
        return output

    def run(
        self, words: tuple[int, ...], sampling: Sampling = GREEDY, salt: str = ""
    ) -> tuple[list[int], int]:
        """What it answers, and how many tokens of its prompt were computed."""
        self.computed.clear()
        self.add("r", words, sampling, salt=salt)
        output = tokens(self.engine.prefill("r", PLENTY))
        computed = sum(self.computed)
        output += self.go_on("r")
        self.engine._cache.pool.check_integrity()
        return output, computed


@pytest.fixture
def serve(house: House, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Served]:
    return lambda model: Served(house, model, monkeypatch)


def floor(tokens: int, size: int) -> int:
    return tokens - tokens % size


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("model", [MLA, *STATES])
def test_hits_change_no_token(
    serve: Callable[[str], Served], answers: Answers, model: str, sampling: Sampling
) -> None:
    """Repeated, extended and diverging prompts answer as without a cache, for less computing."""
    served = serve(model)
    size = served.engine.kv.block_tokens if model == MLA else EVERY_TOKENS
    words = prompt(700)
    asked = [words, words, words + prompt(90, start=300), words[:300] + prompt(90, start=200)]
    expected = answers(model, asked, [sampling] * 4)
    found = [0, floor(699, size), floor(700, size), floor(300, size) if model == MLA else 0]
    if model == "lfm2-1.2b":  # a step of the last prompt ended where its blocks were others', too
        asked.append(words[:300] + prompt(90, start=100))
        expected += answers(model, asked[-1:], [sampling])
        found.append(floor(300, size))

    for one, output, cached in zip(asked, expected, found, strict=True):
        assert served.run(one, sampling) == (output, len(one) - cached)


@pytest.mark.parametrize("model", STATES)
def test_next_turn_finds_what_was_written(
    serve: Callable[[str], Served], answers: Answers, model: str
) -> None:
    """The prompt of a chat's next turn begins with the last one and its answer. Of what a request
    writes, one snapshot is left."""
    served = serve(model)
    chatty = Sampling(max_tokens=3 * EVERY_TOKENS, temperature=0.0, ignore_eos=True)
    words = prompt(200)
    (expected,) = answers(model, [words], [chatty])
    output, _ = served.run(words, chatty)
    assert output == expected
    written = len(words) + len(output) - 1

    again, computed = served.run((*words, *output, 7, 8, 9))

    assert computed == written + 4 - floor(written, EVERY_TOKENS)
    assert [again] == answers(model, [(*words, *output, 7, 8, 9)], [GREEDY])
    _, computed = served.run((*words, *output[:150], 7, 8, 9))
    assert computed == 353 - floor(200, EVERY_TOKENS)


@pytest.mark.skipif(not computes_linear_attention(), reason="the CPU lacks the instructions")
@pytest.mark.parametrize("model", LINEAR)
def test_linear_attention_goes_on_behind_a_hit(serve: Callable[[str], Served], model: str) -> None:
    """What is computed behind a snapshot is the same to the bit, as steps end there anyway."""
    served = serve(model)
    first, computed = served.run(prompt(700))
    assert computed == 700

    assert served.run(prompt(700)) == (first, 700 - 640)


def test_cached_tokens_are_reported(serve: Callable[[str], Served]) -> None:
    """To the front end, which says so in `usage`."""
    served = serve(HYBRID)
    served.run(prompt(300))
    served.add("r", prompt(300))

    (first,) = served.engine.prefill("r", PLENTY)

    stats = decode_output(first.detail).prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (300, 256)


def test_salts_keep_snapshots_apart(serve: Callable[[str], Served]) -> None:
    """What one key's requests left is not found by another's."""
    served = serve(HYBRID)
    assert served.run(prompt(300), salt="a")[1] == 300
    assert served.run(prompt(300), salt="b")[1] == 300
    assert served.run(prompt(300), salt="a")[1] == 44


def test_prompts_together_each_end_a_step_for_their_states(
    serve: Callable[[str], Served], answers: Answers
) -> None:
    """What is left of a chunk when one does goes to the next; a seeded request draws its tokens
    from its own generator only."""
    served = serve(HYBRID)
    words = {"a": prompt(300), "b": prompt(290, start=100)}
    outputs: dict[str, list[int]] = {}
    for name in words:
        served.add(name, words[name], SEEDED)
        served.engine.begin_prefill(name, PLENTY)
    while begun := [name for name in words if name not in outputs]:
        for one in served.engine.step((), PLENTY, begun, 400):
            outputs[one.request] = [one.token]
    assert served.computed == [400, 156, 34]
    for name in words:
        outputs[name] += served.go_on(name)

    assert list(outputs.values()) == answers(HYBRID, list(words.values()), [SEEDED] * 2)


@pytest.mark.parametrize("model", [HYBRID, "lfm2-1.2b"])
def test_swaps_and_losses(
    house: House, serve: Callable[[str], Served], answers: Answers, model: str
) -> None:
    """A request that was away has its own state, whatever is cached; one that is lost begins behind
    what it wrote; and nothing is found once the memory was given away."""
    served = serve(model)
    engine = served.engine
    words = prompt(300)
    long = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)
    (expected,) = answers(model, [words], [long])
    places = house.swap_places(engine, 450)
    output = served.start("r", words, long)
    while len(output) < 90:  # 389 tokens are computed: a snapshot is at 384
        if len(output) in (3, 80):
            house.swap_out(engine, "r", places)
            if len(output) == 86:
                engine.trim(0)
            engine.swap_in("r", places, PLENTY)
        output += tokens(engine.step(["r"], PLENTY))
    engine.forget("r")
    assert output == expected[:90]

    served.computed.clear()
    served.add("r", words, long, tuple(output))
    output += tokens(engine.prefill("r", PLENTY))
    assert sum(served.computed) == 390 - 384
    assert output + served.go_on("r") == expected

    engine.trim(0)
    assert not engine._scheduler.blocks.cached_block_hash_to_block
    assert served.run(words, long) == (expected, 300)


def test_snapshots_take_no_room_from_requests(
    serve: Callable[[str], Served], answers: Answers
) -> None:
    """None is kept where a prompt has all that is allowed; those that are cold go first."""
    served = serve(HYBRID)
    shape = served.engine.kv
    pool = served.engine._cache.pool
    enough = shape.slabs(1)
    most = len(pool.geometry.blocks_of(1))
    fit = (most - shape.state_blocks) // shape.tables * shape.block_tokens
    words = prompt(min(fit, CONTEXT - 40))
    expected = answers(HYBRID, [words], [GREEDY])
    crowd = [f"c{n}" for n in range((most - shape.blocks(len(words) + 20)) // 2)]
    for name in crowd:
        served.start(name, prompt(10))
    free = most - pool.used

    served.add("r", words)
    output = tokens(served.engine.prefill("r", enough))

    assert pool.mapped_slabs == enough
    assert pool.cold <= free - shape.blocks(len(words)) < shape.snapshot_blocks
    for name in crowd:
        served.engine.forget(name)
    assert [output + served.go_on("r")] == expected
    served.engine.trim(0)
    assert served.run(words) == (expected[0], len(words))


def test_failed_step_leaves_no_snapshot(
    serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it was to compute; what was kept before is good."""
    served = serve(HYBRID)
    expected, _ = served.run(prompt(300))
    served.engine.trim(0)
    served.add("failed", prompt(300))
    served.engine.begin_prefill("failed", PLENTY)
    with monkeypatch.context() as broken:
        break_executor(served.engine, broken)
        with pytest.raises(OSError, match="broken"):
            served.engine.step((), PLENTY, ("failed",), 2048)
    assert served.engine.kv_use().cold_bytes == 0

    assert served.run(prompt(300)) == (expected, 300)
    output = tokens(served.engine.prefill("failed", PLENTY))
    assert output + served.go_on("failed") == expected


def test_snapshot_that_cannot_be_made_loses_nothing(
    serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to map its memory: the step's tokens are there. Blocks of one that is not
    copied to its end are free."""
    served = serve(HYBRID)
    expected, _ = served.run(prompt(300))
    served.engine.trim(0)
    blocks = served.engine._scheduler.blocks
    served.add("r", prompt(300))
    served.engine.begin_prefill("r", PLENTY)

    def refuse(count: int, max_slabs: int) -> None:
        if count:
            raise OSError("no memory is mapped")

    def break_off(*args: object) -> None:
        raise RuntimeError("not copied")

    with monkeypatch.context() as refused:
        refused.setattr(blocks, "provide", refuse)
        assert served.engine.step((), PLENTY, ("r",), 2048) == []
        output = tokens(served.engine.step((), PLENTY, ("r",), 2048))
    assert output + served.go_on("r") == expected
    assert served.run(prompt(300)) == (expected, 300)
    served.engine.trim(0)

    served.add("r", prompt(300))
    served.engine.begin_prefill("r", PLENTY)
    with monkeypatch.context() as broken:
        broken.setattr(blocks, "copy", break_off)
        with pytest.raises(RuntimeError, match="not copied"):
            served.engine.step((), PLENTY, ("r",), 2048)
    served.engine.forget("r")
    assert (blocks.kv.used, blocks.kv.cold) == (0, 0)


def test_prompt_that_cannot_begin_holds_nothing(
    serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that it shares does not arrive; what was cached is as before."""
    served = serve(HYBRID)
    expected, _ = served.run(prompt(300))
    cache = served.engine._cache
    cold = cache.pool.cold

    def lost() -> list[Transfer]:
        raise TransferFailed("a swap inwards")

    served.add("r", prompt(300))
    with monkeypatch.context() as failing:
        failing.setattr(cache, "_under_way", lost)
        with pytest.raises(TransferFailed):
            served.engine.begin_prefill("r", PLENTY)
    assert (cache.pool.used, cache.pool.cold) == (0, cold)
    output = tokens(served.engine.prefill("r", PLENTY))

    assert output + served.go_on("r") == expected
    assert served.run(prompt(300)) == (expected, 300 - 256)


def test_snapshots_of_others_stay(serve: Callable[[str], Served]) -> None:
    """A request that writes what another did, and more, replaces its own snapshots only."""
    served = serve(HYBRID)
    words = prompt(200)
    shorter, longer = (
        Sampling(max_tokens=most, temperature=0.0, ignore_eos=True) for most in (190, 330)
    )
    output, _ = served.run(words, shorter)
    more, _ = served.run(words, longer)
    assert more[: len(output)] == output

    _, computed = served.run((*words, *output, 7, 8, 9))

    assert computed == 393 - 384
    _, computed = served.run((*words, *more, 7, 8, 9))
    assert computed == 533 - 512


def test_no_snapshots_on_a_gpu_or_beside_windows() -> None:
    state, full = KvTable(2, 1024, has_state=True), KvTable(2, 416, has_state=False)
    assert can_be_kept([state, full], host_memory=True)
    assert not can_be_kept([state, full], host_memory=False)
    assert not can_be_kept([full], host_memory=True)
    assert not can_be_kept([state, full._replace(window=3)], host_memory=True)


class Many(Crowd):
    """Requests with common prefixes that are long enough for snapshots."""

    def __init__(self, house: House, engine: Any, dice: random.Random) -> None:
        super().__init__(house, engine, dice)
        self.words = [
            prompt(dice.choice((0, 130, 300, 560)), start=50 * (n % 2))
            + prompt(dice.randint(1, 150), start=100 + n)
            for n in range(12)
        ]
        self.places = [house.swap_places(engine, len(words) + 20) for words in self.words]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", [HYBRID, "nemotron-h-8b", "lfm2-1.2b", MLA, GLM])
def test_whatever_happens_outputs_are_those_of_plain_vllm(
    house: House, answers: Answers, model: str, seed: int
) -> None:
    """Hits, swaps, losses, trims, prompts beside others and too little room, at random: every token
    is the right one."""
    dice = random.Random(seed)
    engine = house.engines[model]
    engine.begin_load().wait()
    crowd = Many(house, engine, dice)
    least = engine.kv.slabs(engine.kv.prompt_blocks(730))
    while crowd.here or crowd.away or crowd.begun:
        crowd.do_anything(least + dice.choice((0, 1, 4)) * engine.kv.group_slabs)

    samplings = [crowd.sampling[n % 2] for n in range(12)]
    assert crowd.outputs == answers(model, crowd.words, samplings)
