"""Layers that attend to a window keep the KV of its tokens only, and answers are those of plain
vLLM. The arena is poisoned: a slab holds NaN whenever it is mapped anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.windows import STEP_TOKENS
from appliance.engines.protocol import KvExhausted
from appliance.vocabulary import PrefillDone, TurnEnd
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import (
    SLAB,
    House,
    PlainAnswers,
    Sampling,
    make_house,
    sequence,
    tokens,
)
from tests.engine.player import Player
from tests.engine.shrunken import WINDOW, make_shrunken
from tests.engine.test_language_models import WITH_IMAGES
from tests.engine.test_mixed import Box, prompt
from tests.engine.test_prefix import PoisonVmm

EXPERTS = "gpt-oss-20b-bf16"
ALIKE = "mistral-7b-v0.1"
"""All of its layers attend to a window."""
CHUNKED = "llama-4-scout-17b-16e-instruct"
"""Its layers attend to chunks, of which one and what is before it take as many blocks as a window.
It is the language model of one that reads images."""
UNEQUAL = "gemma-4-e4b-text"
"""Its layers with a window keep half of what others do of a token, so their blocks have twice as
many; the last layers read what others keep."""
MORE = "mimo-v2-flash-bf16"
"""Its layers with a window keep twice what others do of a token, so their blocks have half as
many; its values are padded."""
STATES = "nemotron-h-8b"
MODELS = [EXPERTS, "gemma-3-270m", ALIKE, UNEQUAL, MORE]
BLOCK = 32
CONTEXT = 4096
PLENTY = 60
LENGTH = 80
LONG = 2400
"""Much longer than a window, and longer than what a prompt keeps beyond it."""
GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=LENGTH, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True)
ALL = pytest.mark.parametrize("model", MODELS)
WITH_CHUNKS = pytest.mark.parametrize("model", [*MODELS, CHUNKED])

Answers = Callable[..., list[list[int]]]


def make_windowed(folder: Path, models: Sequence[str]) -> House:
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper

    arena = Arena(PoisonVmm(2 * PLENTY, SLAB))
    house = House(arena, HostTier.create(64 << 20), Swapper(arena.vmm.stream))
    for name in models:
        house.build(name, str(folder / name), dtype="float32", max_context=CONTEXT)
    everything = arena.reserve("poison", arena.slabs)
    everything.map(range(everything.slots))
    everything.release()
    return house


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    for name in (*MODELS, CHUNKED):
        make_shrunken(folder, name, CONFIGS[name])
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> House:
    return make_windowed(folder, [*MODELS, CHUNKED])


@pytest.fixture
def house(built: House) -> Iterator[House]:
    """In which no model holds anything, before and after."""
    yield built
    built.forget_all()


@pytest.fixture(scope="module")
def answers(folder: Path) -> Iterator[Answers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    with plain_process(WITH_IMAGES) as plain:

        def ask(
            model: str, words: Sequence[tuple[int, ...]], sampling: Sampling = GREEDY
        ) -> list[list[int]]:
            return told(plain, str(folder / model), words, sampling)

        ask(EXPERTS, [(3, 4, 5)])
        yield ask


def told(
    plain: PlainAnswers, path: str, words: Sequence[tuple[int, ...]], sampling: Sampling
) -> list[list[int]]:
    asked = [sampling] * len(words)
    arguments = {"skip_tokenizer_init": True, "max_model_len": CONTEXT}
    if Path(path).name == CHUNKED:
        arguments["language_model_only"] = True
    found = plain(path, "float32", list(words), asked, **arguments)
    return [answer["sequences"][0] for answer in found]


def held(engine: Any, request: str) -> int:
    return len(engine._scheduler.held_blocks(request))


@WITH_CHUNKS
def test_mixed_turns_equal_plain_vllm(house: House, answers: Answers, model: str) -> None:
    """Two prompts in chunks, in the steps of two requests that decode; one is much longer than a
    window, and so is what one that decodes has at its end."""
    box = Box(house, model)
    engine = box.engine
    words = {"d0": prompt(5), "d1": prompt(200, 1)}
    for name in words:
        box.start(name, words[name], GREEDY)
    beside = {"p0": prompt(11, 50), "p1": prompt(LONG, 51)}
    for name in beside:
        box.add(name, beside[name], GREEDY)

    done, ended = box.turn(*words, prompts=tuple(beside), chunk=48)

    assert all(isinstance(report, PrefillDone) for report in done)
    assert ended.reason is TurnEnd.QUOTA
    assert ended.steps == -(-(11 + LONG) // 48)
    assert held(engine, "p1") == engine.kv.blocks(LONG)
    outputs = box.finish()
    words |= beside
    assert list(outputs.values()) == answers(model, list(words.values()))


def test_a_window_beside_states_that_holds_the_longest_request(tmp_path: Path) -> None:
    """It is none, so that copies of states are kept."""
    config = {**CONFIGS[STATES], "sliding_window": CONTEXT}
    path = Path(make_shrunken(tmp_path, STATES, config))
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"sliding_window": CONTEXT}))

    engine = make_house().build(STATES, str(path), dtype="float32", max_context=1024)

    assert (engine.kv.tables, engine.kv.windows, engine.kv.snapshot_blocks) == (1, (), 2)
    engine.retire()


@WITH_CHUNKS
def test_what_is_held(house: House, model: str) -> None:
    """It follows from the number of tokens, in every step; it grows no more where windows are."""
    box = Box(house, model)
    engine, shape = box.engine, box.engine.kv
    size = 2 * BLOCK if model == UNEQUAL else BLOCK
    most = -(-(WINDOW - 1) // size) + 1
    assert set(shape.windows) == {most}
    assert shape.step_blocks == STEP_TOKENS // size
    box.add("long", prompt(LONG), GREEDY)
    box.start("r", prompt(50, 9), GREEDY)
    engine.begin_prefill("long", PLENTY)
    blocks, pool = shape.prompt_blocks(LONG), engine._cache.pool
    assert held(engine, "long") == blocks < -(-LONG // BLOCK) * (shape.tables + len(shape.windows))
    peak = 0
    while engine.tokens_left("long") > 1 and not engine._scheduler.holds("long", LONG):
        engine.step([], PLENTY, ["long"], 200)
        peak = max(peak, held(engine, "long"))
    assert peak == blocks

    for produced in range(1, LENGTH - 1):
        for name, length in (("r", 50), ("long", LONG)):
            assert held(engine, name) == shape.blocks(length + produced - 1)
        assert pool.used == shape.blocks(50 + produced - 1) + shape.blocks(LONG + produced - 1)
        engine.step(["r", "long"], PLENTY)

    each = -(-(LONG + LENGTH) // shape.block_tokens)
    assert shape.blocks(LONG + LENGTH) == each * shape.tables + most * len(shape.windows)


@WITH_CHUNKS
def test_swapped_and_evicted_in_the_midst(house: House, answers: Answers, model: str) -> None:
    """Weights and KV leave between any seven tokens, and windows move on to other blocks."""
    words = [prompt(n, n) for n in (30, 64, 300)]
    player = Player(house, model, SEEDED, words)

    while player.live:
        player.turn(7, PLENTY)

    assert list(player.outputs.values()) == answers(model, words, SEEDED)


@pytest.mark.parametrize("steps", [0, 7, 20])
def test_migration(house: House, answers: Answers, folder: Path, twin: House, steps: int) -> None:
    """KV swapped out of one instance and into another goes on as if it had stayed. After 20 steps
    the computed tokens fill their blocks."""
    words = prompt(300)
    source, target = house.engines[ALIKE], twin.engines[ALIKE]
    source.begin_load().wait()
    target.begin_load().wait()
    places = house.swap_places(source, 300 + LENGTH)
    source.add(sequence(ALIKE, "r", words, GREEDY))
    output = tokens(source.prefill("r", PLENTY))
    for _ in range(steps):
        output += tokens(source.step(["r"], PLENTY))

    moved = house.swap_out(source, "r", places)
    source.forget("r")
    target.add(sequence(ALIKE, "r", words, GREEDY, tuple(output)))
    arrived = target.swap_in("r", places, PLENTY).nbytes

    while target.knows("r"):
        output += tokens(target.step(["r"], PLENTY))
    assert moved == arrived == source.kv.blocks(300 + steps) * source.kv.block_bytes
    assert [output] == answers(ALIKE, [words])


@pytest.fixture
def twin(house: House, built_twin: Any) -> Iterator[House]:
    """Another instance over the same host tier."""
    yield built_twin
    built_twin.idle()


@pytest.fixture(scope="module")
def built_twin(built: House, folder: Path) -> House:
    from appliance.memory.arena import Arena
    from appliance.memory.swapper import Swapper
    from appliance.memory.vmm_host import HostVmm

    arena = Arena(HostVmm(PLENTY, SLAB))
    house = House(arena, built.host, Swapper(arena.vmm.stream))
    house.build(
        ALIKE,
        str(folder / ALIKE),
        dtype="float32",
        max_context=CONTEXT,
        image=built.images[ALIKE],
    )
    return house


@ALL
def test_slabs_run_short_in_the_midst_of_a_prompt(
    house: House, answers: Answers, model: str
) -> None:
    """It has the blocks that it needs to its end; those that decode stop. The first block of its
    window is the other's, too."""
    box = Box(house, model)
    engine, shape = box.engine, box.engine.kv
    words = {"d": prompt(126), "p": prompt(126) + prompt(LONG - 126, 9)}
    box.start("d", words["d"], GREEDY)
    box.add("p", words["p"], GREEDY)
    slabs = shape.slabs(shape.prompt_blocks(LONG) + shape.blocks(126))
    with pytest.raises(KvExhausted):
        engine.begin_prefill("p", slabs - 2 * shape.group_slabs)
    assert not engine._scheduler.has_blocks("p")
    engine.begin_prefill("p", slabs)
    assert engine.tokens_left("p") == LONG - (64 if model in (UNEQUAL, MORE) else 96)
    pool, needed = engine._cache.pool, engine._scheduler.needed((), engine._cache._prompts.values())
    spare = slabs // shape.group_slabs * shape.group_blocks - pool.used - needed
    engine._cache.provide(spare, slabs)
    others = pool.take(spare)

    both = ["d"]
    while "p" not in box.outputs:
        try:
            produced = engine.step(both, slabs, ["p"], 60)
        except KvExhausted:
            assert both, "the prompt has no room"
            both = []
        else:
            for one in produced:
                box.outputs.setdefault(one.request, []).append(one.token)
    assert bool(both) is not bool(shape.tables), "a window moves on, other layers want a block"
    pool.give(others)

    outputs = box.finish()

    assert list(outputs.values()) == answers(model, list(words.values()))


@ALL
def test_forgotten_in_the_midst_of_a_prompt(house: House, model: str) -> None:
    box = Box(house, model)
    engine = box.engine
    box.add("p", prompt(LONG))
    engine.begin_prefill("p", PLENTY)
    for _ in range(3):
        engine.step([], PLENTY, ["p"], 500)

    engine.forget("p")

    assert engine.kv_use().used_bytes == 0
    assert not engine._cache._prompts


@ALL
def test_prefixes_are_found_again(house: House, answers: Answers, model: str) -> None:
    """Of a request that goes on, and of one that left; also behind the first window, and where a
    swap brings the rest."""
    box = Box(house, model)
    engine = box.engine
    common = prompt(320)
    words = {"a": common + prompt(90, 1), "b": common + prompt(40, 2)}
    box.start("a", words["a"], SEEDED)

    box.start("b", words["b"], SEEDED)
    places = house.swap_places(engine, 360 + LENGTH)
    engine.swap_out("b", places)
    house.swapper.settle()
    moved = engine.swap_in("b", places, PLENTY).nbytes
    outputs = box.finish()

    assert moved < engine.kv.blocks(360) * engine.kv.block_bytes
    assert list(outputs.values()) == answers(model, list(words.values()), SEEDED)
    assert engine.kv_use().used_bytes == 0
    box.add("c", words["a"])
    engine.begin_prefill("c", PLENTY)
    assert engine.tokens_left("c") < 90


@pytest.mark.parametrize("model", [EXPERTS])
def test_a_step_that_fails(
    house: House, answers: Answers, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Nothing is computed of its requests then, and all can be computed again."""
    words = {"r": prompt(140), "p": prompt(LONG, 100)}
    box = Box(house, model)
    engine = box.engine
    box.start("r", words["r"], SEEDED)
    box.add("p", words["p"], SEEDED)
    engine.begin_prefill("p", PLENTY)
    box.outputs["r"] += tokens(engine.step(["r"], PLENTY, ["p"], 300))

    def fail() -> None:
        raise OSError("in the midst of it")

    with monkeypatch.context() as patched:
        patched.setattr(engine._core.model_executor, "execute_model", lambda *_, **__: fail())
        with pytest.raises(OSError, match="midst"):
            engine.step(["r"], PLENTY, ["p"], 300)

    assert engine.kv_use().used_bytes == 0
    assert not engine._cache._prompts
    for name in words:
        box.outputs.setdefault(name, []).extend(tokens(engine.prefill(name, PLENTY)))
    assert list(box.finish().values()) == answers(model, list(words.values()), SEEDED)


def test_a_window_that_holds_the_longest_request_is_none(folder: Path, house: House) -> None:
    """Its layers keep the KV of all tokens, in one table."""
    engine = house.build("short", str(folder / EXPERTS), dtype="float32", max_context=3 * BLOCK)

    assert engine.kv.windows == ()
    assert engine.kv.tables == 1
    assert engine.kv.prompt_blocks(3 * BLOCK) == engine.kv.blocks(3 * BLOCK) == 3
    del house.engines["short"]
    engine.retire()
