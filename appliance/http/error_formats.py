"""Errors in the words of the dialect that the path belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from appliance.http.errors import ApiError, as_api_error
from appliance.http.request_ids import request_id

ErrorShape: TypeAlias = Callable[[ApiError, str], bytes]
"""From an error and the request's id to JSON."""

OLLAMA_PATHS: Final = (
    *("/api/chat", "/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version"),
    *("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"),
    *("/api/embed", "/api/embeddings", "/api/me", "/api/signout", "/api/user"),
    "/api/experimental",
)
"""Ollama's, with what is below them; the rest below ``/api`` is the admin API."""

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_error(error: ApiError, request: str = "") -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return msgspec.json.encode(error.body)


def anthropic_error(error: ApiError, request: str) -> bytes:
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    detail = {"type": kind, "message": error.body.error.message}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request})


def ollama_error(error: ApiError, request: str = "") -> bytes:
    """``{"error": "…"}``."""
    return msgspec.json.encode({"error": error.body.error.message})


def shape_of(path: str) -> ErrorShape:
    """The format of an error at `path`: OpenAI's, unless the path is another dialect's."""
    if _below(path, "/v1/messages"):
        return anthropic_error
    if any(_below(path, mine) for mine in OLLAMA_PATHS):
        return ollama_error
    return openai_error


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


def _answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    answer = as_api_error(error)
    return Response(
        shape_of(request.scope["path"])(answer, request_id(request.scope)),
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {HTTPException: _answer, Exception: _answer}
