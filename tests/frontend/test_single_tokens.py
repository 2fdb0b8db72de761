"""A streamed answer with tool calls is the same, however many of its tokens arrive at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as EngineFinishReason

from appliance.frontend.serving.single_tokens import Collector, split
from appliance.vocabulary import FinishReason
from tests.frontend.conftest import model_at
from tests.frontend.stand_in_core import StandInCore, front_end

CITY = {"city": {"type": "string"}, "nights": {"type": "integer"}}
TOOL: Any = {"name": "look", "parameters": {"type": "object", "properties": CITY}}
ARGUMENTS = '{"city": "Bonn {", "nights": 3}'
CALL = '{"name": "look", "arguments": ' + ARGUMENTS + "}"
HERMES = f"<tool_call>{CALL}</tool_call>"
ANSWERS = {
    "hermes": f'so {HERMES}\n{HERMES}<tool_call>{{"n',
    "xlam": f"[{CALL}, {CALL}]",
    "hunyuan_a13b": f"<tool_calls>[{CALL}, {CALL}]</tool_calls>",
    "functiongemma": "<start_function_call>call:look{city:<escape>Bonn<escape>,nights:3}"
    "<end_function_call>",
}
"""Two calls each, or one, in the words of models whose parsers in vLLM 0.32 depend on how many
tokens arrive at once."""


# --- streams -------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(generator: Path) -> AsyncIterator[StandInCore]:
    """Each model answers in the words of the parser that it is named after, cut off at the end."""
    served = [model_at(generator, name, tool_parser=name) for name in ANSWERS]
    async with front_end(served) as core:
        tokens = Tokenizer.from_file(str(generator / "tokenizer.json"))
        core.saying = lambda submit: (
            tokens.encode(ANSWERS[submit.model], add_special_tokens=False).ids
        )
        core.ending = lambda submit: FinishReason.LENGTH
        yield core


async def said(core: StandInCore, model: str, choices: int = 1) -> list[tuple[str, dict[int, str]]]:
    """Each choice's content, and the name and arguments of each of its calls."""
    client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
    heard: list[tuple[str, dict[int, str]]] = [("", {}) for _ in range(choices)]
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        tools=[{"type": "function", "function": TOOL}],
        n=choices,
        stream=True,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            content, calls = heard[choice.index]
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                new = (call.function.name or "") + (call.function.arguments or "")
                calls[call.index] = calls.get(call.index, "") + new
            heard[choice.index] = content + (choice.delta.content or ""), calls
    return heard


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", ANSWERS)
async def test_calls_are_the_same_however_many_tokens_arrive_at_once(
    core: StandInCore, model: str
) -> None:
    core.at_once = lambda: 1
    (alone,) = await said(core, model)
    assert alone[1]
    for most in (2, 8, 64, 1000):
        chance = Random(most)
        core.at_once = lambda chance=chance, most=most: chance.randint(most // 2, most)  # type: ignore[misc]
        assert await said(core, model, choices=2) == [alone, alone], most


@pytest.mark.asyncio(loop_scope="module")
async def test_no_argument_is_added_when_the_next_call_has_just_begun(core: StandInCore) -> None:
    core.at_once = lambda: 1000
    ((content, calls),) = await said(core, "hermes")
    assert content == "so "
    assert calls == {0: "look" + ARGUMENTS, 1: "look" + ARGUMENTS}
    assert json.loads(calls[1].removeprefix("look")) == {"city": "Bonn {", "nights": 3}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("asked", [{}, {"tools": [{"type": "function", "function": TOOL}]}])
async def test_only_answers_that_may_have_calls_come_one_token_at_a_time(
    core: StandInCore, asked: dict[str, Any]
) -> None:
    """All tokens arrive at once: without tools the client gets them so."""
    core.at_once = lambda: 1000
    client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
    stream = await client.chat.completions.create(
        model="hunyuan_a13b",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        **asked,
    )
    pieces = [
        chunk.choices[0].delta
        async for chunk in stream
        if chunk.choices[0].delta.content or chunk.choices[0].delta.tool_calls
    ]
    if asked:
        assert len(pieces) > 4
    else:
        assert [piece.content for piece in pieces] == [ANSWERS["hunyuan_a13b"]]


# --- outputs -------------------------------------------------------------------------------------


def piece(text: str, *, index: int = 0, finished: bool = False) -> RequestOutput:
    choice = CompletionOutput(index, text, [ord(text)], None, None)
    return RequestOutput("r", None, None, None, [choice], finished)


def holding(letters: str, *, apart: bool) -> Collector:
    """A collector of a stream, in which an output for each letter waits."""
    collector = Collector(RequestOutputKind.DELTA, "r")
    if apart:
        collector.keep_apart()
    for letter in letters:
        collector.put(piece(letter))
    return collector


async def collected(collector: Collector, count: int) -> list[str]:
    got = [collector.get_nowait() or await collector.get() for _ in range(count)]
    assert collector.get_nowait() is None
    return [output.outputs[0].text for output in got]


@pytest.mark.asyncio
async def test_outputs_that_wait_stay_apart_and_in_order() -> None:
    collector = holding("abc", apart=True)
    assert await collected(collector, 3) == ["a", "b", "c"]
    collector.put(piece("d"))
    assert await collected(collector, 1) == ["d"]


@pytest.mark.asyncio
async def test_outputs_are_added_together_where_no_parser_reads() -> None:
    assert await collected(holding("abc", apart=False), 1) == ["abc"]


@pytest.mark.asyncio
async def test_nothing_comes_after_an_error() -> None:
    collector = holding("ab", apart=True)
    collector.put(RuntimeError("ended"))
    collector.put(piece("c"))
    with pytest.raises(RuntimeError, match="ended"):
        await collector.get()
    assert collector.get_nowait() is None


def test_only_the_last_of_the_split_tokens_ends_the_answer() -> None:
    whole = EngineCoreOutput("r", [1, 2, 3], finish_reason=EngineFinishReason.STOP, stop_reason=3)
    parts = split(whole)
    assert [part.new_token_ids for part in parts] == [[1], [2], [3]]
    assert [part.finish_reason for part in parts] == [None, None, EngineFinishReason.STOP]
    assert [part.stop_reason for part in parts] == [None, None, 3]


@pytest.mark.parametrize("tokens", [[], [7]])
def test_an_output_of_one_token_stays_as_it_is(tokens: list[int]) -> None:
    whole = EngineCoreOutput("r", tokens, finish_reason=EngineFinishReason.LENGTH)
    assert split(whole) == [whole]
