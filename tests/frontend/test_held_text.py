"""A streamed answer says all that the same answer says in one piece, whatever its tool parser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager

from appliance.frontend.serving.held_text import with_held_text
from appliance.vocabulary import FinishReason
from tests.frontend.conftest import model_at
from tests.frontend.stand_in_core import StandInCore, front_end

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
LEGACY = [
    *("apertus", "dots", "functiongemma", "granite4", "hermes", "hunyuan_a13b", "kimi_k3"),
    *("llama4_pythonic", "longcat", "muse_glimmer", "olmo3", "phi4_mini_json", "pythonic"),
    *("qwen3_json", "step3", "xlam"),
]
"""Parsers that lose text in vLLM 0.32 and can be built with any tokenizer."""


# --- parsers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(generator: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(generator)


def composed(name: str) -> type[Parser]:
    parser = with_held_text(ParserManager.get_parser(name, None, enable_auto_tools=True))
    assert parser is not None
    return parser


def request(**changes: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": TOOL}]
    settings: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": tools} | changes
    return ChatCompletionRequest(**settings)


def streamed(
    name: str, words: PreTrainedTokenizerBase, text: str, asked: ChatCompletionRequest
) -> tuple[str, int]:
    """The content of a stream that gets a letter at a time, and how many calls begin in it."""
    parser = composed(name)(words, asked.tools)
    content, calls = "", 0
    pieces = [(letter, False) for letter in text] + [("", True)]
    for piece, finished in pieces:
        tokens = words.encode(piece, add_special_tokens=False)
        delta = parser.parse_delta(piece, tokens, asked, [1], finished=finished)
        if delta is not None:
            content += delta.content or ""
            calls += sum(call.id is not None for call in delta.tool_calls)
    return content, calls


@pytest.mark.parametrize("text", ["one two <", "<", "[one", "{one two", "a <tool_ca", "a <|tool"])
@pytest.mark.parametrize("name", LEGACY)
def test_no_parser_loses_text(name: str, text: str, words: PreTrainedTokenizerBase) -> None:
    asked = request(tool_choice="auto")
    _, content, calls = composed(name)(words, asked.tools).parse(
        text, asked, enable_auto_tools=True
    )
    assert not calls
    assert streamed(name, words, text, asked) == (content, 0)


@pytest.mark.parametrize("text", [CALL, f"so {CALL}", f"so {CALL}{CALL}"])
def test_a_calls_text_is_not_content(text: str, words: PreTrainedTokenizerBase) -> None:
    said, calls = streamed("hermes", words, text, request(tool_choice="auto"))
    assert said == text.partition("<")[0]
    assert calls == text.count("<tool_call>")


@pytest.mark.parametrize("choice", ["none", None])
def test_without_a_choice_all_text_is_content(
    choice: str | None, words: PreTrainedTokenizerBase
) -> None:
    asked = request(tool_choice="none", tools=None)
    asked.tool_choice = choice  # type: ignore[assignment]  # as vLLM's Anthropic messages do
    assert streamed("hermes", words, "one <", asked) == ("one <", 0)


@pytest.mark.parametrize("name", ["granite4", "xlam"])
def test_the_text_of_a_required_call_is_not_content(
    name: str, words: PreTrainedTokenizerBase
) -> None:
    asked = request(tool_choice="required")
    for text in ('[{"name": "look", "parameters": {}', '[{"na'):
        assert streamed(name, words, text, asked)[0] == ""


def test_a_required_call_in_the_models_own_words_loses_no_text(
    words: PreTrainedTokenizerBase,
) -> None:
    asked = request(tool_choice="required")
    assert streamed("hermes", words, "one <", asked) == ("one <", 0)
    assert streamed("hermes", words, f"one {CALL}", asked) == ("one ", 1)


def test_parsers_that_vllm_flushes_stay_as_they_are() -> None:
    parser = ParserManager.get_parser("qwen3_coder", None, enable_auto_tools=True)
    assert with_held_text(parser) is parser
    thinking = ParserManager.get_parser(None, "deepseek_r1")
    assert with_held_text(thinking) is thinking
    assert with_held_text(None) is None


# --- dialects ------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(generator: Path) -> AsyncIterator[StandInCore]:
    """Every answer of its model ends in the middle of what may be a call."""
    async with front_end([model_at(generator, "caller", tool_parser="hermes")]) as core:
        tokens = Tokenizer.from_file(str(generator / "tokenizer.json"))
        said = tokens.encode("one two <", add_special_tokens=False).ids
        core.saying = lambda submit: said
        core.ending = lambda submit: FinishReason.LENGTH
        yield core


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tools", [True, False])
class TestDialects:
    async def test_chat(self, core: StandInCore, tools: bool) -> None:
        client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "caller", "messages": HELLO, "max_tokens": 9, "stream": True}
        if tools:
            asked["tools"] = [{"type": "function", "function": TOOL}]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two <"
        assert chunks[-1].choices[0].finish_reason == "length"

    async def test_responses(self, core: StandInCore, tools: bool) -> None:
        client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "caller", "input": "hello", "max_output_tokens": 9, "stream": True}
        if tools:
            asked["tools"] = [{"type": "function", **TOOL}]
        events = [event async for event in await client.responses.create(**asked)]
        text = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(text) == "one two <"
        assert events[-1].response.output_text == "one two <"

    async def test_messages(self, core: StandInCore, tools: bool) -> None:
        client = anthropic.AsyncAnthropic(base_url=core.url, api_key="none", max_retries=0)
        asked: Any = {"model": "caller", "messages": HELLO, "max_tokens": 9}
        if tools:
            asked["tools"] = [{"name": "look", "input_schema": TOOL["parameters"]}]
        async with client.messages.stream(**asked) as stream:
            assert await stream.get_final_text() == "one two <"

    async def test_ollama(self, core: StandInCore, tools: bool) -> None:
        client = ollama.AsyncClient(core.url)
        asked: Any = {"model": "caller", "messages": HELLO, "stream": True}
        if tools:
            asked["tools"] = [{"type": "function", "function": TOOL}]
        parts = [part async for part in await client.chat(**asked)]
        assert "".join(part.message.content or "" for part in parts) == "one two <"
