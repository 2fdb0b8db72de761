"""OpenAI's client drives ``/v1/responses``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from appliance.api.app import create_app
from appliance.api.service import GenerationFailed
from appliance.engines.protocol import GuideKind
from appliance.vocabulary import FinishReason

from .fake_service import FakeGeneration, FakeService, small_tokenizer
from .serving import openai_client


def saying(text: str) -> FakeService:
    def script(generation: FakeGeneration) -> None:
        generation.say(text, None)
        generation.feed([0], FinishReason.STOP)

    return FakeService(script)


@pytest.fixture
def service() -> FakeService:
    return saying("hello world")


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(create_app(service)) as client:
        yield client


async def test_a_response(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Instructions and input become a chat; the answer is one message, with its tokens counted."""
    answer = await client.responses.create(
        model="small", input="hello", instructions="be brief", max_output_tokens=9, store=False
    )

    (generation,) = service.submitted
    prompt = small_tokenizer().decode(generation.request.prompt)
    assert prompt == "<|system|>be brief<|user|>hello<|assistant|>"
    assert generation.request.sampling.max_tokens == 9
    assert (answer.status, answer.output_text, answer.instructions) == (
        "completed",
        "hello world",
        "be brief",
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(generation.request.prompt)


async def test_a_conversation(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Messages are sent along, an earlier answer as it came."""
    first = await client.responses.create(model="small", input="hello")
    again: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        first.output[0].model_dump(mode="json", exclude_none=True),
        {"role": "user", "content": "and?"},
    ]
    await client.responses.create(model="small", input=again)

    prompt = small_tokenizer().decode(service.submitted[1].request.prompt)
    assert prompt == "<|user|>hello<|assistant|>hello world<|user|>and?<|assistant|>"


async def test_typed_events(client: openai.AsyncOpenAI) -> None:
    """Events are numbered, nested as OpenAI has them, and make the whole answer."""
    events = [
        e async for e in await client.responses.create(model="small", input="hello", stream=True)
    ]

    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.completed"
    assert "".join(deltas) == last.response.output_text == "hello world"
    assert last.response.usage is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off(
    client: openai.AsyncOpenAI, service: FakeService, stream: bool
) -> None:
    """It is incomplete, and says why."""
    service.script = lambda generation: generation.say("hello", FinishReason.LENGTH)
    fields: Any = {"model": "small", "input": "hello"}
    if stream:
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        assert events[-1].type == "response.incomplete"
        answer = events[-1].response
    else:
        answer = await client.responses.create(**fields)

    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_a_failure_in_the_stream(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """What fails after the first event is told as the last one."""
    service.script = lambda generation: generation.fail(GenerationFailed("lost", "it is lost"))
    stream = await client.responses.create(model="small", input="hello", stream=True)
    events = [event async for event in stream]

    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "it is lost"


class Answer(BaseModel):
    a: str


async def test_a_format(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """The client's class is a guide."""
    service.script = saying('{"a": "b"}').script
    answer = await client.responses.parse(model="small", input="hi", text_format=Answer)

    assert answer.output_parsed == Answer(a="b")
    guide = service.submitted[0].request.sampling.guide
    assert guide is not None
    assert guide.kind is GuideKind.JSON
    assert json.loads(guide.text)["required"] == ["a"]


IMPOSSIBLE = {"type": "json_schema", "name": "x", "schema": {"type": "impossible"}}
TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs.tools"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"max_output_tokens": 10_000}, "input"),
        ({"text": {"format": IMPOSSIBLE}}, "text.format.schema"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    client: openai.AsyncOpenAI, service: FakeService, fields: Any, param: str | None
) -> None:
    """In the words of this endpoint."""
    body: Any = {"model": "small", "input": "hello", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**body)

    assert caught.value.param == (param or "input[0].content[0].type")
    assert service.submitted == []
