"""Which dialect an error is told in, and what Ollama's and Anthropic's dialects refuse, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from appliance.api.app import create_app

from .fake_service import FakeService

MAX_BODY_BYTES = 100_000
HELLO = [{"role": "user", "content": "hello"}]
MESSAGE = {"model": "small", "max_tokens": 5, "messages": HELLO}
CHAT = {"model": "small", "messages": HELLO, "stream": False}
GENERATE = {"model": "small", "prompt": "hello", "stream": False}


@pytest.fixture
def service() -> FakeService:
    return FakeService(lambda generation: generation.say("hello"))


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(
        create_app(service, max_body_bytes=MAX_BODY_BYTES),  # type: ignore[arg-type]
        raise_app_exceptions=False,
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        yield client


def dialect_of(error: Any) -> str:
    """Whose shape the body of an error has."""
    if isinstance(error["error"], str):
        assert set(error) == {"error"}
        return "ollama"
    if set(error) == {"error"}:
        assert set(error["error"]) == {"message", "type", "param", "code"}
        return "openai"
    assert set(error) == {"type", "error", "request_id"}
    assert set(error["error"]) == {"type", "message"}
    return "anthropic"


@pytest.mark.parametrize(
    ("dialect", "method", "path", "status"),
    [
        ("openai", "POST", "/v1/completions", 413),
        ("openai", "GET", "/v1/completions", 405),
        ("openai", "GET", "/v1/nothing", 404),
        ("openai", "GET", "/v1/messagesque", 404),
        ("openai", "POST", "/api/status", 405),
        ("openai", "GET", "/api/policies/x", 404),
        ("openai", "GET", "/api/nothing", 404),
        ("anthropic", "POST", "/v1/messages", 413),
        ("anthropic", "GET", "/v1/messages", 405),
        ("anthropic", "POST", "/v1/messages/count_tokens", 413),
        ("anthropic", "GET", "/v1/messages/batches", 404),
        ("ollama", "POST", "/api/chat", 413),
        ("ollama", "POST", "/api/generate", 413),
        ("ollama", "GET", "/api/chat", 405),
        ("ollama", "POST", "/api/pull", 404),
        ("ollama", "DELETE", "/api/delete", 404),
        ("ollama", "HEAD", "/api/blobs/sha256:1", 404),
        ("ollama", "POST", "/api/experimental/web_search", 404),
    ],
)
async def test_errors_of_the_framework_follow_the_path(
    client: httpx.AsyncClient, dialect: str, method: str, path: str, status: int
) -> None:
    """Too large a body, a wrong method and a path that leads nowhere, in the path's dialect."""
    answer = await client.request(method, path, content=b"x" * (MAX_BODY_BYTES + 1))

    assert answer.status_code == status
    if method != "HEAD":
        assert dialect_of(answer.json()) == dialect


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", "openai"),
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/api/chat", "ollama"),
        ("/api/generate", "ollama"),
        ("/api/show", "ollama"),
    ],
)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\\ud800"}', b'{"model": 3}'])
async def test_malformed_bodies(
    client: httpx.AsyncClient, path: str, dialect: str, body: bytes
) -> None:
    """What is no JSON, or no request, is refused in the path's dialect."""
    answer = await client.post(path, content=body)

    assert answer.status_code == 400
    assert dialect_of(answer.json()) == dialect


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
async def test_what_nobody_foresaw_is_told_without_details(
    client: httpx.AsyncClient, service: FakeService, path: str
) -> None:
    """A defect of ours is an error of the server's in every dialect, and says no more."""
    service.model = None  # type: ignore[assignment, method-assign]
    body = {"model": "small", "max_tokens": 5, "stream": False}
    content: dict[str, object] = {"prompt": "x"} if "completions" in path else {"messages": HELLO}
    if path == "/api/chat":
        del body["max_tokens"]
    answer = await client.post(path, json=body | content)

    assert answer.status_code == 500
    assert "internal error" in answer.text
    assert "NoneType" not in answer.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/api/chat", "/nothing"])
async def test_every_answer_has_its_requests_id(client: httpx.AsyncClient, path: str) -> None:
    """The client's own id comes back, an unprintable one is replaced; each request has another."""
    mine = await client.get(path, headers={"x-request-id": "mine"})
    others = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
    odd = await client.get(path, headers={"x-request-id": b"\xe4"})

    assert mine.headers["x-request-id"] == mine.headers["request-id"] == "mine"
    assert len({"mine", *others}) == 3
    assert odd.headers["x-request-id"].isascii()


def block(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def schema(**fields: object) -> dict[str, object]:
    return {"output_config": {"format": {"type": "json_schema", "schema": fields}}}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"foo": 1}, "foo"),
        ({"tools": [{"name": "t", "input_schema": {}}]}, "no tool_parser"),
        ({"tools": [{"name": "t"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        (schema(type="impossible"), "output_config.format.schema: "),
        (schema(description="x" * 70_000), "output_config.format.schema: more than"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"foo": "u"}}, "metadata.foo"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"messages": []}, "messages"),
        (block(**IMAGE), "messages[0].content[0]"),
        (block(type="document", source={}), "messages[0].content[0]"),
        (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
        (block(type="thinking", thinking="x", signature=""), "messages[0].content[0].type"),
        (block(type="tool_use", id="t", name="t", input={}), "messages[0].content[0].type"),
        (block(type="redacted_thinking", data="x"), "messages[0].content[0]"),
        (block(type="text", text="x", citations=[{}]), "messages[0].content[0].citations"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": [{"text": "x"}]}, "system[0].type"),
        (
            block(type="tool_result", tool_use_id="t", content=[{"text": "x"}]),
            "messages[0].content[0].content[0].type",
        ),
        (block(type="text", text="hello " * 300), "maximum context length is 200"),
    ],
)
async def test_anthropic_refusals_name_the_field(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, object], named: str
) -> None:
    """What is unknown, unsupported, of the wrong type or out of range is refused by name."""
    answer = await client.post("/v1/messages", json=MESSAGE | fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert named in error["message"]
    assert service.submitted == []


async def test_what_asks_for_nothing_is_accepted_from_anthropics_clients(
    client: httpx.AsyncClient,
) -> None:
    """Null, and the values that mean what happens anyway, are no reason to refuse."""
    fields = dict.fromkeys(["system", "metadata", "thinking", "tools", "tool_choice", "container"])
    nothing = {"tools": [], "thinking": {"type": "disabled"}, "cache_control": None}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-feature-2025-01-01"}
    for asked in (fields, nothing):
        answer = await client.post("/v1/messages?beta=true", json=MESSAGE | asked, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_counting_refuses_the_same(client: httpx.AsyncClient) -> None:
    """Tools, a limit, and what is no prompt are refused when tokens are counted, too."""
    body = {"model": "small", "messages": HELLO}
    counted = [
        await client.post("/v1/messages/count_tokens", json=body | fields)
        for fields in ({"tools": [{}]}, {"max_tokens": 5}, {"model": "none"}, {})
    ]

    assert [answer.status_code for answer in counted] == [400, 400, 404, 200]
    assert "tools" in counted[0].json()["error"]["message"]
    assert "max_tokens" in counted[1].json()["error"]["message"]


SHARED: list[tuple[dict[str, object], str]] = [
    ({"foo": 1}, "foo"),
    ({"format": "yaml"}, "format"),
    ({"format": 3}, "format"),
    ({"format": {"type": "impossible"}}, "format: "),
    ({"think": True}, "think"),
    ({"truncate": True}, "truncate"),
    ({"shift": True}, "shift"),
    ({"_debug_render_only": True}, "_debug_render_only"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"keep_alive": "5"}, "keep_alive"),
    ({"keep_alive": True}, "keep_alive"),
    ({"options": {"temperature": "hot"}}, "options.temperature"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"top_p": 0}}, "options.top_p"),
    ({"options": {"num_predict": 0}}, "options.num_predict"),
    ({"options": {"num_ctx": 201}}, "options.num_ctx"),
    ({"options": {"stop": "x"}}, "options.stop"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p"),
    ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
    ({"options": {"presence_penalty": 1, "repeat_last_n": 0}}, "options.repeat_last_n"),
    ({"options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *SHARED,
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "no tool_parser"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "thinking": "x"}]}, "messages[0].thinking"),
        ({"messages": [{"role": "user", "tool_name": "x"}]}, "messages[0].tool_name"),
        ({"messages": [{"role": "user", "images": ["AAAA"]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "hello " * 300}]}, "context length is 200"),
    ],
)
async def test_ollama_chat_refusals_name_the_field(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, object], named: str
) -> None:
    """What is unknown, unsupported, of the wrong type or out of range is refused by name."""
    answer = await client.post("/api/chat", json=CHAT | fields)

    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert service.submitted == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *SHARED,
        ({"messages": HELLO}, "messages"),
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["AAAA"]}, "images"),
        ({"raw": True, "system": "x"}, "system"),
        ({"prompt": "hello " * 300}, "context length is 200"),
        ({"prompt": "hello " * 300, "raw": True}, "context length is 200"),
    ],
)
async def test_ollama_generate_refusals_name_the_field(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, object], named: str
) -> None:
    """The same for prompts."""
    answer = await client.post("/api/generate", json=GENERATE | fields)

    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert service.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(["system", "template", "suffix", "context", "images", "format", "options"]),
        {"system": "", "template": "", "suffix": "", "context": [], "images": [], "format": ""},
        {"raw": False, "truncate": False, "shift": False, "logprobs": False},
        {"options": {}, "keep_alive": 300},
        {"options": {"repeat_penalty": 1.0, "repeat_last_n": 64}, "keep_alive": "1h30m"},
        {"options": {"made_up": 1, "num_ctx": 100}, "keep_alive": -1},
    ],
)
async def test_what_asks_for_nothing_is_accepted_from_ollamas_clients(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    """Null, and the values that mean what happens anyway, are no reason to refuse."""
    answer = await client.post("/api/generate", json=GENERATE | fields)

    assert answer.status_code == 200, answer.text


async def test_showing_needs_a_name(client: httpx.AsyncClient) -> None:
    """A model is shown under its old field, too, and asked for if it is in neither."""
    named = await client.post("/api/show", json={"name": "small", "verbose": True})
    nameless = await client.post("/api/show", json={})

    assert (named.status_code, nameless.status_code) == (200, 400)
    assert nameless.json() == {"error": "model: a value is required"}


async def test_ollamas_clients_find_a_server(client: httpx.AsyncClient) -> None:
    """What they look for before they ask: a heartbeat and a version."""
    heartbeat = await client.get("/")
    heads = [await client.head(path) for path in ("/", "/api/version", "/api/tags")]
    version = await client.get("/api/version")

    assert heartbeat.text == "Ollama is running"
    assert [answer.status_code for answer in heads] == [200, 200, 200]
    assert version.json() == (await client.get("/version")).json()
