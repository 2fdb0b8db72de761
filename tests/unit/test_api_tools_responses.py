"""OpenAI's client, tools and reasoning at ``/v1/responses``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from appliance.api.app import create_app
from appliance.engines.protocol import Guide, GuideKind
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.vocabulary import FinishReason

from .fake_service import FakeService, byte_level_encoder
from .serving import openai_client
from .test_api_tools import saying

MODEL = "org/small"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
ASKED: Any = {"model": MODEL, "input": "hello", "tools": [TOOL]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}"
    "{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}{{ '#' ~ m.tool_call_id if m.tool_call_id }};{% endfor %}{{ more }}"
)


@pytest.fixture
def service() -> FakeService:
    said = saying('(hm)so: [{"city": "Rome"}][{}]').script
    service = FakeService(said, reasons=True)
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    return service


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(create_app(service)) as client:
        yield client


def prompt(service: FakeService) -> str:
    return service.text.decode(service.submitted[-1].request.prompt)


async def whole(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """The answer, or what the client makes of the last event."""
    answer: Any = await client.responses.create(**ASKED | fields, stream=stream)
    if not stream:
        return answer
    return [event async for event in answer][-1].response


@pytest.mark.parametrize("stream", [False, True])
async def test_items(client: openai.AsyncOpenAI, service: FakeService, stream: bool) -> None:
    """Thoughts, then a message, then every call is an item of its own, with an id of its own."""
    answer = await whole(client, stream)

    thought, message, *calls = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (message.type, answer.output_text) == ("message", "so: ")
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "weather", '{"city": "Rome"}'),
        ("function_call", "weather", "{}"),
    ]
    assert [call.call_id for call in calls] == ["call-0-0", "call-0-1"]
    assert len({item.id for item in answer.output}) == 4
    assert {item.status for item in answer.output} == {"completed"} == {answer.status}
    assert answer.usage.output_tokens_details.reasoning_tokens == len("hm")
    assert [tool.name for tool in answer.tools] == ["weather"]
    (tool,) = service.interpretations[0].chat["tools"]
    assert tool["function"]["description"] == "Tells it."


async def test_typed_events(client: openai.AsyncOpenAI) -> None:
    """Items are added and done one after another, with the deltas of their kind between."""
    stream = await client.responses.create(**ASKED, stream=True)
    events: list[Any] = [event async for event in stream]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    parted = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert distinct == [
        "created",
        "in_progress",
        *parted,
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *parted,
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *(*call, "output_item.done"),
        *(*call, "output_item.done"),
        "completed",
    ]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.arguments) for event in done] == [
        (2, '{"city": "Rome"}'),
        (3, "{}"),
    ]
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(e.delta for e in deltas if e.item_id == done[0].item_id) == done[0].arguments


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off(
    client: openai.AsyncOpenAI, service: FakeService, stream: bool
) -> None:
    """The item says so, and so does the response."""
    service.script = lambda generation: generation.say('[{"ci', FinishReason.LENGTH)
    answer = await whole(client, stream)

    (call,) = answer.output
    assert (call.arguments, call.status, answer.status) == ('{"ci', "incomplete", "incomplete")


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("auto", "auto"),
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
    ],
)
async def test_choices(
    client: openai.AsyncOpenAI, service: FakeService, choice: Any, told: Any
) -> None:
    """Who has to call is guided."""
    answer = await client.responses.create(**ASKED, tool_choice=choice, parallel_tool_calls=False)

    chat = service.interpretations[0].chat
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (told, False)
    assert answer.parallel_tool_calls is False
    guide = service.submitted[0].request.sampling.guide
    assert guide == (None if told == "auto" else Guide(GuideKind.STRUCTURAL_TAG, "tag"))


async def test_items_go_back(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """The output of an answer is accepted as it came, and is one message of the assistant; outputs
    of calls are messages of the tool."""
    first = await client.responses.create(**ASKED)
    output = [item.model_dump(mode="json", exclude_none=True) for item in first.output]
    again: Any = [
        {"role": "user", "content": "hello"},
        *output,
        {"type": "function_call_output", "call_id": "call-0-0", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "call-0-1",
            "output": [{"type": "input_text", "text": "no city"}],
        },
        output[2],
        {"role": "user", "content": "well?"},
    ]
    variables: Any = {"chat_template_kwargs": {"more": "more;"}}
    await client.responses.create(**ASKED | {"input": again}, extra_body=variables)

    assert prompt(service) == (
        "user:hello;assistant(hm):so: <weather Rome><weather >;"
        "tool:sunny#call-0-0;tool:no city#call-0-1;assistant:<weather Rome>;user:well?;more;"
    )
