"""Parsers of models: vLLM's names, answers without tools, a call of a tool, and what fails."""

# ruff: noqa: RUF001  # tokens of DeepSeek have wide bars

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager

from appliance.checkpoints.parsers.choose import choose_parsers
from appliance.checkpoints.parsers.families import TOOL_FAMILIES
from appliance.checkpoints.parsers.names import AUTO, ParserKind, committed_names
from appliance.frontend.known_models import known_parsers
from appliance.frontend.serving.held_text import with_held_text
from appliance.frontend.serving.parsing.failures import (
    ParserFailed,
    adapt_parsers,
    naming_failures,
    with_usable_parsers,
)
from appliance.frontend.serving.parsing.without_tools import left_without_tools
from tests.frontend.conftest import like, model_at
from tests.frontend.stand_in_core import StandInCore, front_end

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'so <tool_call>{"name": "look", "arguments": {}}</tool_call>'
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{ \'<tool_call>{"name": "f", "arguments": {}}</tool_call>\' }}{% endif %}'
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Of the shape of Qwen's."""


@pytest.mark.parametrize("kind", ParserKind)
def test_the_committed_names_are_those_of_vllms_registry(kind: ParserKind) -> None:
    assert tuple(known_parsers()[kind]) == committed_names(kind)


# --- what `auto` chooses leaves answers without tools alone --------------------------------------


@pytest.fixture(scope="module")
def words(generator: Path) -> PreTrainedTokenizerBase:
    """Has the tokens that parsers of the table look for."""
    tokenizer = AutoTokenizer.from_pretrained(generator)
    marks = ["<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"]
    marks += ["[/THINK]", "<tool_call>", "</tool_call>"]
    for family in TOOL_FAMILIES:
        marks += [mark for mark in (*family.markers, family.token) if " " not in mark and mark]
    calls = [f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call") for end in ("begin", "end")]
    tokenizer.add_tokens([*dict.fromkeys([*marks, *calls])])
    return tokenizer


def without_tools(**fields: Any) -> ChatCompletionRequest:
    """None are sent, or none may be called."""
    fields |= {"model": "m", "messages": HELLO}
    return ChatCompletionRequest(**fields, tool_choice="none" if "tools" in fields else None)


def pieces(words: PreTrainedTokenizerBase, text: str) -> Iterator[tuple[str, list[int]]]:
    for token in words.encode(text, add_special_tokens=False):
        yield words.decode([token]), [token]


@pytest.mark.parametrize("text", ["one two", "<think>\none</think>\n\ntwo", "one < two [", "{one"])
@pytest.mark.parametrize("name", sorted({family.parser for family in TOOL_FAMILIES}))
@pytest.mark.parametrize("asked", [without_tools(), without_tools(tools=[TOOL])])
def test_an_answer_without_tools_is_as_without_a_parser(
    name: str, text: str, asked: ChatCompletionRequest, words: PreTrainedTokenizerBase
) -> None:
    held = with_held_text(ParserManager.get_parser(name, None, enable_auto_tools=True))
    assert held is not None
    parser = left_without_tools(held)
    before = asked.model_dump()

    assert parser(words, None).adjust_request(asked).model_dump() == before
    tokens = words.encode(text, add_special_tokens=False)
    whole = parser(words, None).parse(
        text, asked, enable_auto_tools=True, model_output_token_ids=tokens
    )
    streaming, streamed = parser(words, None), ""
    said = "".join(piece for piece, _ in pieces(words, text))
    for piece, ids in [*pieces(words, text), ("", [])]:
        delta = streaming.parse_delta(piece, ids, asked, [1], finished=not ids)
        streamed += (delta.content or "") if delta is not None else ""

    assert whole[:2] == (None, text)
    assert not whole[2]
    assert streamed == said


THOUGHTS = ["one two", "<think>\none</think>\n\ntwo", "one</think><tool_call>two", "<think>o < n["]


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral"])
@pytest.mark.parametrize("name", sorted({family.parser for family in TOOL_FAMILIES}))
@pytest.mark.parametrize("asked", [without_tools(), without_tools(tools=[TOOL])])
def test_reasoning_without_tools_is_read_as_without_a_tool_parser(
    name: str, reasoning: str, asked: ChatCompletionRequest, words: PreTrainedTokenizerBase
) -> None:
    """Requests are changed, and answers read in one piece and in a stream, as vLLM does with the
    reasoning parser alone."""
    alone = ParserManager.get_parser(None, reasoning)
    both = with_held_text(ParserManager.get_parser(name, reasoning, enable_auto_tools=True))
    assert alone is not None
    assert both is not None
    ours = left_without_tools(both)
    changed = [
        kind(words, asked.tools).adjust_request(asked.model_copy(deep=True)).model_dump()
        for kind in (alone, ours)
    ]
    assert changed[0] == changed[1]
    for text in THOUGHTS:
        tokens = words.encode(text, add_special_tokens=False)
        read = [
            kind(words, asked.tools).parse(
                text, asked, enable_auto_tools=True, model_output_token_ids=tokens
            )[:2]
            for kind in (alone, ours)
        ]
        assert read[0] == read[1]
        streams = [kind(words, asked.tools) for kind in (alone, ours)]
        for piece, ids in [*pieces(words, text), ("", [])]:
            deltas = [
                stream.parse_delta(piece, ids, asked, [1], finished=not ids) for stream in streams
            ]
            assert deltas[0] == deltas[1]


@pytest.mark.parametrize("asked", [without_tools(), without_tools(tools=[TOOL])])
def test_the_renderer_leaves_requests_without_tools_alone(
    asked: ChatCompletionRequest, words: PreTrainedTokenizerBase, generator: Path
) -> None:
    """It is what has a parser change requests: this one fails if it is asked."""
    renderer, chat = SimpleNamespace(parser=Failing), SimpleNamespace(parser_cls=Failing)
    state: Any = SimpleNamespace(
        openai_serving_chat=chat,
        openai_serving_chat_batch=None,
        anthropic_serving_messages=None,
        openai_serving_responses=None,
        online_renderer=renderer,
    )

    adapt_parsers(state, model_at(generator, "llama-a", tool_parser="hermes"))

    for parser in (renderer.parser, chat.parser_cls):
        assert parser(words).adjust_request(asked) is asked


# --- a call of a tool ----------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(generator: Path) -> AsyncIterator[StandInCore]:
    """`caller` has the parser that `auto` stands for, and `mute` none, since its template has no
    tools; `wrong` has one that its tokenizer cannot have, and so has `unlucky`, by `auto`. All say
    the same."""
    caller = like(generator, generator.parent / "caller", model_type="qwen2")
    edited = json.loads((caller / "tokenizer_config.json").read_text(encoding="utf-8"))
    edited["chat_template"] = TEMPLATE
    (caller / "tokenizer_config.json").write_text(json.dumps(edited), encoding="utf-8")
    served = [
        model_at(generator, name, tool_parser=choose_parsers(path, AUTO, AUTO).tools.name or None)
        for name, path in (("caller", caller), ("mute", generator))
    ]
    served.append(model_at(generator, "wrong", tool_parser="mistral"))
    served.append(model_at(generator, "unlucky", tool_parser="mistral", tool_parser_is_auto=True))
    async with front_end(served) as core:
        tokens = Tokenizer.from_file(str(generator / "tokenizer.json"))
        core.saying = lambda submit: tokens.encode(CALL, add_special_tokens=False).ids
        yield core


async def ask(core: StandInCore, model: str, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
    answer = await client.chat.completions.create(model=model, messages=HELLO, **fields)
    return answer.choices[0].message


@pytest.mark.asyncio(loop_scope="module")
class TestFrontEnd:
    async def test_the_chosen_parser_reads_a_call(self, core: StandInCore) -> None:
        message = await ask(core, "caller", tools=[TOOL])
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", "{}")
        assert message.content == "so "

    @pytest.mark.parametrize("model", ["caller", "mute", "unlucky"])
    async def test_without_tools_all_of_it_is_content(self, core: StandInCore, model: str) -> None:
        message = await ask(core, model)
        assert (message.content, message.tool_calls) == (CALL, None)

    @pytest.mark.parametrize("model", ["mute", "unlucky"])
    async def test_without_a_parser_tools_are_refused_by_the_name_of_the_key(
        self, core: StandInCore, model: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match="tool_parser"):
            await ask(core, model, tools=[TOOL])

    async def test_a_parser_that_cannot_have_the_tokenizer_is_named(
        self, core: StandInCore
    ) -> None:
        with pytest.raises(openai.InternalServerError) as told:
            await ask(core, "wrong")
        assert 'tool_parser = "mistral" cannot be used with the tokenizer of wrong' in str(
            told.value
        )
        assert 'use "auto"' in str(told.value)


def test_a_parser_of_auto_that_the_tokenizer_refuses_is_left_out_and_logged(
    words: PreTrainedTokenizerBase, generator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name is refused, and a parser that can be used stays."""
    plain = AutoTokenizer.from_pretrained(generator)
    model = model_at(generator, "m", tool_parser="mistral", tool_parser_is_auto=True)
    with caplog.at_level(logging.WARNING):
        assert with_usable_parsers(model, plain).tool_parser is None
    assert 'tool_parser = "auto" means "mistral" for m' in caplog.text
    assert "served without tools" in caplog.text
    with pytest.raises(ParserFailed, match='use "auto"'):
        with_usable_parsers(model_at(generator, "m", tool_parser="mistral"), plain)
    usable = model_at(generator, "m", tool_parser="hermes", tool_parser_is_auto=True)
    assert with_usable_parsers(usable, words) == usable


# --- failures ------------------------------------------------------------------------------------


class Failing(Parser):  # type: ignore[misc]  # vLLM has no types
    """Fails in every way that a parser may."""

    def adjust_request(self, request: Any) -> Any:
        raise ValueError("of the client")

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such brace")

    def parse_delta(self, *args: Any, **kwargs: Any) -> Any:
        raise RecursionError("maximum recursion depth exceeded")


def test_a_parser_that_fails_is_logged_with_its_name_and_its_model(
    words: PreTrainedTokenizerBase, generator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_at(generator, "llama-a", tool_parser="hermes", reasoning_parser="qwen3")
    parser = naming_failures(Failing, model)(words)
    message = (
        'tool_parser "hermes" or reasoning_parser "qwen3" of the model llama-a failed: ValueError: '
        "no such brace"
    )
    with caplog.at_level(logging.ERROR), pytest.raises(ParserFailed, match="no such brace"):
        parser.parse("text", None)
    (record,) = caplog.records
    assert record.getMessage() == message
    assert record.__dict__["fields"] == {"model": "llama-a"}


def test_what_is_the_clients_fault_stays_as_it_is(
    words: PreTrainedTokenizerBase, generator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parser = naming_failures(Failing, model_at(generator, "llama-a", tool_parser="hermes"))(words)
    with pytest.raises(ValueError, match="of the client"):
        parser.adjust_request(None)
    with pytest.raises(RecursionError):
        parser.parse_delta("text", [1], None, finished=True)
    assert not caplog.records
