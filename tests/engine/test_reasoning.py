"""A guide begins where reasoning has ended, and reasoning ends where its budget is spent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from appliance.engines.protocol import GuideRefused
from tests.engine.house import (
    EOS,
    House,
    PlainAnswers,
    Sampling,
    make_checkpoint,
    make_house,
    sequence,
)

MODEL = "qwen2-gqa"
BEGIN, END = 260, 261
"""Tokens behind those that the tokenizer has anyway."""
PROMPT = tuple(range(10, 60))
THINKING = (*PROMPT, BEGIN)
SLABS = 60
GUIDE = {"regex": "[a-f]{3}-[0-9]{2,4}"}
FREE = Sampling(max_tokens=40, temperature=1.0, seed=4, min_tokens=20)
ANSWER = Sampling(max_tokens=60, temperature=1.0, seed=4, structured_outputs=GUIDE)
ASKED = {
    "budget": (FREE | Sampling(thinking_token_budget=7), THINKING),
    "no budget left": (FREE | Sampling(thinking_token_budget=0), THINKING),
    "budget of what begins by itself": (
        FREE | Sampling(thinking_token_budget=4, logit_bias={BEGIN: 6.0}),
        PROMPT,
    ),
    "guide": (ANSWER | Sampling(logit_bias={END: 8.0}), THINKING),
    "guide and budget": (ANSWER | Sampling(thinking_token_budget=9), THINKING),
    "guide without reasoning": (ANSWER, (*THINKING, END)),
}
EACH = pytest.mark.parametrize(("sampling", "prompt"), ASKED.values(), ids=list(ASKED))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose tokenizer knows how reasoning begins and ends."""
    import transformers

    path = make_checkpoint(tmp_path_factory.mktemp("reasoning"), MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [BEGIN, END]
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def _reasoning(path: str) -> House:
    from appliance.engines.vllm.engine import VllmEngine

    house = make_house()
    for name in ("here", "elsewhere"):
        house.engines[name] = engine = VllmEngine.build(
            name,
            path,
            dtype="float32",
            max_context=1024,
            max_batch=16,
            arena=house.arena,
            host=house.host,
            swapper=house.swapper,
            reasoning_parser="deepseek_r1",
        )
        house.images[name] = house.places(engine.weight_slabs, house.arena.slab_bytes)
        engine.store_weights(house.images[name], fill=True)
    return house


@pytest.fixture
def reasoning(_reasoning: House) -> Iterator[House]:
    for engine in _reasoning.engines.values():
        engine.begin_load().wait()
    yield _reasoning
    _reasoning.idle()


@pytest.fixture
def plain(path: str, plain_answers: PlainAnswers) -> Any:
    def run(sampling: Sampling, prompt: tuple[int, ...]) -> list[int]:
        (answer,) = plain_answers(
            path, "float32", [prompt], [sampling], reasoning_parser="deepseek_r1"
        )
        tokens: list[int] = answer["sequences"][0]
        return tokens

    return run


def run(engine: Any, house: House | None = None) -> list[int]:
    """All tokens of the request `r` from its prompt on, swapped before each if there is a house."""
    produced = list(engine.prefill("r", SLABS))
    places = house.swap_places(engine, 200) if house is not None else ()
    while produced[-1].finished is None:
        if house is not None:
            house.swap_out(engine, "r", places)
            engine.swap_in("r", places, SLABS).wait()
        produced += engine.step(["r"], SLABS)
    return [one.token for one in produced]


@EACH
def test_as_in_plain_vllm(
    reasoning: House, plain: Any, sampling: Sampling, prompt: tuple[int, ...]
) -> None:
    """Where vLLM ends the reasoning, and where its guide begins; also with swaps in between."""
    engine = reasoning.engines["here"]
    wanted = plain(sampling, prompt)
    for house in (None, reasoning):
        engine.add(sequence("here", "r", prompt, sampling))
        assert run(engine, house) == wanted

    budget = sampling.get("thinking_token_budget")
    if budget is not None and prompt is THINKING:
        assert wanted.index(END) == budget
    if "structured_outputs" in sampling and prompt is THINKING:
        assert 0 < wanted.index(END) < len(wanted) - 6


@EACH
def test_as_in_plain_vllm_after_a_loss(
    reasoning: House, plain: Any, sampling: Sampling, prompt: tuple[int, ...]
) -> None:
    """Lost in the midst of the reasoning, at its end, or in the answer."""
    engine = reasoning.engines["elsewhere"]
    wanted = plain(sampling, prompt)
    end = wanted.index(END) if END in wanted else 3
    for sent in sorted({1, end, end + 1, end + 3} - {0}):
        engine.add(sequence("elsewhere", "r", prompt, sampling, tuple(wanted[:sent])))
        assert wanted[:sent] + run(engine) == wanted, sent


def test_the_front_end_knows_of_reasoning(reasoning: House, path: str) -> None:
    """That there is none in the output, though the prompt does not say so."""
    engine = reasoning.engines["here"]
    engine.add(sequence("here", "r", PROMPT, ANSWER, reasoning_ended=True))
    *output, last = run(engine)

    said = Tokenizer.from_file(str(Path(path, "tokenizer.json"))).decode(output)
    assert re.fullmatch(GUIDE["regex"], said)
    assert last == EOS


def test_a_tokenizer_without_reasoning(tmp_path: Path) -> None:
    """A request for what needs the model's tokens is refused; the others are served."""
    from appliance.engines.vllm.engine import VllmEngine

    house = make_house()
    engine = VllmEngine.build(
        MODEL,
        make_checkpoint(tmp_path, MODEL),
        dtype="float32",
        max_context=1024,
        max_batch=16,
        arena=house.arena,
        host=house.host,
        swapper=house.swapper,
        reasoning_parser="deepseek_r1",
    )
    with pytest.raises(ValueError, match="thinking_token_budget"):
        engine.add(sequence(MODEL, "r", PROMPT, Sampling(thinking_token_budget=3)))
    with pytest.raises(GuideRefused):
        engine.add(sequence(MODEL, "r", PROMPT, ANSWER))
    engine.add(sequence(MODEL, "r", PROMPT, FREE))
    engine.forget("r")


def test_an_unknown_parser_is_refused(tmp_path: Path) -> None:
    """When the engine is built."""
    from appliance.engines.vllm.engine import VllmEngine

    house = make_house()
    with pytest.raises(KeyError, match="nonesuch"):
        VllmEngine.build(
            MODEL,
            make_checkpoint(tmp_path, MODEL),
            dtype="float32",
            max_context=1024,
            max_batch=16,
            arena=house.arena,
            host=house.host,
            swapper=house.swapper,
            reasoning_parser="nonesuch",
        )
