"""The OpenAPI document says what the API does: every path of the admin's, and what is answered."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.api.openapi.document import OPERATIONS, Operation, document
from appliance.api.openapi.endpoints import ENDPOINTS, front_part
from appliance.config.loader import load_config
from appliance.daemon.reload import LiveConfig
from appliance.service.front_paths import is_front_path
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import unserved

SECRET = "sk-of-the-operator"
MODEL_VERBS = "/api/models/{target}"
"""One handler for all that is done to models: what is to be done is the end of its path."""


@pytest.fixture
async def app(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_checkpoint: Callable[..., Path]
) -> AsyncIterator[Litestar]:
    """In front of a box with one model, a live request, a configuration in a file, and a key."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    text = '[devices]\nmemory = "8MiB"\n[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\n'
    path.write_text(text, encoding="utf-8")
    models = small("a")
    box = Box(monkeypatch, models, setup_of(models))
    box.start()
    box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 3)
    box.world.lives["r"].outcome = "cancelled"
    file = KeyFile(tmp_path / "keys.json")
    file.add(Key(name="operator", sha256=digest(SECRET), created_seconds=0.0, scopes=tuple(Scope)))
    yield create_app(
        box.daemon,
        settings=LiveConfig(box.daemon, load_config(path), path),
        access=Access(KeyRing(file.path)),
    )
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def client(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(app) as client:
        client.headers["x-api-key"] = SECRET
        yield client


def test_every_endpoint_is_described(app: Litestar) -> None:
    """Those that the application has, their other paths too, and no others; what is there only to
    be refused is none."""
    there = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        for handler in route.route_handlers  # type: ignore[union-attr]
        for method in handler.http_methods
        if handler.include_in_schema is not False  # type: ignore[union-attr]
        and method != "OPTIONS"
    }
    described = {
        (method, re.sub(r"^/api/models/{name}/\w+$", MODEL_VERBS, _handled(path)))
        for path, item in document()["paths"].items()
        for method in item
        if not is_front_path(path)
    }

    assert described == there


def _handled(path: str) -> str:
    """An adapter is deleted, and files are, where a model is, whose name may have slashes, too."""
    return re.sub(r"^(/api/models/{name})/(adapters/{adapter}|files(/{path})?)$", r"\1", path)


def test_what_front_ends_answer_is_described() -> None:
    """By its file: their paths and no others, and schemas with names of their own."""
    front = front_part()
    ours = {one.path for one in (*ENDPOINTS, *OPERATIONS)}

    assert front.paths.keys() == {path for path in document()["paths"] if is_front_path(path)}
    assert not front.paths.keys() & ours
    schemas = document()["components"]["schemas"]
    assert {name: schemas[name] for name in front.schemas} == front.schemas


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        *((one.method, one.path, one.body) for one in ENDPOINTS if one.body is not None),
        *((one.method, one.path, one.body) for one in OPERATIONS if one.body is not None),
    ],
)
def test_every_body_has_an_example(method: str, path: str, kind: type) -> None:
    """It is of the type that the body is decoded into."""
    told = document()["paths"][path][method]["requestBody"]["content"]

    for content in told.values():
        msgspec.convert(content["example"], kind)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/models/a", "DELETE, GET, OPTIONS"),
        ("/api/models/org/a", "DELETE, GET, OPTIONS"),
        ("/api/models/org/a/load", "OPTIONS, POST"),
        ("/api/models/a/limits", "OPTIONS, PUT"),
        ("/api/models/a/adapters/legal", "DELETE, OPTIONS"),
        ("/api/models/org/a/files", "GET, OPTIONS"),
        ("/api/models/org/a/files/1_Pooling/config.json", "GET, OPTIONS"),
        ("/api/requests/r", "DELETE, GET, OPTIONS"),
        ("/api/keys", "GET, OPTIONS, POST"),
        ("/api/keys/ci", "DELETE, GET, OPTIONS"),
        ("/api/keys/ci/organization", "OPTIONS, PUT"),
        ("/api/organizations/acme", "DELETE, GET, OPTIONS, PUT"),
        ("/api/log-level", "GET, OPTIONS, PUT"),
        ("/v1/files", "GET, OPTIONS, POST"),
        ("/", "GET, HEAD, OPTIONS"),
        ("/api/tags", "GET, HEAD, OPTIONS"),
        ("/v1/models/org/a", "GET, OPTIONS"),
        ("/openapi.json", "GET, OPTIONS"),
        ("/api/push", "DELETE, GET, HEAD, OPTIONS, POST"),  # not in the document
    ],
)
async def test_which_methods_there_are(client: httpx.AsyncClient, path: str, allowed: str) -> None:
    """OPTIONS says all of a path, whoever handles each."""
    answer = await client.options(path)

    assert (answer.status_code, answer.headers["allow"]) == (204, allowed)


async def test_the_document_is_whole(client: httpx.AsyncClient) -> None:
    """Ids are unique, and every reference leads to a schema."""
    document = (await client.get("/api/openapi.json")).json()

    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids)) > len(OPERATIONS) + len(ENDPOINTS)
    names = re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode())
    assert set(names) == set(document["components"]["schemas"])
    assert document["openapi"] == "3.1.0"


BODIES: dict[str, dict[str, Any]] = {
    "/api/policies": {"use": ["aegaeon"]},
    "/api/log-level": {"level": "info"},
    "/api/instances/{name}/quarantine": {"reason": "a test"},
    "/api/models/{name}/limits": {"max_queue": 5},
    "/api/organizations/{name}": {"concurrency": 5},
    "/api/keys/{name}/organization": {"organization": None},
    "/api/models/{name}/adapters": {"name": "legal", "path": "nowhere"},
    "/api/models": {"name": "b", "path": "tiny", "max_context": 64},
    "/api/keys": {"name": "ci", "models": ["a"], "expires": "30d"},
}
NAMES = {
    "requests": "r",
    "models": "a",
    "instances": "0",
    "policies": "serverlessllm",
    "keys": "operator",
    "organizations": "acme",
}
MAKES = ("put", "/api/organizations/{name}")
"""What of this name need not be there."""


@pytest.mark.parametrize(
    "one",
    # Worker doubles do not answer to be verified, and events have no end.
    [one for one in OPERATIONS if one.path != "/api/verify" and one.answer is not None],
    ids=lambda one: f"{one.method} {one.path}",
)
async def test_answers_are_as_described(client: httpx.AsyncClient, one: Operation) -> None:
    """What comes back can be read as what the document says, or is a refusal that it lists."""
    path = one.path.replace("{name}", NAMES.get(one.path.split("/{name}")[0].split("/")[-1], ""))

    answer = await client.request(one.method, path, json=BODIES.get(one.path))

    if answer.status_code == one.success:
        msgspec.json.decode(answer.content, type=one.answer)
    else:
        assert answer.status_code in one.refusals, answer.text


@pytest.mark.parametrize(
    "one",
    [one for one in OPERATIONS if "{name}" in one.path and (one.method, one.path) != MAKES],
    ids=lambda one: one.path,
)
async def test_names_that_there_are_not(client: httpx.AsyncClient, one: Operation) -> None:
    """Are told with 404."""
    path = one.path.replace("{name}", "unknown")

    answer = await client.request(one.method, path, json=BODIES.get(one.path))

    assert answer.status_code == 404
    assert 404 in one.refusals
