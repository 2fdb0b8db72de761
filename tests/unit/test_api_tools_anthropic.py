"""Anthropic's official client and tools: what the model is told, what of its answer are calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from appliance.api.app import create_app
from appliance.engines.protocol import Guide, GuideKind
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.vocabulary import FinishReason

from .fake_service import FakeService, byte_level_encoder
from .serving import anthropic_client, unserved
from .test_api_tools import TEMPLATE, saying

MODEL = "org/small"
HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
ASKED: Any = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "tools": [TOOL]}
CALLS = 'so: [{"city": "Rome"}][]'


@pytest.fixture
def service() -> FakeService:
    service = saying(CALLS)
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    return service


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(create_app(service)) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await client.messages.create(**ASKED | fields)
    async with client.messages.stream(**ASKED | fields) as events:
        return await events.get_final_message()


def prompt(service: FakeService) -> str:
    return service.text.decode(service.submitted[-1].request.prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls(client: anthropic.AsyncAnthropic, service: FakeService, stream: bool) -> None:
    """Text, then a block for each call, with what the model gave it as an object."""
    answer = await ask(client, stream)

    text, *calls = answer.content
    assert (text.type, text.text) == ("text", "so: ")
    assert [call.type for call in calls] == ["tool_use", "tool_use"]
    assert [call.id for call in calls] == ["call-0-0", "call-0-1"]
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {}),
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    (interpretation,) = service.interpretations
    assert interpretation.chat["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells it.",
                "parameters": SCHEMA,
            },
        }
    ]
    assert interpretation.ended
    assert prompt(service) == "[weather]user:hello;"


async def test_the_events_of_a_stream(client: anthropic.AsyncAnthropic) -> None:
    """Blocks are numbered and closed one after another; input comes in pieces of JSON."""
    stream = await client.messages.create(**ASKED, stream=True)
    events = [event async for event in stream]

    kinds = [
        (event.type, event.index)
        for event in events
        if event.type in ("content_block_start", "content_block_stop")
    ]
    assert kinds == [
        (f"content_block_{edge}", index) for index in range(3) for edge in ("start", "stop")
    ]
    deltas = [event for event in events if event.type == "content_block_delta"]
    assert {(event.index, event.delta.type) for event in deltas} == {
        (0, "text_delta"),
        (1, "input_json_delta"),
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_calls(
    client: anthropic.AsyncAnthropic, service: FakeService, stream: bool
) -> None:
    """Who may call tools need not."""
    service.script = saying("hello").script
    answer = await ask(client, stream)

    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off(
    client: anthropic.AsyncAnthropic, service: FakeService, stream: bool
) -> None:
    """It is a limit that ended it; what there is of the input is not made up."""
    service.script = lambda generation: generation.say('[{"city', FinishReason.LENGTH)
    answer = await ask(client, stream)

    assert answer.stop_reason == "max_tokens"
    (call,) = answer.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {})


async def test_input_that_is_none(client: anthropic.AsyncAnthropic, service: FakeService) -> None:
    """What is no object is no input: the request failed."""
    service.script = saying("[oops]").script
    with pytest.raises(anthropic.InternalServerError, match="without JSON"):
        await client.messages.create(**ASKED)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
    ],
)
@pytest.mark.parametrize("single", [None, False, True])
async def test_choices(
    client: anthropic.AsyncAnthropic, service: FakeService, choice: Any, told: Any, single: Any
) -> None:
    """Who has to call is guided, and ends with a call also if the client named the tool."""
    if single is not None:
        choice = choice | {"disable_parallel_tool_use": single}
    answer = await client.messages.create(**ASKED, tool_choice=choice)

    chat = service.interpretations[0].chat
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (told, not single)
    assert answer.stop_reason == "tool_use"
    guide = service.submitted[0].request.sampling.guide
    assert guide == (None if told == "auto" else Guide(GuideKind.STRUCTURAL_TAG, "tag"))


async def test_none_is_called(client: anthropic.AsyncAnthropic, service: FakeService) -> None:
    """The model knows of the tools, and what it writes is text."""
    asked = ASKED | {"model": "small", "tool_choice": {"type": "none"}}
    answer = await client.messages.create(**asked)

    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", CALLS, "end_turn")
    assert service.interpretations == []
    assert prompt(service) == "[weather]user:hello;"


async def test_results_go_back(client: anthropic.AsyncAnthropic, service: FakeService) -> None:
    """The content of an answer is accepted as it came; results reach the template as messages of
    the role tool, before what the user says to them; and all of it is counted."""
    first = await client.messages.create(**ASKED)
    results = [
        {"type": "tool_result", "tool_use_id": "call-0-0", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "call-0-1",
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}],
            "is_error": True,
        },
        {"type": "tool_result", "tool_use_id": "call-0-2"},
        {"type": "text", "text": "well?"},
    ]
    history = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    asked = ASKED | {"messages": history}
    second = await client.messages.create(**asked)
    del asked["max_tokens"]
    counted = await client.messages.count_tokens(**asked)

    assert prompt(service) == (
        "[weather]user:hello;assistant:so: <weather Rome><weather >;"
        "tool:sunny#call-0-0;tool:no\ncity#call-0-1;tool:#call-0-2;user:well?;"
    )
    assert counted.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "small"}, "tool_choice: small cannot choose"),
        ({"tools": [TOOL, TOOL]}, "two functions have the same name"),
        ({"tool_choice": {"type": "tool", "name": "nowhere"}}, "tool_choice.name: no such"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL | {"name": "refused"}]}, "nobody would call this"),
    ],
)
async def test_refusals(service: FakeService, fields: Any, said: str) -> None:
    """In Anthropic's words."""
    async with unserved(create_app(service)) as client:
        answer: httpx.Response = await client.post("/v1/messages", json=ASKED | fields)

    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert service.submitted == []
