"""In which dialect the core tells an error: the path of the request decides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from appliance.api.app import create_app
from appliance.http.error_formats import shape_of
from appliance.http.errors import ApiError
from tests.unit.doubles.fake_service import FakeService

MAX_BODY_BYTES = 100_000


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(
        create_app(service, max_body_bytes=MAX_BODY_BYTES),  # type: ignore[arg-type]
        raise_app_exceptions=False,
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        yield client


def dialect_of(error: Any) -> str:
    """Which dialect's shape the body of an error has."""
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
        ("openai", "GET", "/v1/nothing", 404),
        ("openai", "GET", "/v1/messagesque", 404),
        ("openai", "POST", "/v1/models", 405),
        ("openai", "POST", "/api/status", 405),
        ("openai", "PUT", "/api/log-level", 413),
        ("openai", "GET", "/api/policies/x", 404),
        ("openai", "GET", "/api/nothing", 404),
        ("anthropic", "GET", "/v1/messages/batches", 404),
        ("ollama", "POST", "/api/show", 413),
        ("ollama", "GET", "/api/show", 405),
        ("ollama", "POST", "/api/pull", 413),
        ("ollama", "POST", "/api/push", 404),
        ("ollama", "DELETE", "/api/delete", 404),
        ("ollama", "HEAD", "/api/blobs/sha256:1", 404),
        ("ollama", "POST", "/api/experimental/web_search", 404),
    ],
)
async def test_errors_of_the_framework_follow_the_path(
    client: httpx.AsyncClient, dialect: str, method: str, path: str, status: int
) -> None:
    """A body that is too large, a wrong method and an unknown path, in the path's dialect."""
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
        ("/v1/messagesque", "openai"),
        ("/api/chat", "ollama"),
        ("/api/embed", "ollama"),
        ("/api/status", "openai"),
    ],
)
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_refusals_of_the_core_on_any_path(path: str, dialect: str, status: int, kind: str) -> None:
    """Front ends answer a refusal of the core in these shapes, too. Types are Anthropic's."""
    error = httpx.Response(
        status, content=shape_of(path)(ApiError(status, "the reason", code="a_code"), "req-1")
    ).json()

    assert dialect_of(error) == dialect
    assert "the reason" in str(error)
    if dialect == "anthropic":
        assert (error["error"]["type"], error["request_id"]) == (kind, "req-1")
    if dialect == "openai":
        assert error["error"]["code"] == "a_code"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\\ud800"}', b'{"model": 3}'])
async def test_malformed_bodies(client: httpx.AsyncClient, body: bytes) -> None:
    """What is no JSON, or no request, is refused in the path's dialect."""
    answer = await client.post("/api/show", content=body)

    assert answer.status_code == 400
    assert dialect_of(answer.json()) == "ollama"


@pytest.mark.parametrize(("path", "dialect"), [("/v1/models", "openai"), ("/api/tags", "ollama")])
async def test_an_unexpected_failure_is_reported_without_details(
    client: httpx.AsyncClient, service: FakeService, path: str, dialect: str
) -> None:
    """A defect of ours is an error of the server's in every dialect, and says no more."""
    service.models = None  # type: ignore[assignment, method-assign]
    answer = await client.get(path)

    assert answer.status_code == 500
    assert dialect_of(answer.json()) == dialect
    assert "internal error" in answer.text
    assert "NoneType" not in answer.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages/batches", "/api/tags", "/nothing"])
async def test_every_answer_has_its_requests_id(client: httpx.AsyncClient, path: str) -> None:
    """The client's own id comes back, an unprintable one is replaced; each request has another."""
    mine = await client.get(path, headers={"x-request-id": "mine"})
    others = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
    odd = await client.get(path, headers={"x-request-id": b"\xe4"})

    assert mine.headers["x-request-id"] == mine.headers["request-id"] == "mine"
    assert len({"mine", *others}) == 3
    assert odd.headers["x-request-id"].isascii()


async def test_showing_needs_a_name(client: httpx.AsyncClient) -> None:
    nameless = await client.post("/api/show", json={})

    assert (nameless.status_code, nameless.json()) == (400, {"error": "model: a value is required"})
