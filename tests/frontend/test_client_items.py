"""What clients were seen to stumble over, asked of a front end by HTTP.

`test_fields` says of each body what becomes of it; here whole requests are answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from appliance.service.front_frames import Submit
from appliance.vocabulary import RequestClass
from tests.frontend.small_models import answer, small_models
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.frontend.test_fields import (
    CHAT,
    CLAUDE_CODE,
    CODEX,
    COMPLETION,
    EMBED,
    LEAST,
    MESSAGES,
    RESPONSES,
    USER,
)
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True])
async def core(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[StandInCore]:
    """Without and with `api.strict`."""
    models = small_models(tmp_path_factory.mktemp("models"))
    origins = ("https://chat.example.com",)
    async with front_end(models, strict=request.param, origins=origins) as core:
        answer(core)
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def client(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client


def body(path: str, changes: dict[str, Any], model: str = "small") -> dict[str, Any]:
    return LEAST[path] | {"max_tokens" if path != RESPONSES else "max_output_tokens": 5} | (
        changes | {"model": model}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"messages": [USER | {"name": "ann"}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": None}, USER]}),
        (CHAT, {"reasoning_effort": "low"}),
        (CHAT, {"seed": -1}),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"top_logprobs": None, "echo": None, "bad_words": None}),
        (COMPLETION, {"seed": -1, "echo": True}),
        (RESPONSES, {"service_tier": None, "tools": None}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
        (MESSAGES, {"tools": [], "system": [{"type": "text", "text": "Be brief."}]}),
    ],
    ids=str,
)
async def test_it_is_answered(
    client: httpx.AsyncClient, path: str, changes: dict[str, Any]
) -> None:
    told = await client.post(path, json=body(path, changes))

    assert told.status_code == 200, told.text


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, MESSAGES])
async def test_the_tag_of_ollamas_names(client: httpx.AsyncClient, path: str) -> None:
    told = await client.post(path, json=body(path, {}, "small:latest"))

    assert told.status_code == 200, told.text


async def test_texts_are_cut(client: httpx.AsyncClient, core: StandInCore) -> None:
    sent = {"model": "embedder", "input": "hello " * 2000, "truncate_prompt_tokens": 7}

    told = await client.post(EMBED, json=sent)

    assert told.status_code == 200, told.text
    assert len(core.said(Submit)[-1].prompt) == 7


async def test_codex(client: httpx.AsyncClient) -> None:
    """A stream to its end; the header names what was left out."""
    told = await client.post(RESPONSES, json=CODEX | {"model": "small", "max_output_tokens": 5})

    assert told.status_code == 200, told.text
    assert "event: response.created" in told.text
    assert "tools.web_search" in told.headers["x-appliance-ignored"]


async def test_claude_code(client: httpx.AsyncClient) -> None:
    told = await client.post(MESSAGES, json=CLAUDE_CODE | {"model": "small", "max_tokens": 5})

    assert told.status_code == 200, told.text
    assert told.text.startswith("event: message_start")
    assert "event: message_stop" in told.text
    assert "thinking" in told.headers["x-appliance-ignored"].split(", ")


async def test_a_stream_begins_with_an_event(client: httpx.AsyncClient) -> None:
    """And with no comment: some clients read the first bytes as an event."""
    told = await client.post(CHAT, json=body(CHAT, {"stream": True}))

    assert told.text.startswith("data: {")


async def test_hints_are_named(client: httpx.AsyncClient, core: StandInCore) -> None:
    changes = {"user": "ann", "prompt_cache_key": "key", "service_tier": "flex"}

    told = await client.post(CHAT, json=body(CHAT, changes))

    assert told.headers["x-appliance-ignored"] == "user, prompt_cache_key"
    assert core.said(Submit)[-1].request_class is RequestClass.BATCH


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/api/chat"])
async def test_unknown_fields(client: httpx.AsyncClient, core: StandInCore, path: str) -> None:
    """Ignored and named, or refused by name."""
    sent = body(CHAT if path == "/api/chat" else path, {"frobnicate": 1})
    if path == "/api/chat":
        sent = {"model": "small", "messages": [USER], "stream": False, "frobnicate": 1}

    told = await client.post(path, json=sent)

    if not core.welcome.strict:
        assert told.status_code == 200, told.text
        assert told.headers["x-appliance-ignored"] == "frobnicate"
        return
    assert told.status_code == 400
    error = told.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith("frobnicate: ")
    assert told.json().get("type", "error") == "error"


async def test_what_would_change_the_answer(client: httpx.AsyncClient) -> None:
    told = await client.post(CHAT, json=body(CHAT, {"functions": [{"name": "f"}]}))

    assert told.status_code == 400
    assert told.json()["error"]["param"] == "functions"
    assert "use tools" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "status", "kind"),
    [
        ({"max_tokens": -1}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400,
         "invalid_request_error"),
        ({"model": "missing"}, 404, "not_found_error"),
        ({"messages": [USER | {"content": "hello " * 2000}]}, 400, "invalid_request_error"),
    ],
    ids=["validated", "content", "model", "context"],
)  # fmt: skip
async def test_anthropics_errors(
    client: httpx.AsyncClient, changes: dict[str, Any], status: int, kind: str
) -> None:
    """In Anthropic's shape, whether vLLM or the appliance refuses."""
    told = await client.post(MESSAGES, json=body(MESSAGES, {}) | changes)

    assert told.status_code == status
    assert told.json()["type"] == "error"
    assert told.json()["error"]["type"] == kind
    assert told.json()["request_id"] == told.headers["request-id"]


@pytest.mark.parametrize("origin", ["http://localhost:5173", "https://chat.example.com"])
async def test_pages_of_allowed_origins(client: httpx.AsyncClient, origin: str) -> None:
    """Their browser asks first, without a key, and then sends the request."""
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    first = await client.options(CHAT, headers=asks)
    told = await client.post(CHAT, json=body(CHAT, {"user": "a"}), headers={"origin": origin})

    assert first.status_code == 204
    assert first.headers["access-control-allow-origin"] == origin
    assert first.headers["access-control-allow-headers"] == "authorization,content-type"
    assert told.headers["access-control-allow-origin"] == origin
    assert "x-appliance-ignored" in told.headers["access-control-expose-headers"]


async def test_pages_of_other_origins(client: httpx.AsyncClient) -> None:
    asks = {"origin": "https://evil.example", "access-control-request-method": "POST"}

    first = await client.options(CHAT, headers=asks)

    assert "access-control-allow-origin" not in first.headers
