"""Thoughts and chosen calls through all official clients, the real daemon and its interpreter, of a
model that is made to think and to call (`tests.parrot`)."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

from tests.parrot import ANSWER, CITY, NIGHTS, THOUGHT
from tests.system.conftest import THINKER

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
LONG = 400


class Stay(BaseModel):
    city: Literal["Rome", "Bonn"]
    nights: Literal[1, 2, 3]


SCHEMA = Stay.model_json_schema()
BOOKED = Stay(city=CITY, nights=NIGHTS)
FUNCTION: Any = {"type": "function", "function": {"name": "book", "parameters": SCHEMA}}
TOOL: Any = {"name": "book", "input_schema": SCHEMA}


# --- OpenAI --------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [True, False])
def test_openai_s_thoughts(client: openai.OpenAI, thinks: bool) -> None:
    """Whole or streamed; a model that is told not to think only answers."""
    asked: Any = {"model": THINKER, "messages": HELLO}
    asked |= {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}}}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)

    message: Any = whole.choices[0].message
    thought = THOUGHT if thinks else None
    assert (getattr(message, "reasoning", None), message.content) == (thought, ANSWER)
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == (thought or "")
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert bool(whole.usage.completion_tokens_details.reasoning_tokens) is thinks


def test_openai_s_schema_behind_thoughts(client: openai.OpenAI) -> None:
    """The thoughts are free, the answer is not."""
    answer = client.chat.completions.parse(
        model=THINKER, messages=HELLO, response_format=Stay, max_tokens=LONG
    )

    message: Any = answer.choices[0].message
    assert message.reasoning == THOUGHT
    assert isinstance(message.parsed, Stay)


def test_openai_s_calls(client: openai.OpenAI) -> None:
    """The model chooses to call; with the result it answers. Responses tell the same."""
    asked: Any = {"model": THINKER, "tools": [FUNCTION]}
    whole = client.chat.completions.create(**asked, messages=HELLO)
    with client.chat.completions.stream(**asked, messages=HELLO) as events:
        streamed = events.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert answer.choices[0].finish_reason == "tool_calls"
        assert Stay.model_validate_json(call.function.arguments) == BOOKED
    said: Any = whole.choices[0].message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    end = client.chat.completions.create(**asked, messages=[*HELLO, said, result])
    tool: Any = {"type": "function", "name": "book", "parameters": SCHEMA, "strict": False}
    response = client.responses.create(model=THINKER, input="Hello", tools=[tool])
    thinking = client.responses.create(model=THINKER, input="Hello")

    assert end.choices[0].message.content == ANSWER
    (called,) = response.output
    assert called.type == "function_call"
    assert Stay.model_validate_json(called.arguments) == BOOKED
    assert [item.type for item in thinking.output] == ["reasoning", "message"]
    assert thinking.output_text == ANSWER


# --- Anthropic -----------------------------------------------------------------------------------


def test_anthropic_s_thoughts(claude: anthropic.Anthropic) -> None:
    """Blocks of their own, whole or streamed; sent back, they are taken."""
    asked: Any = {"model": THINKER, "max_tokens": 2000, "messages": HELLO}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    quiet = claude.messages.create(**(asked | {"thinking": {"type": "disabled"}}))
    back: Any = [*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
    again = claude.messages.create(**(asked | {"messages": back}))

    for answer in (whole, streamed, again):
        thought, text = answer.content
        assert thought.type == "thinking"
        assert text.type == "text"
        assert (thought.thinking, text.text) == (THOUGHT, ANSWER)
        assert answer.stop_reason == "end_turn"
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    (only,) = quiet.content
    assert only.type == "text"
    assert only.text == ANSWER


def test_anthropic_s_calls(claude: anthropic.Anthropic) -> None:
    """The model chooses to call, whole or streamed; with the result it answers."""
    asked: Any = {"model": THINKER, "max_tokens": LONG, "tools": [TOOL]}
    whole = claude.messages.create(**asked, messages=HELLO)
    with claude.messages.stream(**asked, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (used,) = answer.content
        assert used.type == "tool_use"
        assert (used.name, answer.stop_reason) == ("book", "tool_use")
        assert Stay.model_validate(used.input) == BOOKED
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
    turns: Any = [{"role": "assistant", "content": streamed.content}]
    turns.append({"role": "user", "content": [result]})
    end = claude.messages.create(**asked, messages=[*HELLO, *turns])

    assert [block.type for block in end.content] == ["thinking", "text"]


# --- Ollama --------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [True, False])
def test_ollama_s_thoughts(llama: ollama.Client, thinks: bool) -> None:
    """Of chats and plain generation, whole or streamed."""
    whole = llama.chat(THINKER, HELLO, think=thinks)
    lines = list(llama.chat(THINKER, HELLO, think=thinks, stream=True))
    generated = llama.generate(THINKER, "Hello, river", think=thinks)

    thought = THOUGHT if thinks else ""
    for said in (
        (whole.message.thinking, whole.message.content),
        (
            "".join(line.message.thinking or "" for line in lines),
            "".join(line.message.content or "" for line in lines),
        ),
        (generated.thinking, generated.response),
    ):
        assert (said[0] or "", said[1]) == (thought, ANSWER)
    assert whole.eval_count == lines[-1].eval_count == generated.eval_count


def test_ollama_s_calls(llama: ollama.Client) -> None:
    """The model chooses to call, whole or streamed; with the result it answers."""
    whole = llama.chat(THINKER, HELLO, tools=[FUNCTION])
    lines = list(llama.chat(THINKER, HELLO, tools=[FUNCTION], stream=True))
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        (call,) = calls or ()
        assert call.function.name == "book"
        assert Stay.model_validate(call.function.arguments) == BOOKED
    result = {"role": "tool", "tool_name": "book", "content": "done"}
    end = llama.chat(THINKER, [*HELLO, whole.message, result], tools=[FUNCTION])

    assert (end.message.thinking, end.message.content) == (THOUGHT, ANSWER)


def test_ollama_s_schema_behind_thoughts(llama: ollama.Client) -> None:
    """The thoughts are free, the answer is not."""
    answer = llama.chat(THINKER, HELLO, think=True, format=SCHEMA, options={"num_predict": LONG})

    assert answer.message.thinking == THOUGHT
    assert Stay.model_validate_json(answer.message.content or "")
