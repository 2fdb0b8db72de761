"""Refusals and failures, in the shape OpenAI's clients understand."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from appliance.api.service import (
    GenerationFailed,
    ModelNotFound,
    NothingPrevious,
    PolicyNotActive,
    QueueFull,
)
from appliance.errors import PolicyChoiceError
from appliance.tokens import ChatTemplateMissing, ChatTemplateRefused

log = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words: `type` is the kind, `code` the stable word."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error answer, and of an error event in a stream."""

    error: ErrorDetail


class ApiError(Exception):
    """A request answered with an error. `param` names the field at fault, `code` is stable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


class BadRequest(ApiError):
    """400, naming the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def as_api_error(error: BaseException) -> ApiError:
    """The answer to `error`; one that nobody foresaw is logged and answered without its details."""
    match error:
        case ApiError():
            return error
        case ModelNotFound():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case QueueFull():
            seconds = str(max(1, round(error.retry_after_seconds)))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
        case GenerationFailed():
            return ApiError(error.status, error.message, code=error.code)
        case PolicyChoiceError():
            field = ".".join(error.problems[0].key)
            return ApiError(422, "; ".join(map(str, error.problems)), param=field, code="policy")
        case NothingPrevious():
            return ApiError(409, str(error), code="nothing_previous")
        case PolicyNotActive():
            return ApiError(404, str(error), param=error.policy, code="policy_not_active")
        case ChatTemplateMissing() | ChatTemplateRefused():
            return BadRequest(str(error), "messages", "chat_template")
        case HTTPException() if error.status_code < 500:
            code = _CODES.get(error.status_code)
            headers = {str(k): str(v) for k, v in (error.headers or {}).items()}
            return ApiError(error.status_code, error.detail, code=code, headers=headers)
    log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


def _answer(_: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    answer = as_api_error(error)
    return Response(
        answer.body,
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {HTTPException: _answer, Exception: _answer}
