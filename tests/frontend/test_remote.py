"""A front end whose clients ask for a model of another server, which a real server answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from appliance.access.auth import Access
from appliance.gateway.forwarding.forwards import Forwards
from appliance.service.remote_models import RemoteModel, RemoteModels
from appliance.vocabulary import Task
from tests.frontend.conftest import model_at
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.openai_server import (
    STREAM_HEAD,
    OpenAiServer,
    chunk,
    openai_server,
    raw,
    saying,
    saying_then_nothing,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def far(address: str = "http://127.0.0.1:1/v1", name: str = "far", **fields: Any) -> RemoteModel:
    return RemoteModel(
        name=name, address=address, called="their/model", max_context=1000, created=1, **fields
    )


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


def chat(model: str = "far", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], **more}


async def post(core: StandInCore, path: str, body: object, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        return await client.post(path, json=body, headers=headers)


async def test_openais_client_is_answered(core: StandInCore, server: OpenAiServer) -> None:
    """Whole and streamed, by an alias too; its own key stays here."""
    base = f"{core.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-ours", max_retries=0) as client:
        messages: Any = chat()["messages"]
        whole = await client.chat.completions.create(model="far", messages=messages)
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=messages, stream=True
        )
        chunks = [one async for one in stream]

    assert whole.model == "far"
    assert whole.choices[0].message.content == "one two three"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    assert {one.model for one in chunks} == {"gpt-4o"}
    assert [one.choices[0].delta.content for one in chunks] == ["one", "two", "three"]
    assert all(one.usage is None for one in chunks)
    for asked in server.asked:
        assert asked.body["model"] == "their/model"
        assert "sk-ours" not in str(asked.headers)
        assert asked.headers["x-appliance-hops"] == "1"


async def test_each_endpoint_is_passed_on(core: StandInCore, server: OpenAiServer) -> None:
    """Those of OpenAI's that make text or vectors."""
    server.answering = saying(raw(200, b'{"choices": [], "data": []}'))
    for path, body in (
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"model": "far", "prompt": "Hello"}),
        ("/v1/embeddings", {"model": "vectors", "input": "Hello"}),
    ):
        answer = await post(core, path, body)
        assert answer.status_code == 200, answer.text
        assert server.asked[-1].path == path
    server.answering = saying(raw(200, b'{"object": "response", "model": "their/model"}'))
    answer = await post(core, "/v1/responses", {"model": "far", "input": "Hello"})
    assert answer.json()["model"] == "far"
    assert server.asked[-1].body == {"model": "their/model", "input": "Hello", "store": False}


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/messages/render", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling"),
        *("/classify", "/v2/embed", "/v1/chat/completions/render", "/v1/responses/input_tokens"),
        *("/api/embed", "/api/embeddings"),
    ],
)
async def test_other_endpoints_are_refused_and_say_what_to_ask(
    core: StandInCore, server: OpenAiServer, path: str
) -> None:
    """Each in its own words for errors."""
    answer = await post(core, path, chat(max_tokens=5, prompt="x", input="x"))

    assert answer.status_code == 400, answer.text
    assert "/v1/chat/completions" in answer.text
    assert "another server" in answer.text
    assert server.asked == []


async def test_sound_and_tokenizers_are_refused_too(
    core: StandInCore, server: OpenAiServer
) -> None:
    """They name their model elsewhere than in a body of JSON."""
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        form = await client.post(
            "/v1/audio/transcriptions", data={"model": "far"}, files={"file": ("a.wav", b"x")}
        )
        info = await client.get("/tokenizer_info", params={"model": "far"})
    assert (form.status_code, info.status_code) == (400, 400)
    assert "another server" in form.text + info.text
    assert server.asked == []


async def test_a_model_does_what_it_is_for(core: StandInCore, server: OpenAiServer) -> None:
    answer = await post(core, "/v1/chat/completions", chat("vectors"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")
    assert server.asked == []


async def test_a_server_that_is_away_does_not_touch_other_models(
    core: StandInCore, server: OpenAiServer
) -> None:
    server.answering = saying(b"")
    away = await post(core, "/v1/chat/completions", chat())
    here = await post(core, "/v1/chat/completions", chat("talker", max_tokens=3))

    assert away.status_code == 502
    assert away.json()["error"]["code"] == "remote_failed"
    assert "far" in away.json()["error"]["message"]
    assert here.status_code == 200


async def test_a_stream_that_dies_ends_with_an_error(
    core: StandInCore, server: OpenAiServer
) -> None:
    """Which clients see; what came is theirs."""
    server.answering = saying(STREAM_HEAD + chunk("one", "their/model"))
    answer = await post(core, "/v1/chat/completions", chat(stream=True))

    assert answer.status_code == 200
    first, error, done, rest = answer.text.split("\n\n")
    assert "one" in first
    assert "ended before its last event" in json.loads(error[6:])["error"]["message"]
    assert (done, rest) == ("data: [DONE]", "")


async def test_a_client_that_leaves_closes_the_connection_there(
    core: StandInCore, server: OpenAiServer
) -> None:
    """In the midst of a stream."""
    server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    async with (
        httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
    ):
        async for line in answer.aiter_lines():
            assert "one" in line
            break
    async with asyncio.timeout(PATIENCE_SECONDS):
        await (await server.until_asked()).left.wait()


async def test_a_circle_of_appliances_ends(core: StandInCore, server: OpenAiServer) -> None:
    """Where remote names an appliance that passes on to this one."""
    answer = await post(core, "/v1/chat/completions", chat(), **{"x-appliance-hops": "4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (508, "remote_loop")
    assert server.asked == []
    await post(core, "/v1/chat/completions", chat(), **{"x-appliance-hops": "2"})
    assert server.asked[0].headers["x-appliance-hops"] == "3"


async def test_a_large_answer_is_whole(core: StandInCore, server: OpenAiServer) -> None:
    text = "x" * 1_000_000
    said = {"choices": [{"message": {"content": text}}], "model": "their/model"}
    server.answering = saying(raw(200, json.dumps(said).encode()))
    answer = await post(core, "/v1/chat/completions", chat())
    assert answer.json()["choices"][0]["message"]["content"] == text
