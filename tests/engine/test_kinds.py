"""Models whose layers keep something else than keys and values of each token, in mixed steps:
compressed KV (MLA), and states (Mamba)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.engines.protocol import KvExhausted, Verdict
from appliance.vocabulary import PrefillDone
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import House, PlainAnswers, Sampling, make_house, tokens
from tests.engine.shrunken import make_shrunken
from tests.engine.test_mixed import GREEDY, LENGTH, PLENTY, SEEDED, Box, prompt

MLA = "deepseek-v2-lite"
STATES = ["falcon-h1-1.5b-instruct", "granite-4.0-h-tiny", "nemotron-h-8b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def kinds(folder: Path) -> House:
    house = make_house()
    for name in (MLA, *STATES):
        house.build(name, make_shrunken(folder, name, CONFIGS[name]), dtype="float32")
    return house


@pytest.fixture(scope="module")
def plain(kinds: House, folder: Path) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    with plain_process() as answers:
        answers(str(folder / MLA), "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


@pytest.fixture
def house(kinds: House) -> House:
    """In which no model holds anything."""
    for engine in kinds.engines.values():
        for request in list(engine._scheduler.requests):
            engine.forget(request)
    kinds.idle()
    return kinds


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("model", [MLA, *STATES])
def test_mixed_turns_equal_plain_vllm(
    house: House, folder: Path, plain: PlainAnswers, model: str, chunk: int
) -> None:
    """Two prompts in chunks, in the steps of two requests that decode."""
    box = Box(house, model)
    words = {f"d{n}": prompt(length, n) for n, length in enumerate((5, 90))}
    for name in words:
        box.start(name, words[name])
    beside = {f"p{n}": prompt(length, 50 + n) for n, length in enumerate((11, 200))}
    for name in beside:
        box.add(name, beside[name])

    done, ended = box.turn(*words, prompts=tuple(beside), chunk=chunk)

    assert [report.request for report in done] == list(beside)
    assert all(isinstance(report, PrefillDone) for report in done)
    # With states, a step ends behind 128 tokens of the last prompt, in the midst of a long chunk.
    assert ended.steps == -(-211 // chunk) + (chunk == 64 and model in STATES)
    outputs = box.finish()
    words |= beside
    answers = plain(str(folder / model), "float32", list(words.values()), [GREEDY] * len(words))
    assert list(outputs.values()) == [answer["sequences"][0] for answer in answers]


@pytest.mark.parametrize("model", STATES)
def test_a_short_prompt_is_computed_anew(house: House, model: str) -> None:
    """A state is that of its last token: what others have computed of a prompt is of no use, but
    for what `test_snapshots` has."""
    box = Box(house, model)
    box.start("first", prompt(90))
    box.add("second", prompt(90))

    box.engine.begin_prefill("second", PLENTY)

    assert box.engine.tokens_left("second") == 90
    assert box.engine.kv_use().cold_bytes == 0
    assert box.engine.verify() is Verdict.OK


@pytest.mark.parametrize("model", STATES)
def test_a_request_takes_its_states_whatever_its_length(house: House, model: str) -> None:
    engine = Box(house, model).engine
    shape = engine.kv

    assert shape.state_blocks >= 1
    assert shape.blocks(1) == shape.tables + shape.state_blocks
    longer = shape.blocks(2 * shape.block_tokens) - shape.blocks(shape.block_tokens)
    assert longer == shape.tables


@pytest.mark.parametrize("model", STATES)
def test_too_few_slabs_change_nothing(
    house: House, folder: Path, plain: PlainAnswers, model: str
) -> None:
    """For a prompt, and for a swap inwards; then there is enough."""
    box = Box(house, model)
    engine = box.engine
    box.add("r", prompt(40))
    with pytest.raises(KvExhausted):
        engine.prefill("r", 0)
    assert engine.kv_use().used_bytes == 0
    output = tokens(engine.prefill("r", PLENTY))
    places = house.swap_places(engine, 40 + LENGTH)
    house.swap_out(engine, "r", places)
    engine.trim(0)
    with pytest.raises(KvExhausted):
        engine.swap_in("r", places, 0)

    engine.swap_in("r", places, PLENTY)

    while engine.knows("r"):
        output += tokens(engine.step(["r"], PLENTY))
    (answer,) = plain(str(folder / model), "float32", [prompt(40)], [GREEDY])
    assert output == answer["sequences"][0]


@pytest.mark.parametrize("model", STATES)
def test_a_step_that_fails(
    house: House,
    folder: Path,
    plain: PlainAnswers,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    """Nothing is computed of its requests then, states included, and all can be computed again."""
    words = {"r": prompt(40), "p": prompt(70, 100)}
    box = Box(house, model)
    engine = box.engine
    box.start("r", words["r"], SEEDED)
    box.add("p", words["p"], SEEDED)
    engine.begin_prefill("p", PLENTY)
    box.outputs["r"] += tokens(engine.step(["r"], PLENTY, ["p"], 32))

    def fail() -> None:
        raise OSError("in the midst of it")

    with monkeypatch.context() as patched:
        patched.setattr(engine._core.model_executor, "execute_model", lambda *_, **__: fail())
        with pytest.raises(OSError, match="midst"):
            engine.step(["r"], PLENTY, ["p"], 32)

    assert engine.kv_use().used_bytes == 0
    for name in words:
        box.outputs.setdefault(name, []).extend(tokens(engine.prefill(name, PLENTY)))
    outputs = box.finish()
    answers = plain(str(folder / model), "float32", list(words.values()), [SEEDED] * 2)
    assert list(outputs.values()) == [answer["sequences"][0] for answer in answers]
