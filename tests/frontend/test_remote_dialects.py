"""Anthropic's and Ollama's clients ask for a model of another server, which knows OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import pytest
import pytest_asyncio

from appliance.access.auth import Access
from appliance.frontend.remote.bodies import CHAT
from appliance.gateway.forwarding.forwards import Forwards
from appliance.service.front_frames import Forward
from appliance.service.remote_models import RemoteModels
from appliance.vocabulary import RequestClass, Task
from tests.frontend.conftest import model_at
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.frontend.test_remote import far, post
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.openai_server import (
    STREAM_HEAD,
    USAGE,
    OpenAiServer,
    chunk,
    event,
    openai_server,
    raw,
    saying,
    saying_then_nothing,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
}  # fmt: skip
DONE = b"data: [DONE]\n\n"
PIXEL = "iVBORw0KGgo="


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(generator: Path) -> AsyncIterator[StandInCore]:
    """A front end with a model of this box and two of other servers."""
    others = [far(aliases=("gpt-4o",)).front, far(name="vectors", task=Task.EMBED).front]
    async with front_end([model_at(generator, "talker"), *others]) as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def server(core: StandInCore) -> AsyncIterator[OpenAiServer]:
    async with openai_server() as server:
        address = f"{server.url}/v1"
        models = [far(address, aliases=("gpt-4o",)), far(address, "vectors", task=Task.EMBED)]
        core.forwards = Forwards(RemoteModels(models), Access())
        yield server
        await core.quiet()
        await core.forwards.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def claude(core: StandInCore) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=core.url, api_key="sk-ours", max_retries=0, timeout=PATIENCE_SECONDS
    ) as client:
        yield client


@pytest.fixture
def llama(core: StandInCore) -> ollama.AsyncClient:
    return ollama.AsyncClient(core.url, timeout=PATIENCE_SECONDS)


def answer(message: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    """A whole one."""
    said = {"role": "assistant", "content": None, **message}
    choices = [{"index": 0, "message": said, "finish_reason": finish}]
    body = {"id": "c-1", "model": "their/model", "choices": choices, "usage": USAGE, **more}
    return raw(200, json.dumps(body).encode())


def delta(said: dict[str, Any], finish: str | None = None) -> bytes:
    """An event of a stream."""
    choices = [{"index": 0, "delta": said, "finish_reason": finish}]
    return event({"id": "c-1", "model": "their/model", "choices": choices})


def call_of(arguments: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": "weather", "arguments": arguments}, "type": "function", **more}


CALLING = (
    delta({"role": "assistant", "reasoning_content": "They want "})
    + delta({"reasoning": "the weather."})
    + delta({"content": "I look."})
    + delta({"tool_calls": [call_of("", index=0, id="call_7")]})
    + delta({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]})
    + delta({"tool_calls": [{"index": 0, "function": {"arguments": '"Ulm"}'}}]})
    + delta({"tool_calls": [call_of('{"city": "Bern"}', index=1)]}, "tool_calls")
)
"""A stream that thinks, speaks and calls twice, the second time in one piece and without an id."""


# --- Anthropic's ---------------------------------------------------------------------------------


async def test_a_message(claude: anthropic.AsyncAnthropic, server: OpenAiServer) -> None:
    """What another server can be asked is asked; what only vLLM or Anthropic has is not."""
    said = await claude.messages.create(
        model="gpt-4o", max_tokens=50, messages=HELLO, system="Be brief.",
        stop_sequences=["x"], metadata={"user_id": "u"}, extra_body={"temperature": 0.5},
    )  # fmt: skip

    assert (said.model, said.role, said.stop_reason) == ("gpt-4o", "assistant", "end_turn")
    assert [block.type for block in said.content] == ["text"]
    assert said.content[0].to_dict()["text"] == "one two three"
    assert (said.usage.input_tokens, said.usage.output_tokens) == (7, 3)
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "their/model",
        "messages": [{"role": "system", "content": "Be brief."}, *HELLO],
        "max_tokens": 50, "temperature": 0.5, "stop": ["x"],
    }  # fmt: skip
    assert "sk-ours" not in str(asked.headers)


async def test_a_stream_of_a_message(
    claude: anthropic.AsyncAnthropic, server: OpenAiServer
) -> None:
    """The first piece of text is there, and the usage that the server says at the end."""
    async with claude.messages.stream(model="far", max_tokens=50, messages=HELLO) as stream:
        texts = [text async for text in stream.text_stream]
        said = await stream.get_final_message()
    assert texts == ["one", "two", "three"]
    assert (said.model, said.stop_reason) == ("far", "end_turn")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (7, 3)
    assert server.asked[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_thoughts_and_images_of_a_message(
    claude: anthropic.AsyncAnthropic, server: OpenAiServer, streams: bool
) -> None:
    """There and back."""
    calls = [call_of('{"city": "Ulm"}', id="call_7"), call_of('{"city": "Bern"}')]
    thinks = {"reasoning_content": "They want the weather.", "content": "I look."}
    server.answering = saying(answer({**thinks, "tool_calls": calls}, "tool_calls"))
    if streams:
        tail = event({"choices": [], "usage": USAGE}) + DONE
        server.answering = saying(STREAM_HEAD + CALLING + tail)
    image = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    asked: Any = {
        "model": "far", "max_tokens": 2000,
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": image},
                                         {"type": "text", "text": "Here?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rom"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "hot"}]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": WEATHER}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    if streams:
        async with claude.messages.stream(**asked) as stream:
            said = await stream.get_final_message()
    else:
        said = await claude.messages.create(**asked)

    thought, text, first, second = [block.to_dict() for block in said.content]
    assert (thought["type"], thought["thinking"]) == ("thinking", "They want the weather.")
    assert text["text"] == "I look."
    assert (first["id"], first["name"], first["input"]) == ("call_7", "weather", {"city": "Ulm"})
    assert (second["id"], second["input"]) == ("call_1", {"city": "Bern"})
    assert said.stop_reason == "tool_use"
    body = server.asked[0].body
    assert body["tool_choice"] == "required"
    assert body["parallel_tool_calls"] is False
    assert body["tools"][0] == {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": WEATHER},
    }
    url = f"data:image/png;base64,{PIXEL}"
    assert body["messages"][0]["content"][0]["image_url"] == {"url": url}
    call = {"id": "t1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}  # fmt: skip
    assert body["messages"][1] == {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    assert body["messages"][2] == {"role": "tool", "tool_call_id": "t1", "content": "hot"}
    assert not {"max_completion_tokens", "thinking_token_budget"} & body.keys()


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("length", "max_tokens"), ("content_filter", "refusal"), ("eos_token", "end_turn")],
)
async def test_why_a_message_ended(
    claude: anthropic.AsyncAnthropic, server: OpenAiServer, finish: str, reason: str
) -> None:
    """Whole and streamed. A call that was cut off is none."""
    asked: Any = {"model": "far", "max_tokens": 5, "messages": HELLO}
    cut = [call_of('{"city": ')] if finish == "length" else []
    server.answering = saying(answer({"content": "one", "tool_calls": cut}, finish))
    said = await claude.messages.create(**asked)
    assert (said.stop_reason, len(said.content)) == (reason, 1)
    server.answering = saying(STREAM_HEAD + delta({"content": "one"}, finish) + DONE)
    async with claude.messages.stream(**asked) as stream:
        assert (await stream.get_final_message()).stop_reason == reason


async def test_a_chat_that_is_answered_as_a_completion(
    core: StandInCore, server: OpenAiServer
) -> None:
    """Its `text` is read, in both dialects, whole and streamed. Its logprobs are not: they were
    not asked for, and vLLM's translation of messages has no room for such."""
    tokens = {"tokens": ["one two"], "token_logprobs": [-1.0], "top_logprobs": [{"one two": -1.0}]}
    choices = [{"index": 0, "text": "one two", "finish_reason": "stop", "logprobs": tokens}]
    said = {"id": "c-1", "model": "their/model", "choices": choices, "usage": USAGE}
    for path in ("/v1/messages", "/api/chat"):
        for streams in (False, True):
            server.answering = saying(raw(200, json.dumps(said).encode()))
            if streams:
                server.answering = saying(STREAM_HEAD + event(said) + DONE)
            body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": streams}
            found = await post(core, path, body)
            assert found.status_code == 200, found.text
            assert '"one two"' in found.text
            assert "error" not in found.text


@pytest.mark.parametrize("finish", ["tool_calls", None])
async def test_calls_that_the_server_writes_in_turns_are_whole(
    claude: anthropic.AsyncAnthropic,
    llama: ollama.AsyncClient,
    server: OpenAiServer,
    finish: str | None,
) -> None:
    """In both dialects; also if the server does not say why the answer ended."""
    parts = [
        call_of('{"city": ', index=0, id="call_7"),
        call_of('{"city": ', index=1, id="call_8"),
        {"index": 0, "function": {"arguments": '"Ulm"}'}},
    ]
    turns = b"".join(delta({"tool_calls": [part]}) for part in parts)
    last = {"index": 1, "function": {"arguments": '"Bern"}'}}
    turns += delta({"tool_calls": [last]}, finish)
    cities = [{"city": "Ulm"}, {"city": "Bern"}]

    server.answering = saying(STREAM_HEAD + turns + DONE)
    async with claude.messages.stream(model="far", max_tokens=50, messages=HELLO) as stream:
        said = await stream.get_final_message()
    assert [block.to_dict()["input"] for block in said.content] == cities
    assert [block.to_dict()["id"] for block in said.content] == ["call_7", "call_8"]
    assert said.stop_reason == "tool_use"
    lines = [line async for line in await llama.chat("far", HELLO, stream=True)]
    called = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert [call.arguments for call in called] == cities


async def test_a_call_without_json_is_an_error(core: StandInCore, server: OpenAiServer) -> None:
    """If it was not cut off; in both dialects."""
    calling = answer({"tool_calls": [call_of('{"city": ')]}, "tool_calls")
    for path in ("/v1/messages", "/api/chat"):
        server.answering = saying(calling)
        body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": False}
        found = await post(core, path, body)
        assert (found.status_code, "without JSON" in found.text) == (502, True), found.text


async def test_an_answer_too_large_to_translate_says_so(
    core: StandInCore, server: OpenAiServer
) -> None:
    """It has to be whole first, and counts among the bodies of its client; text that is passed on
    does not."""
    text = "x" * (13 << 20)  # of 16 MiB, of which a client has three quarters
    body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": False}
    for path, status in (("/v1/messages", 503), ("/api/chat", 503), (CHAT, 200)):
        server.answering = saying(answer({"content": text}))
        found = await post(core, path, body)
        assert found.status_code == status
        if status != 200:
            assert all(word in found.text for word in ("api.max_bodies", "ask for a stream", CHAT))
            assert "again" not in found.text
            assert "retry-after" not in found.headers


async def test_an_answer_that_may_fit_later_says_so(
    core: StandInCore, server: OpenAiServer
) -> None:
    """Here the client has another large body under way, of 16 MiB for all."""
    body: dict[str, Any] = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": False}
    large = [{"role": "user", "content": "x" * (7 << 20)}]
    server.answering = saying_then_nothing(b"")
    other = asyncio.create_task(post(core, CHAT, body | {"messages": large}))
    await server.until_asked()
    server.answering = saying(answer({"content": "x" * (7 << 20)}))
    found = await post(core, "/v1/messages", body)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)

    assert found.status_code == 503
    assert all(word in found.text for word in ("api.max_bodies", "try again later", CHAT))
    assert found.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}]}]},
         'source.type "base64"'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
          "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}]},
         'source.type "base64"'),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"messages": None}, "messages"),
    ],
)  # fmt: skip
async def test_what_cannot_be_translated_is_named(
    core: StandInCore, server: OpenAiServer, more: dict[str, Any], words: str
) -> None:
    """In Anthropic's shape; nothing was sent."""
    body = {"model": "far", "max_tokens": 5, "messages": HELLO, **more}
    found = await post(core, "/v1/messages", body)
    assert found.status_code == 400, found.text
    assert (found.json()["type"], found.json()["error"]["type"]) == (
        "error", "invalid_request_error"
    )  # fmt: skip
    assert words in found.json()["error"]["message"]
    assert server.asked == []


async def test_tokens_are_not_counted_here(core: StandInCore, server: OpenAiServer) -> None:
    """There is no tokenizer of the model; the message says where the number is."""
    found = await post(core, "/v1/messages/count_tokens", {"model": "far", "messages": HELLO})
    assert found.status_code == 400
    assert "the usage of an answer" in found.json()["error"]["message"]
    assert server.asked == []


async def test_errors_of_the_server_are_anthropics(
    claude: anthropic.AsyncAnthropic, server: OpenAiServer
) -> None:
    """What it says of the request, and that it is full."""
    asked: Any = {"model": "far", "max_tokens": 5, "messages": HELLO}
    server.answering = saying(raw(400, b'{"error": {"message": "top_k: unknown"}}'))
    with pytest.raises(anthropic.BadRequestError, match="top_k: unknown"):
        await claude.messages.create(**asked)
    server.answering = saying(raw(429, b"{}", "application/json", "retry-after: 3"))
    with pytest.raises(anthropic.RateLimitError) as full:
        await claude.messages.create(**asked, stream=True)
    assert full.value.response.headers["retry-after"] == "3"
    server.answering = saying(raw(200, b'{"choices": [{"message": {"content": 5}}]}'))
    with pytest.raises(anthropic.InternalServerError, match="not as OpenAI's API has it"):
        await claude.messages.create(**asked)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (b"", "ended before its last event"),
        (event({"error": {"message": "out of memory", "code": "oom"}}), "out of memory"),
        (event({"choices": [{"delta": {"content": 5}}]}), "not as OpenAI's API has it"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error(
    core: StandInCore, server: OpenAiServer, tail: bytes, words: str
) -> None:
    """In both dialects, and never as if it were whole."""
    server.answering = saying(STREAM_HEAD + chunk("one", "their/model") + tail)
    body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": True}
    found = await post(core, "/v1/messages", body)
    assert found.status_code == 200
    assert "one" in found.text
    last = found.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert words in json.loads(last.partition("data: ")[2])["error"]["message"]
    assert "message_stop" not in found.text

    found = await post(core, "/api/chat", {"model": "far", "messages": HELLO})
    first, *_, last = map(json.loads, found.text.splitlines())
    assert (found.status_code, first["message"]["content"]) == (200, "one")
    assert words in last["error"]
    assert '"done":true' not in found.text


async def test_an_error_before_the_first_event_is_a_status(
    core: StandInCore, server: OpenAiServer
) -> None:
    server.answering = saying(STREAM_HEAD)
    body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": True}
    for path in ("/v1/messages", "/api/chat"):
        found = await post(core, path, body)
        assert found.status_code == 502, found.text


# --- Ollama's ------------------------------------------------------------------------------------


async def test_a_chat_of_ollama(llama: ollama.AsyncClient, server: OpenAiServer) -> None:
    """Whole and streamed. Only what the client asks for is sent: defaults are the server's."""
    whole = await llama.chat("far", HELLO)
    lines = [line async for line in await llama.chat("gpt-4o:latest", HELLO, stream=True)]

    assert (whole.model, whole.message.content, whole.done_reason) == (
        "far", "one two three", "stop"
    )  # fmt: skip
    assert (whole.prompt_eval_count, whole.eval_count) == (7, 3)
    assert [line.message.content for line in lines] == ["one", "two", "three", ""]
    assert (lines[-1].done, lines[-1].eval_count, lines[-1].model) == (True, 3, "gpt-4o:latest")
    assert server.asked[0].body == {"model": "their/model", "messages": HELLO, "stream": False}
    assert server.asked[0].path == "/v1/chat/completions"
    assert server.asked[1].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_thoughts_images_and_options_of_ollama(
    llama: ollama.AsyncClient, server: OpenAiServer, streams: bool
) -> None:
    """There and back."""
    calls = [call_of('{"city": "Ulm"}', id="call_7"), call_of('{"city": "Bern"}')]
    thinks = {"reasoning_content": "They want the weather.", "content": "I look."}
    server.answering = saying(answer({**thinks, "tool_calls": calls}, "tool_calls"))
    if streams:
        tail = event({"choices": [], "usage": USAGE}) + DONE
        server.answering = saying(STREAM_HEAD + CALLING + tail)
    used: Any = {"function": {"name": "weather", "arguments": {"city": "Rom"}}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    asked: Any = {
        "model": "far",
        "messages": [
            {"role": "user", "content": "Here?", "images": [b"\xff\xd8\xff\xe0"]},
            {"role": "assistant", "tool_calls": [used], "thinking": "Hm."},
            {"role": "tool", "content": "hot", "tool_name": "weather"},
        ],
        "tools": [tool], "think": True, "format": WEATHER,
        "options": {"num_predict": 9, "seed": 4, "top_k": 3, "stop": ["x"], "num_ctx": 4096},
    }  # fmt: skip
    if streams:
        lines = [line async for line in await llama.chat(**asked, stream=True)]
    else:
        lines = [await llama.chat(**asked)]

    thought = "".join(line.message.thinking or "" for line in lines)
    called = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert thought == "They want the weather."
    assert "".join(line.message.content or "" for line in lines) == "I look."
    assert [(one.name, one.arguments) for one in called] == [
        ("weather", {"city": "Ulm"}), ("weather", {"city": "Bern"})
    ]  # fmt: skip
    body = server.asked[0].body
    url = "data:image/jpeg;base64,/9j/4A=="
    assert body["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Here?"}
    ]  # fmt: skip
    assert body["messages"][2]["tool_call_id"] == body["messages"][1]["tool_calls"][0]["id"]
    assert {name: body[name] for name in ("max_tokens", "seed", "top_k", "stop")} == {
        "max_tokens": 9, "seed": 4, "top_k": 3, "stop": ["x"]
    }  # fmt: skip
    assert body["reasoning_effort"] == "medium"
    assert body["response_format"]["json_schema"]["schema"] == WEATHER
    assert body["tools"][0]["function"]["name"] == "weather"
    assert not {"temperature", "top_p", "num_ctx", "chat_template_kwargs"} & body.keys()


async def test_generate(llama: ollama.AsyncClient, server: OpenAiServer) -> None:
    """A prompt with a system message is a chat, a raw one or one with a suffix a completion."""
    said = await llama.generate("far", "Hello", system="Be brief.", think=False)
    assert (said.response, said.eval_count, said.context) == ("one two three", 3, None)
    body = server.asked[0].body
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert body["reasoning_effort"] == "none"

    text = {"choices": [{"index": 0, "text": "one two", "finish_reason": "length"}]}
    server.answering = saying(raw(200, json.dumps(text).encode()))
    said = await llama.generate("far", "Hello", raw=True, options={"num_predict": 2})
    assert (said.response, said.done_reason) == ("one two", "length")
    assert server.asked[1].path == "/v1/completions"
    assert server.asked[1].body == {
        "model": "their/model", "prompt": "Hello", "stream": False, "max_tokens": 2
    }  # fmt: skip
    stream = event({"choices": [{"index": 0, "text": "one", "finish_reason": "stop"}]})
    server.answering = saying(STREAM_HEAD + stream + DONE)
    lines = [line async for line in await llama.generate("far", "a", suffix="b", stream=True)]
    assert [line.response for line in lines] == ["one", ""]
    assert server.asked[2].body["suffix"] == "b"


async def test_a_model_elsewhere_is_not_loaded(
    llama: ollama.AsyncClient, server: OpenAiServer
) -> None:
    """Requests that only have a model loaded, or unloaded, are answered at once."""
    assert (await llama.generate("far")).done_reason == "load"
    assert (await llama.chat("far", keep_alive=0)).done_reason == "unload"
    assert server.asked == []


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context: the tokens"),
        ("/api/chat", {"think": "much"}, "think: "),
        ("/api/generate", {"prompt": "x", "images": ["AAAA"], "raw": True}, "images: "),
        ("/api/chat", {"model": "vectors"}, "does not support chat"),
        ("/api/chat", {"messages": 5}, "messages"),
    ],
)
async def test_what_ollama_cannot_ask(
    core: StandInCore, server: OpenAiServer, path: str, more: dict[str, Any], words: str
) -> None:
    found = await post(core, path, {"model": "far", "messages": HELLO, **more})
    assert found.status_code == 400, found.text
    assert words in found.json()["error"]
    assert server.asked == []


async def test_what_is_ignored_is_named(core: StandInCore, server: OpenAiServer) -> None:
    """Prompts are not cut to a context here; other fields as for any model."""
    asked = {"model": "far", "messages": HELLO, "options": {"num_ctx": 10}, "colour": 1}
    found = await post(core, "/api/chat", asked)
    assert {"options.num_ctx", "colour"} <= {
        name.strip() for name in found.headers["x-appliance-ignored"].split(",")
    }


# --- limits and those who leave ------------------------------------------------------------------


async def test_limits_see_what_openais_dialect_would_ask(
    core: StandInCore, server: OpenAiServer
) -> None:
    """The same estimate of the prompt, the same bound of the answer, the same guide."""
    schema = {"type": "json_schema", "schema": WEATHER}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"max_tokens": 5, "response_format": {
            "type": "json_schema", "json_schema": {"name": "json_schema", "schema": WEATHER}}},
        "/v1/messages": {"max_tokens": 5, "output_config": {"format": schema}},
        "/api/chat": {"options": {"num_predict": 5}, "format": WEATHER, "stream": False},
    }  # fmt: skip
    core.frames.clear()
    for path, more in bodies.items():
        found = await post(core, path, {"model": "far", "messages": HELLO, **more})
        assert found.status_code == 200, found.text
    frames = [frame for frame in core.frames if isinstance(frame, Forward)]
    assert [frame.max_tokens for frame in frames] == [5, 5, 5]
    assert [frame.guided for frame in frames] == [True, True, True]
    assert len(frames) == 3
    assert max(frame.prompt_tokens for frame in frames) < 1.2 * frames[0].prompt_tokens


async def test_a_line_of_a_batch_is_translated(core: StandInCore, server: OpenAiServer) -> None:
    """Of a batch of messages."""
    body = {"model": "far", "max_tokens": 5, "messages": HELLO}
    ran = await core.run("/v1/messages", body)
    assert (ran.status, json.loads(ran.body)["content"][0]["text"]) == (200, "one two three")
    frame = await core.seen(Forward, lambda frame: frame.call == ran.call)
    assert frame.request_class is RequestClass.BATCH


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_a_client_that_leaves_closes_the_connection_there(
    core: StandInCore, server: OpenAiServer, path: str
) -> None:
    server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    body = {"model": "far", "max_tokens": 5, "messages": HELLO, "stream": True}
    async with (
        httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", path, json=body) as found,
    ):
        async for line in found.aiter_lines():
            if "one" in line:
                break
    async with asyncio.timeout(PATIENCE_SECONDS):
        await (await server.until_asked()).left.wait()
