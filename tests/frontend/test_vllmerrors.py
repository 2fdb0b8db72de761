"""vLLM's errors of messages have Anthropic's shape, and flags are keys; all else goes through."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from appliance.frontend.serving.vllm_errors import VllmErrors

OPENAIS = {"error": {"message": "no", "type": "Bad Request", "param": "body.x", "code": 400}}
VLLMS = {"type": "error", "error": {"type": "BadRequestError", "message": "no"}}
FLAGS = {"error": {"message": "--enable-auto-tool-choice and --tool-call-parser to be set"}}
MESSAGES = "/v1/messages"


async def answer(request: Request) -> Any:
    match request.url.path.removeprefix(MESSAGES):
        case "/stream":

            async def events() -> Any:
                yield b"event: ping\n\n"
                yield b"event: message_stop\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        case "/good":
            return JSONResponse({"type": "message"})
        case "/other":
            return JSONResponse(["no error of a known shape"], 500)
        case "/v1/chat/completions":
            return JSONResponse(FLAGS, 400)
        case "/v1/completions":
            try:
                await validate_json_request(request)
            except RequestValidationError as error:
                return JSONResponse({"error": {"message": error.errors()[0]}}, 400)
    body = OPENAIS if request.url.path.endswith("/openai") else VLLMS
    return JSONResponse(body, int(request.query_params["status"]))


async def ask(path: str) -> httpx.Response:
    inner = Starlette(routes=[Route("/{path:path}", answer)])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, VllmErrors(scope, send).send)  # type: ignore[arg-type]

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        return await client.get(path, headers={"x-request-id": "req-1"})


@pytest.mark.parametrize("shape", ["openai", "vllm"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (500, "api_error")],
)
async def test_errors(shape: str, status: int, kind: str) -> None:
    """With a type that Anthropic's clients know, and the request's id."""
    told = await ask(f"{MESSAGES}/{shape}?status={status}")

    assert told.status_code == status
    assert told.json() == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": "req-1",
    }
    assert int(told.headers["content-length"]) == len(told.content)


async def test_other_answers_go_through() -> None:
    assert (await ask(f"{MESSAGES}/good")).json() == {"type": "message"}
    assert (await ask(f"{MESSAGES}/stream")).text == "event: ping\n\nevent: message_stop\n\n"
    other = await ask(f"{MESSAGES}/other")
    assert (other.status_code, other.json()) == (500, ["no error of a known shape"])


async def test_a_body_that_is_not_called_json() -> None:
    """As `curl -d` sends it: vLLM's own check refuses it, and the answer says what to send."""
    told = await ask("/v1/completions")

    assert told.json()["error"]["message"] == (
        "Unsupported Media Type: Only 'application/json' is allowed;"
        " send the header Content-Type: application/json"
    )


async def test_flags_are_keys_of_the_configuration() -> None:
    """A remedy that can be followed here, in OpenAI's shape, whole."""
    told = await ask("/v1/chat/completions")

    assert told.json() == {"error": {"message": "tool_parser to be set"}}
    assert int(told.headers["content-length"]) == len(told.content)
