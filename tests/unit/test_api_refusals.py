"""What the API refuses, and that it names the field; and the endpoints besides generation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from litestar.exceptions import ImproperlyConfiguredException

from appliance.api.app import create_app
from appliance.api.errors import as_api_error
from appliance.tokens import ChatTemplate, Tokenizer

from .fake_service import FakeService, byte_level_encoder, small_tokenizer

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "small", "prompt": "hello"}


@pytest.fixture
def service() -> FakeService:
    return FakeService(lambda generation: generation.say("hello"))


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(create_app(service, max_body_bytes=4096)) as client:
        yield client


def connected(app: Any) -> httpx.AsyncClient:
    """A client that calls `app` without a network."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://appliance")


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hello", **fields}]}


TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "image_url", "image_url": {"url": "data:"}}
CHAT_REFUSALS = [
    ({"foo": 1}, "foo", "unsupported_field"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_field"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", None),
    ({"tools": [TOOL, TOOL]}, "tools", None),
    ({"tools": [TOOL]}, "tool_choice", "tool_parser_missing"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "tool_parser_missing"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", None),
    (message(name="me"), "messages[0].name", "unsupported_field"),
    ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice.function.name", None),
    ({"functions": []}, "functions", "unsupported_field"),
    ({"store": True}, "store", "unsupported_field"),
    ({"audio": {}}, "audio", "unsupported_field"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_field"),
    (message(tool_calls=[{}]), "messages[0].tool_calls[0].id", "missing_field"),
    (message(tool_calls=[CALL]), "messages[0].tool_calls", None),
    (message(tool_call_id="x"), "messages[0].tool_call_id", None),
    (message(role="assistant", content=None), "messages[0].content", None),
    ({"response_format": {"type": "yaml"}}, "response_format.type", None),
    ({"modalities": ["text", "audio"]}, "modalities[1]", None),
    ({"service_tier": "priority"}, "service_tier", None),
    ({"tool_choice": "required"}, "tool_choice", None),
    (message(role="tool"), "messages[0].tool_call_id", None),
    (message(role=3), "messages[0].role", None),
    (message(content=[PART]), "messages[0].content[0].type", None),
    (message(content=None), "messages[0].content", None),
    ({"messages": []}, "messages", None),
    ({"messages": "hello"}, "messages", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"temperature": 2.5}, "temperature", None),
    ({"temperature": -1}, "temperature", None),
    ({"seed": -1}, "seed", None),
    ({"top_p": 0}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"min_p": 1.5}, "min_p", None),
    ({"n": 0}, "n", None),
    ({"n": 17}, "n", None),
    ({"n": True}, "n", None),
    ({"seed": 1.5}, "seed", None),
    ({"seed": 2**63}, "seed", None),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", None),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a", 3]}, "stop[1]", None),
    ({"stop": ["a"] * 17}, "stop", None),
    ({"presence_penalty": 3}, "presence_penalty", None),
    ({"frequency_penalty": -3}, "frequency_penalty", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"logit_bias": {"1": 101}}, "logit_bias", None),
    ({"logit_bias": {"a": 1}}, "logit_bias", None),
    ({"logit_bias": {"300": 1}}, "logit_bias", None),
    ({"stop_token_ids": [300]}, "stop_token_ids", None),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", None),
    ({"top_logprobs": 3}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"logprobs": 3}, "logprobs", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unsupported_field"),
    ({"max_tokens": 10_000}, "messages", "context_length_exceeded"),
    (message(content="hello " * 300), "messages", "context_length_exceeded"),
]
COMPLETION_REFUSALS = [
    ({"messages": []}, "messages", "unsupported_field"),
    ({"echo": True}, "echo", "unsupported_field"),
    ({"suffix": "x"}, "suffix", "unsupported_field"),
    ({"best_of": 2}, "best_of", None),
    ({"service_tier": "scale"}, "service_tier", None),
    ({"logprobs": True}, "logprobs", None),
    ({"logprobs": 21}, "logprobs", None),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": ["a", ""]}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": {"a": 1}}, "prompt", None),
    ({"prompt": ["a", 1]}, "prompt", None),
    ({"prompt": [1, [1]]}, "prompt", None),
    ({"prompt": [1, True]}, "prompt[1]", None),
    ({"prompt": [300]}, "prompt", None),
    ({"prompt": [-1]}, "prompt", None),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", None),
    ({"prompt": [1] * 190, "max_tokens": 11}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 200}, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("fields", "param", "code"), CHAT_REFUSALS)
async def test_chat_refusals_name_the_field(
    client: httpx.AsyncClient, service: FakeService, fields: object, param: str, code: str | None
) -> None:
    """What is unknown, unsupported, of the wrong type or out of range is refused by name."""
    answer = await client.post("/v1/chat/completions", json=CHAT | fields)  # type: ignore[operator]

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(("fields", "param", "code"), COMPLETION_REFUSALS)
async def test_completion_refusals_name_the_field(
    client: httpx.AsyncClient, service: FakeService, fields: object, param: str, code: str | None
) -> None:
    """The same for plain completions."""
    answer = await client.post("/v1/completions", json=COMPLETION | fields)  # type: ignore[operator]

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert param in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, missing: str) -> None:
    """A field that must be there is named when it is not."""
    body = {name: value for name, value in CHAT.items() if name != missing}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]

    assert (error["param"], error["code"]) == (missing, "missing_field")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        (ChatTemplate("{{ raise_exception('no system role') }}", {}), "no system role"),
    ],
)
async def test_a_template_refuses_messages(
    client: httpx.AsyncClient, service: FakeService, template: ChatTemplate | None, reason: str
) -> None:
    """What a model's template cannot render is the request's fault, and the reason is told."""
    service.text = Tokenizer(byte_level_encoder(), template)
    answer = await client.post("/v1/chat/completions", json=CHAT)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert reason in answer.json()["error"]["message"]


HARMLESS: list[dict[str, object]] = [
    dict.fromkeys(["stop", "n", "temperature", "tools", "functions", "audio", "user", "seed"]),
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False},
    {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto"},
    {"user": "u", "metadata": {"a": "b"}, "top_k": -1, "logit_bias": {}, "stop": []},
    {"max_tokens": 5, "max_completion_tokens": 5, "logprobs": False, "stream": False},
    message(refusal=None, tool_calls=None, annotations=[]),
]


@pytest.mark.parametrize("fields", HARMLESS)
async def test_fields_that_ask_for_nothing_are_accepted(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    """Null, and the values that mean what happens anyway, are no reason to refuse."""
    answer = await client.post("/v1/chat/completions", json=CHAT | fields)

    assert answer.status_code == 200, answer.text


async def test_a_completion_that_just_fits_is_accepted(client: httpx.AsyncClient) -> None:
    """Prompt and limit may fill the context to the last token."""
    fields = {"prompt": [1] * 190, "max_tokens": 10, "best_of": 1, "echo": False}
    answer = await client.post("/v1/completions", json=COMPLETION | fields)

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": "\\ud800"}', b'{"model": "\xff"}', b'{"n": NaN}']
)
async def test_malformed_json(client: httpx.AsyncClient, body: bytes) -> None:
    """A body that is no JSON is said to be none."""
    answer = await client.post("/v1/completions", content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("method", "path", "size", "status", "code"),
    [
        ("POST", "/v1/completions", 5000, 413, "request_too_large"),
        ("GET", "/v1/completions", 0, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 0, 405, "method_not_allowed"),
        ("POST", "/v1/audio/speech", 0, 404, "not_found"),
        ("GET", "/nothing", 0, 404, "not_found"),
    ],
)
async def test_errors_outside_the_endpoints(
    client: httpx.AsyncClient, method: str, path: str, size: int, status: int, code: str
) -> None:
    """A wrong path, a wrong method and too large a body have OpenAI's error shape too."""
    answer = await client.request(method, path, content=b" " * size)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["message"]


async def test_a_bug_is_an_internal_error_without_details(
    client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody foresaw is logged here and told to nobody else."""

    def broken(_: object) -> None:
        raise RuntimeError("secret")

    service.script = broken
    answer = await client.post("/v1/completions", json=COMPLETION)

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "secret" in caplog.text


async def test_request_ids(client: httpx.AsyncClient) -> None:
    """The client's request id comes back; without a decent one there is one of ours."""
    given = await client.get("/livez", headers={"x-request-id": "abc-1"})
    made = [await client.get("/nowhere"), await client.get("/livez")]
    long = await client.get("/livez", headers={"x-request-id": "a" * 200})

    assert given.headers["x-request-id"] == "abc-1"
    assert len({answer.headers["x-request-id"] for answer in [*made, long]}) == 3
    assert len(long.headers["x-request-id"]) == 32


async def test_probes_and_status(client: httpx.AsyncClient) -> None:
    """Liveness, version, metrics and status answer what the appliance says."""
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json()["version"]
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics.text == "some_metric 1\n"
    status = (await client.get("/api/status")).json()
    assert status["instances"][0]["state"] == "up"
    assert status["models"][0]["residency"] == {"0": "loaded"}
    assert status["kv"]["host"]["shapes"]["300"]["fragmentation"] == 0.25


async def test_verification(client: httpx.AsyncClient) -> None:
    """Every instance with its verdicts, in words; without any if it did not answer."""
    answer = await client.post("/api/verify")

    assert answer.status_code == 200
    assert answer.json() == {
        "instances": [
            {"instance": 0, "answered": True, "models": {"small": "ok", "org/small": "no image"}},
            {"instance": 1, "answered": False, "models": {}},
        ]
    }


async def test_readiness(client: httpx.AsyncClient, service: FakeService) -> None:
    """Ready is 200; not ready is 503 with the reasons."""
    ready = await client.get("/readyz")
    service.reasons = ("request x waits for 99 s",)
    stuck = await client.get("/readyz")

    assert (ready.status_code, ready.json()) == (200, {"ok": True, "reasons": [], "degraded": []})
    assert (stuck.status_code, stuck.json()["reasons"]) == (503, ["request x waits for 99 s"])


async def test_long_prompts_are_encoded_like_short_ones() -> None:
    """A prompt long enough to be encoded off the event loop is refused for its true length."""
    text = "hello " * 5000
    async with connected(create_app(FakeService())) as client:
        answer = await client.post("/v1/completions", json={"model": "small", "prompt": text})

    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(len(small_tokenizer().encode(text))) in error["message"]


DEEP = "[" * 1500 + "]" * 1500
PARAMETERS = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {DEEP}}}}}}}'


async def test_what_is_nested_too_deeply_is_refused(client: httpx.AsyncClient) -> None:
    """It is not our failure."""
    messages = '[{"role": "user", "content": "x"}]'
    body = f'{{"model": "small", "messages": {messages}, "tools": [{PARAMETERS}]}}'
    answer = await client.post("/v1/chat/completions", content=body)

    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]


async def test_what_is_nearly_nested_too_deeply(client: httpx.AsyncClient) -> None:
    """However deep it is, it is answered or refused, also where it can be read but not written."""
    statuses = set()
    for depth in range(900, 1000):
        tool = '{"type":"function","function":{"name":"f","parameters":{"a":%s}}}'
        body = '{"model":"org/small","messages":[{"role":"user","content":"x"}],"tools":[%s]}'
        deep = "[" * depth + "]" * depth
        answer = await client.post("/v1/chat/completions", content=body % (tool % deep))
        statuses.add(answer.status_code)

    assert statuses == {200, 400}


def test_a_file_that_goes_while_it_is_asked_for() -> None:
    """Is not there, rather than a failure of ours."""
    try:
        try:
            raise FileNotFoundError
        except FileNotFoundError as gone:
            raise ImproperlyConfiguredException("x does not exist") from gone
    except ImproperlyConfiguredException as error:
        answer = as_api_error(error)

    assert (answer.status, answer.body.error.code) == (404, "file_not_found")
