"""Chats that may call tools: what the model is told, what of its answer are calls, what it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from appliance.api.app import create_app
from appliance.api.service import QueueFull, SubmitRequest
from appliance.engines.protocol import Guide, GuideKind
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.vocabulary import FinishReason

from .fake_service import FakeGeneration, FakeService, byte_level_encoder, small_tokenizer
from .serving import openai_client, unserved

MODEL = "org/small"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}{{ '#' ~ m.tool_call_id if m.tool_call_id }};{% endfor %}"
)


def saying(text: str, end: FinishReason = FinishReason.STOP) -> FakeService:
    """A service whose models say this, token by token, and the token that says stop."""

    def script(generation: FakeGeneration) -> None:
        generation.say(text, None)
        generation.feed([0], end)

    return FakeService(script)


@pytest.fixture
def service() -> FakeService:
    return saying("so: [one][two]")


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(create_app(service)) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HELLO, "tools": [TOOL], **fields}
    return await client.chat.completions.create(**fields)


async def test_calls(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """An answer is read as a whole: its calls, and what it says beside them."""
    answer = await ask(client, n=2)

    for index, choice in enumerate(answer.choices):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "so: "
        calls = choice.message.tool_calls
        assert [call.id for call in calls] == [f"call-{index}-0", f"call-{index}-1"]
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert [call.function.arguments for call in calls] == ["one", "two"]
    (interpretation,) = service.interpretations
    tokens = len(small_tokenizer().encode("so: [one][two]")) + 1
    assert interpretation.heard == [(i, "so: [one][two]", tokens, True) for i in range(2)]
    assert interpretation.ended


async def test_streamed_calls(client: openai.AsyncOpenAI) -> None:
    """The id and the name of a call come first, its arguments in pieces; OpenAI's client puts them
    together."""
    fields: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    async with client.chat.completions.stream(**fields) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        whole = await stream.get_final_completion()

    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [(d.index, d.id, d.type) for d in deltas if d.id] == [
        (0, "call-0-0", "function"),
        (1, "call-0-1", "function"),
    ]
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so: ")
    assert [c.function.arguments for c in choice.message.tool_calls or ()] == ["one", "two"]


async def test_an_answer_without_calls(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Who may call tools need not; and special tokens are not text to anybody else."""
    service.script = saying("hello").script
    answer = await ask(client)

    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "hello")
    assert choice.message.tool_calls is None


async def test_a_call_that_is_cut_off(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Too long is too long, with or without calls."""
    service.script = lambda generation: generation.say("[on", FinishReason.LENGTH)
    answer = await ask(client)

    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.tool_calls[0].function.arguments == "on"


@pytest.mark.parametrize("model", ["small", MODEL])
@pytest.mark.parametrize(
    ("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_to_call_is_guided(
    service: FakeService, model: str, choice: Any, finish: str, stream: bool
) -> None:
    """Also by models that could not choose; a tool that the client named ends with stop."""
    body = {"model": model, "messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    answer = await post(service, body | {"stream": stream})

    assert answer.status_code == 200, answer.text
    assert f'"finish_reason":"{finish}"' in answer.text
    assert '"name":"weather"' in answer.text
    (generation,) = service.submitted
    assert generation.request.sampling.guide == Guide(GuideKind.STRUCTURAL_TAG, "tag")


async def post(service: FakeService, body: dict[str, Any]) -> httpx.Response:
    async with unserved(create_app(service)) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_none_is_called(service: FakeService) -> None:
    """With "none" the model knows of the tools, and what it writes is text, to every model."""
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    body = {"model": "small", "messages": HELLO, "tools": [TOOL], "tool_choice": "none"}
    answer = await post(service, body)

    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "so: [one][two]"
    assert service.interpretations == []
    prompt = service.text.decode(service.submitted[0].request.prompt)
    assert prompt == "[weather]user:hello;"


async def test_a_conversation_with_calls_is_rendered(service: FakeService) -> None:
    """Calls of earlier turns reach the template with the values of their arguments, and results
    with the id of their call."""
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    answer = await post(service, {"model": "small", "messages": messages})

    assert answer.status_code == 200, answer.text
    prompt = service.text.decode(service.submitted[0].request.prompt)
    assert prompt == "user:hello;assistant:<weather Rome>;tool:sunny#c1;"


async def test_what_the_interpreter_is_told(service: FakeService) -> None:
    """The request as vLLM takes it, formats included."""
    schema = {"name": "x", "schema": {"type": "object"}}
    body = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    await post(service, body)

    (interpretation,) = service.interpretations
    chat = interpretation.chat
    assert chat["tools"] == [TOOL]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("auto", False)
    assert chat["response_format"] == body["response_format"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_that_fails_fails_its_request(service: FakeService, stream: bool) -> None:
    """With a code of its own; in the stream, if that had begun."""
    service.script = saying("so #").script
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "stream": stream}
    answer = await post(service, body)

    assert answer.status_code == (200 if stream else 500)
    assert '"code":"parser_failed"' in answer.text
    assert service.interpretations[0].ended


async def test_a_chat_that_is_refused(service: FakeService) -> None:
    """What vLLM does not accept is the client's fault."""
    tool = {"type": "function", "function": {"name": "refused"}}
    answer = await post(service, {"model": MODEL, "messages": HELLO, "tools": [tool]})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "nobody would call this" in error["message"]


async def test_a_chat_that_never_begins_is_not_read(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on reading when there is no room, or no guide."""

    def full(request: SubmitRequest) -> FakeGeneration:
        raise QueueFull(1.0)

    monkeypatch.setattr(service, "submit", full)
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    answers = [await post(service, body), await post(service, body | {"min_tokens": 2})]

    assert [answer.status_code for answer in answers] == [429, 400]
    assert [interpretation.ended > 0 for interpretation in service.interpretations] == [True, True]


async def test_who_waits_for_the_parser_reads() -> None:
    """Tokens that come while it works are no sign of a client that takes nothing."""
    service, begun, goes_on = FakeService(), asyncio.Event(), asyncio.Event()
    async with openai_client(create_app(service)) as client:
        asking = asyncio.create_task(ask(client, stream=True))
        generation = await service.arrivals.get()
        (interpretation,) = service.interpretations
        hear = interpretation.hear

        async def slowly(*said: Any) -> Any:
            begun.set()
            await goes_on.wait()
            return await hear(*said)

        interpretation.hear = slowly  # type: ignore[method-assign]
        generation.feed(small_tokenizer().encode("so"))
        await begun.wait()
        await generation.drained.wait()
        generation.drained.clear()
        generation.feed(small_tokenizer().encode("on " * 200))
        await generation.drained.wait()
        goes_on.set()
        generation.feed(small_tokenizer().encode("."), FinishReason.LENGTH)
        said = [chunk async for chunk in await asking]

    assert said[-1].choices[0].finish_reason == "length"
    assert generation.reads == []
