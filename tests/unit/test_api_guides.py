"""What clients may ask an answer to follow, and how it reaches the engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from appliance.api.app import create_app
from appliance.engines.protocol import Guide, GuideKind
from appliance.vocabulary import FinishReason

from .fake_service import FakeGeneration, FakeService
from .serving import served, unserved

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "small", "prompt": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def schema_format(**fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}


@pytest.fixture
def service() -> FakeService:
    return FakeService(say)


def say(generation: FakeGeneration) -> None:
    generation.say('{"a": "b"}', None)
    generation.feed([0], FinishReason.STOP)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(create_app(service)) as client:
        yield client


ASKED: list[tuple[dict[str, object], GuideKind, object]] = [
    ({"response_format": {"type": "json_object"}}, GuideKind.JSON_OBJECT, None),
    ({"response_format": schema_format()}, GuideKind.JSON, SCHEMA),
    ({"response_format": schema_format(strict=True, description="d")}, GuideKind.JSON, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, GuideKind.JSON, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GuideKind.JSON, SCHEMA),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GuideKind.CHOICE, ["a", "b"]),
    ({"structured_outputs": {"json_object": True}}, GuideKind.JSON_OBJECT, None),
]


@pytest.mark.parametrize(("fields", "kind", "content"), ASKED)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_guide_reaches_every_choice(
    client: httpx.AsyncClient,
    service: FakeService,
    path: str,
    fields: dict[str, object],
    kind: GuideKind,
    content: object,
) -> None:
    """OpenAI's formats and vLLM's field, in chats and plain completions."""
    body = CHAT if path.startswith("chat") else COMPLETION
    answer = await client.post(f"/v1/{path}", json={**body, **fields, "n": 2})

    assert answer.status_code == 200, answer.text
    guides = [generation.request.sampling.guide for generation in service.submitted]
    assert len(guides) == 2
    for guide in guides:
        assert guide is not None
        assert guide.kind is kind
        assert (json.loads(guide.text) if guide.text else None) == content


@pytest.mark.parametrize("kind", [GuideKind.REGEX, GuideKind.GRAMMAR, GuideKind.STRUCTURAL_TAG])
async def test_a_guide_in_words_of_its_own(
    client: httpx.AsyncClient, service: FakeService, kind: GuideKind
) -> None:
    """Its text is passed on as it is."""
    fields = {"structured_outputs": {kind.value: " a|b "}}
    await client.post("/v1/completions", json=COMPLETION | fields)

    (generation,) = service.submitted
    assert generation.request.sampling.guide == Guide(kind, " a|b ")


REGEX: dict[str, object] = {"regex": "a"}
REFUSED: list[tuple[dict[str, object], str, str | None]] = [
    (
        {"response_format": schema_format(schema={"type": "impossible"})},
        "response_format.json_schema.schema",
        "invalid_guide",
    ),
    (
        {"structured_outputs": {"regex": "impossible"}},
        "structured_outputs.regex",
        "invalid_guide",
    ),
    ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex", None),
    ({"structured_outputs": {}}, "structured_outputs", None),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", None),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "unsupported_field",
    ),
    (
        {"structured_outputs": REGEX, "response_format": {"type": "json_object"}},
        "structured_outputs",
        None,
    ),
    ({"structured_outputs": REGEX, "min_tokens": 2}, "min_tokens", None),
    ({"structured_outputs": REGEX, "ignore_eos": True}, "ignore_eos", None),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_field",
    ),
    ({"response_format": schema_format(schema=True)}, "response_format.json_schema.schema", None),
    (
        {"response_format": {"type": "structural_tag", "format": {}}},
        "response_format.type",
        None,
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
async def test_what_cannot_be_followed_is_refused_by_name(
    client: httpx.AsyncClient,
    service: FakeService,
    fields: dict[str, object],
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    """Before anything is generated, and with a status, also where a stream was asked for."""
    body = {**CHAT, **fields, "stream": stream}
    answer = await client.post("/v1/chat/completions", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert param in error["message"]
    assert service.submitted == []


async def test_no_guide_is_none(client: httpx.AsyncClient, service: FakeService) -> None:
    """Text is what there is without asking."""
    fields: dict[str, Any] = {"response_format": {"type": "text"}, "structured_outputs": None}
    await client.post("/v1/chat/completions", json=CHAT | fields)

    assert service.submitted[0].request.sampling.guide is None


EXAMPLES = re.findall(
    r"```json\n(.*?)```", Path("docs/structured-outputs.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("example", EXAMPLES)
async def test_the_documentation_is_true(
    client: httpx.AsyncClient, service: FakeService, example: str
) -> None:
    """Every example of it is a request that is understood, and guided if it asks for that."""
    body = json.loads(example) | {"model": "small"}
    answer = await client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    asks = not body.keys().isdisjoint(("response_format", "structured_outputs", "tools"))
    assert (service.submitted[0].request.sampling.guide is not None) == asks


class Answer(BaseModel):
    a: str


async def test_the_client_parses_what_it_asked_for(service: FakeService) -> None:
    """OpenAI's client sends the schema of a class, and makes one of the answer."""
    async with (
        served(create_app(service)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.parse(
            model="small", messages=[{"role": "user", "content": "hi"}], response_format=Answer
        )

    assert answer.choices[0].message.parsed == Answer(a="b")
    guide = service.submitted[0].request.sampling.guide
    assert guide is not None
    assert json.loads(guide.text)["required"] == ["a"]
