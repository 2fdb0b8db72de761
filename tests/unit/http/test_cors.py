"""Pages of other origins: allowed ones get what browsers ask for, others get nothing."""

from __future__ import annotations

import httpx
import pytest
from litestar import Litestar, get, post

from appliance.http.cors import Cors, origin_allowed
from appliance.http.error_formats import EXCEPTION_HANDLERS
from appliance.http.errors import ApiError

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@get("/v1/models")
async def models() -> dict[str, str]:
    return {"object": "list"}


@post("/v1/files")
async def refuse() -> None:
    raise ApiError(401, "an API key is needed")


@pytest.fixture
async def client() -> httpx.AsyncClient:
    app = Litestar([models, refuse], exception_handlers=EXCEPTION_HANDLERS, openapi_config=None)
    cors = Cors(app, ["https://chat.example.com", "https://*.example.org", "http://lan.host:*"])
    transport = httpx.ASGITransport(app=cors)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://localhost",
            "https://localhost",
            "http://localhost:5173",
            "http://127.0.0.1:3000",
        ),
        *("http://[::1]:8080", "http://0.0.0.0:8080", "app://obsidian.md", "file://"),
        *("tauri://localhost", "vscode-webview://1a2b3c", "vscode-file://vscode-app"),
    ],
)
def test_pages_of_this_machine_and_applications_are_allowed(origin: str) -> None:
    assert origin_allowed(origin)


@pytest.mark.parametrize(
    "origin",
    [
        *("https://example.com", "http://localhost.example.com", "http://localhost:80.example.com"),
        *("http://localhost:", "http://127.0.0.1.example.com", "http://192.168.0.5", "null", ""),
        *("http://localhost@example.com", "ftp://localhost", "http://localhost:1/path"),
    ],
)
def test_pages_of_other_sites_are_not_allowed(origin: str) -> None:
    """Nor are those whose name begins like this machine's."""
    assert not origin_allowed(origin)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://chat.example.com", True),
        ("https://chat.example.com:8443", False),
        ("http://chat.example.com", False),
        ("https://a.example.org", True),
        ("https://example.org", False),
        ("https://evil.com/.example.org", False),
        ("http://lan.host:3000", True),
        ("http://lan.host", False),
    ],
)
def test_configured_origins(origin: str, allowed: bool) -> None:
    """A star is a part of a host, or a port."""
    configured = ["https://chat.example.com/", "https://*.example.org", "http://lan.host:*"]

    assert origin_allowed(origin, configured) is allowed


def test_a_star_alone_allows_any_origin() -> None:
    assert origin_allowed("https://example.com", ["*"])
    assert origin_allowed("null", ["*"])


async def test_what_a_browser_asks_first(client: httpx.AsyncClient) -> None:
    """It is answered without a key, for any path; the origin is named, and no credentials."""
    answer = await client.options(
        "/v1/chat/completions", headers={"origin": "http://localhost:5173", **PREFLIGHT}
    )

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "http://localhost:5173"
    assert "POST" in answer.headers["access-control-allow-methods"]
    asked = PREFLIGHT["access-control-request-headers"]
    assert answer.headers["access-control-allow-headers"] == asked
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_another_site_is_refused_what_its_browser_asks(client: httpx.AsyncClient) -> None:
    answer = await client.options(
        "/v1/chat/completions", headers={"origin": "https://evil.example", **PREFLIGHT}
    )

    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_answers_to_an_allowed_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models", headers={"origin": "https://chat.example.com"})

    assert answer.json() == {"object": "list"}
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "x-appliance-ignored" in answer.headers["access-control-expose-headers"]
    assert answer.headers["vary"] == "Origin"


async def test_an_allowed_page_can_read_refusals(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/files", headers={"origin": "https://chat.example.com"})

    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"


async def test_answers_to_another_site_and_to_none(client: httpx.AsyncClient) -> None:
    """A browser does not show the first one's answer; programs send no origin."""
    other = await client.get("/v1/models", headers={"origin": "https://evil.example"})
    none = await client.get("/v1/models")

    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "Origin"
    assert "vary" not in none.headers


async def test_options_that_is_no_browsers_question_goes_on(client: httpx.AsyncClient) -> None:
    answer = await client.options("/v1/models", headers={"origin": "http://localhost"})

    assert "allow" in answer.headers
    assert answer.headers["access-control-allow-origin"] == "http://localhost"
