"""Anthropic's official client drives the API: what it sends is understood, what it gets it can
read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from appliance.api.app import create_app
from appliance.api.service import GenerationFailed
from appliance.engines.protocol import GuideKind
from appliance.vocabulary import FinishReason

from .fake_service import FakeGeneration, FakeService, small_tokenizer
from .serving import anthropic_client

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "hello world, one two"


@pytest.fixture
def service() -> FakeService:
    return FakeService(lambda generation: generation.say(TEXT))


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(create_app(service)) as client:
        yield client


def stopping(generation: FakeGeneration) -> None:
    """Say a word, then the token that says stop."""
    generation.say("hello", None)
    generation.feed([0], FinishReason.STOP)


def prompt(service: FakeService) -> str:
    return small_tokenizer().decode(service.submitted[-1].request.prompt)


async def test_a_message(client: anthropic.AsyncAnthropic, service: FakeService) -> None:
    """A conversation is rendered by the template, answered, and its tokens counted."""
    service.script = stopping
    answer = await client.messages.create(
        model="small",
        max_tokens=9,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ],
        metadata={"user_id": "u"},
        stop_sequences=["zzz"],
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 4},
    )

    request = service.submitted[0].request
    assert (
        prompt(service) == "<|system|>be brief<|user|>one<|assistant|>two<|user|>three<|assistant|>"
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.5)
    assert (sampling.top_p, sampling.top_k) == (0.25, 4)
    assert (answer.id, answer.type, answer.role) == (request.id, "message", "assistant")
    assert answer.id.startswith("msg_")
    assert answer.model == "small"
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "hello")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    spoken = len(small_tokenizer().encode("hello"))
    assert answer.usage.input_tokens == len(request.prompt)
    assert answer.usage.output_tokens == spoken + 1


async def test_an_answer_can_be_sent_back(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """The content of an answer is accepted as part of the next request."""
    first = await client.messages.create(model="small", max_tokens=50, messages=HELLO)
    history: Any = [*HELLO, {"role": "assistant", "content": first.content}, *HELLO]
    await client.messages.create(model="small", max_tokens=50, messages=history)

    assert f"<|assistant|>{TEXT}<|user|>" in prompt(service)


async def test_the_events_of_a_stream(client: anthropic.AsyncAnthropic) -> None:
    """Typed events in Anthropic's order, each as its name says, around the text of one block."""
    stream = await client.messages.create(
        model="org/small", max_tokens=50, messages=HELLO, stream=True
    )
    events = [event async for event in stream]

    start, block, *deltas, block_stop, delta, stop = events
    assert start.type == "message_start"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.input_tokens == len(small_tokenizer().render_chat(HELLO))
    assert (block.type, block_stop.type) == ("content_block_start", "content_block_stop")
    assert {event.type for event in deltas} == {"content_block_delta"}
    assert "".join(event.delta.text for event in deltas) == TEXT  # type: ignore[union-attr]
    assert delta.type == "message_delta"
    assert delta.delta.stop_reason == "max_tokens"
    assert delta.usage.output_tokens == len(small_tokenizer().encode(TEXT))
    assert stop.type == "message_stop"


async def test_the_clients_own_accumulation(client: anthropic.AsyncAnthropic) -> None:
    """What the client makes of a stream is the message that it gets without one."""
    async with client.messages.stream(model="small", max_tokens=50, messages=HELLO) as stream:
        streamed = await stream.get_final_message()
    whole = await client.messages.create(model="small", max_tokens=50, messages=HELLO)

    assert streamed.content[0].text == whole.content[0].text == TEXT  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(
    client: anthropic.AsyncAnthropic, service: FakeService, stream: bool
) -> None:
    """Text ends before a stop sequence, and the answer says which one it was."""
    service.script = lambda generation: generation.say("one two three and on", None)
    asked: Any = {"model": "small", "max_tokens": 50, "messages": HELLO}
    asked |= {"stop_sequences": ["zzz", "o th"]}
    if stream:
        async with client.messages.stream(**asked) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**asked)

    assert answer.content[0].text == "one tw"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "o th")
    assert service.submitted[0].reason == FinishReason.STOP


async def test_an_answer_of_a_schema(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """A format of the output guides it, and is no part of the prompt."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked: Any = {"model": "small", "messages": HELLO}
    asked |= {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    answer = await client.messages.create(**asked, max_tokens=50)
    counted = await client.messages.count_tokens(**asked)

    guide = service.submitted[0].request.sampling.guide
    assert guide is not None
    assert (guide.kind, json.loads(guide.text)) == (GuideKind.JSON, schema)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_a_limit_beyond_the_context(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """More tokens than fit may be asked for; an answer that fills the context says so."""
    answer = await client.messages.create(model="small", max_tokens=8000, messages=HELLO)

    request = service.submitted[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 200
    assert answer.stop_reason == "model_context_window_exceeded"


async def test_counted_tokens_are_those_of_the_usage(client: anthropic.AsyncAnthropic) -> None:
    """What is counted beforehand is what the answer's usage says, and needs no room."""
    asked: Any = {"model": "small", "messages": HELLO, "system": "be brief"}
    counted = await client.messages.count_tokens(**asked)
    answer = await client.messages.create(**asked, max_tokens=5)
    long = await client.messages.count_tokens(
        model="small", messages=[{"role": "user", "content": "hello " * 300}]
    )

    assert counted.input_tokens == answer.usage.input_tokens
    assert long.input_tokens > 200


async def test_errors_are_anthropics(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """Each status has its exception, its type, and the id of the request."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="none", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError) as too_long:
        await client.messages.create(
            model="small", max_tokens=5, messages=[{"role": "user", "content": "hello " * 300}]
        )
    service.room = 0
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(model="small", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.batches.list()

    for caught, kind in (
        (missing, "not_found_error"),
        (too_long, "invalid_request_error"),
        (full, "rate_limit_error"),
        (unknown, "not_found_error"),
    ):
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["request_id"] == caught.value.response.headers["x-request-id"]
        assert caught.value.request_id == body["request_id"]
    assert full.value.response.headers["retry-after"] == "2"


async def test_a_failure_in_a_stream_is_its_last_event(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """Text that came before the failure is delivered; then the client raises."""

    def failing(generation: FakeGeneration) -> None:
        generation.feed(small_tokenizer().encode("one"))
        generation.fail(GenerationFailed("no_way", "sorry", 503))

    service.script = failing
    async with client.messages.stream(model="small", max_tokens=50, messages=HELLO) as stream:
        first = await anext(stream.text_stream)
        with pytest.raises(anthropic.APIStatusError, match="sorry") as caught:
            await anext(stream.text_stream)

    assert first == "one"
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


async def test_leaving_a_stream_cancels(
    client: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """A client that has had enough takes its request with it."""
    service.script = lambda generation: generation.say("one", None)
    async with client.messages.stream(model="small", max_tokens=50, messages=HELLO) as stream:
        assert await anext(stream.text_stream) == "one"
    await service.submitted[0].cancelled.wait()

    assert service.submitted[0].reason == FinishReason.CANCELLED
