"""Ollama's official client and tools: what the model is told, what of its answer are calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from appliance.api.app import create_app
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.vocabulary import FinishReason

from .fake_service import FakeService, byte_level_encoder
from .serving import served, unserved
from .test_api_tools import TEMPLATE, saying

MODEL = "org/small"
HELLO: Any = [{"role": "user", "content": "hello"}]


def weather(city: str) -> str:
    """Tells it.

    Args:
      city: Where.
    """
    return city


@pytest.fixture
def service() -> FakeService:
    service = saying('so: [{"city": "Rome"}][]')
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    return service


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[ollama.AsyncClient]:
    async with (
        served(create_app(service)) as port,
        ollama.AsyncClient(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


def prompt(service: FakeService) -> str:
    return service.text.decode(service.submitted[-1].request.prompt)


async def test_calls(client: ollama.AsyncClient, service: FakeService) -> None:
    """Calls have objects for arguments; a function of Python's is a tool."""
    answer = await client.chat(model=MODEL, messages=HELLO, tools=[weather])

    assert (answer.message.content, answer.done_reason) == ("so: ", "stop")
    calls = answer.message.tool_calls or ()
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {}),
    ]
    (tool,) = service.interpretations[0].chat["tools"]
    assert tool["type"] == "function"
    assert tool["function"]["description"] == "Tells it."
    assert tool["function"]["parameters"]["required"] == ["city"]
    assert prompt(service) == "[weather]user:hello;"


async def test_streamed_calls(client: ollama.AsyncClient) -> None:
    """Every call comes at once, when it is whole, in a line that is not the last one."""
    stream = await client.chat(model=MODEL, messages=HELLO, tools=[weather], stream=True)
    *parts, last = [part async for part in stream]

    assert "".join(part.message.content or "" for part in parts) == "so: "
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Rome"}, {}]
    assert (last.done, last.done_reason, last.message.tool_calls) == (True, "stop", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off(
    client: ollama.AsyncClient, service: FakeService, stream: bool
) -> None:
    """It is none; those before it are."""
    service.script = lambda generation: generation.say("[{}][{", FinishReason.LENGTH)
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [weather]}
    answer: Any = await client.chat(**asked, stream=stream)
    parts = [part async for part in answer] if stream else [answer]

    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{}]
    assert parts[-1].done_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_none(
    client: ollama.AsyncClient, service: FakeService, stream: bool
) -> None:
    """What is no object is no call: the request failed."""
    service.script = saying("[oops]").script

    async def ask() -> list[Any]:
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": [weather]}
        answer: Any = await client.chat(**asked, stream=stream)
        return [part async for part in answer]

    with pytest.raises(ollama.ResponseError, match="without JSON"):
        await ask()


async def test_results_go_back(client: ollama.AsyncClient, service: FakeService) -> None:
    """The message of an answer is accepted as it came. Ollama's clients keep no ids: results get
    those of the calls of their tool, in order."""
    first = await client.chat(model=MODEL, messages=HELLO, tools=[weather])
    history: Any = [
        *HELLO,
        first.message,
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "tool", "content": "nowhere"},
        {"role": "tool", "content": "anything else"},
    ]
    await client.chat(model="small", messages=history)

    assert prompt(service) == (
        "user:hello;assistant:so: <weather Rome><weather >;"
        "tool:sunny#call_1_0;tool:nowhere#call_1_1;tool:anything else;"
    )


async def test_ids_are_kept(service: FakeService) -> None:
    """Calls have ids, which clients may send back."""
    function = {"name": "weather", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": False}
    body["tools"] = [{"type": "function", "function": function}]
    async with unserved(create_app(service)) as client:
        first = (await client.post("/api/chat", json=body)).json()["message"]
        result = {"role": "tool", "content": "no", "tool_call_id": first["tool_calls"][1]["id"]}
        other = {"role": "tool", "content": "yes"}
        body["messages"] = [*HELLO, first, result, other]
        answer = await client.post("/api/chat", json=body)

    assert answer.status_code == 200, answer.text
    assert [call["id"] for call in first["tool_calls"]] == ["call-0-0", "call-0-1"]
    assert prompt(service).endswith("tool:no#call-0-1;tool:yes#call-0-0;")
