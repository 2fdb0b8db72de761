"""Refusals and failures: what is answered to each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec
from litestar.exceptions import HTTPException

from appliance.engines.protocol import GuideRefused
from appliance.errors import (
    CheckpointError,
    ConfigError,
    FilesLeft,
    KeyExists,
    KeyFieldError,
    KeyNotFound,
    KeysError,
    KeysReadOnly,
    NotSaved,
    OrganizationInUse,
    OrganizationNotFound,
    PolicyChoiceError,
    PullError,
)
from appliance.service.front_frames import Refused
from appliance.service.interface import (
    AdapterNotPlaced,
    GenerationFailed,
    InstanceNotFound,
    ModelExists,
    ModelNotFound,
    ModelQueueFull,
    NothingPrevious,
    PolicyNotActive,
    QueueFull,
    RequestNotFound,
    SlabsUnanswered,
)
from appliance.vocabulary import RequestId

log = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words: `type` is the kind, `code` the stable word."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error answer of OpenAI's, and of an error event in a stream."""

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

    def renamed(self, names: Mapping[str, str]) -> BadRequest:
        """The same for a client that knows the field by another name, if it is in `names`."""
        detail = self.body.error
        field = detail.param or ""
        if field not in names:
            return self
        return BadRequest(detail.message.replace(field, names[field], 1), names[field], detail.code)


class Unsupported(BadRequest):
    """400 for a field that is known and not supported, or not known at all."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: this field is not supported", field, "unsupported_field")


_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


_AS_THEY_ARE: Final[tuple[tuple[type[BaseException], int, str, str | None], ...]] = (
    (ModelNotFound, 404, "model_not_found", "model"),
    (FilesLeft, 404, "files_left", "model"),
    (ModelExists, 409, "model_exists", "name"),
    (AdapterNotPlaced, 409, "adapter_not_placed", "adapter"),
    (InstanceNotFound, 404, "instance_not_found", "number"),
    (RequestNotFound, 404, "request_not_found", "id"),
    (CheckpointError, 422, "checkpoint", "path"),
    (PullError, 422, "checkpoint", "path"),
    (KeyNotFound, 404, "key_not_found", "name"),
    (OrganizationNotFound, 404, "organization_not_found", "name"),
    (OrganizationInUse, 409, "organization_in_use", "name"),
    (NothingPrevious, 409, "nothing_previous", None),
)
"""Errors whose messages are answered as they are: status, code, and the field that is wrong."""


def as_refused(error: ApiError, call: int, request: RequestId | None = None) -> Refused:
    """The error as the core and front ends say it to each other, of a call or a request of it."""
    detail = error.body.error
    return Refused(
        call=call,
        request=request,
        status=error.status,
        code=detail.code or "invalid_request",
        message=detail.message,
        param=detail.param,
        headers=tuple(error.headers.items()),
    )


def as_api_error(error: BaseException) -> ApiError:
    """The answer to `error`; an unexpected one is logged and answered without its details."""
    for kind, status, named, field in _AS_THEY_ARE:
        if isinstance(error, kind):
            return ApiError(status, str(error), param=field, code=named)
    match error:
        case ApiError():
            return error
        case SlabsUnanswered():
            message = f"{error}; try again later"
            return ApiError(503, message, code="slabs_unanswered", headers={"Retry-After": "1"})
        case QueueFull() | ModelQueueFull():
            seconds = str(max(1, round(error.retry_after_seconds)))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
        case GenerationFailed():
            headers = {}
            if error.retry_after_seconds is not None:
                headers["Retry-After"] = str(max(1, round(error.retry_after_seconds)))
            return ApiError(error.status, error.message, code=error.code, headers=headers)
        case PolicyChoiceError():
            field = ".".join(error.problems[0].key)
            return ApiError(422, "; ".join(map(str, error.problems)), param=field, code="policy")
        case ConfigError():
            key = error.problems[0].key
            return ApiError(422, "; ".join(map(str, error.problems)), param=key, code="config")
        case NotSaved():
            return ApiError(409, f"{error}; nothing was changed", code="not_saved")
        case KeyExists():
            message = f"{error}; take another name, or revoke it first"
            return ApiError(409, message, param="name", code="key_exists")
        case KeyFieldError():
            return BadRequest(str(error), error.field)
        case KeysReadOnly():
            return ApiError(409, str(error), code="keys_read_only")
        case KeysError():
            return ApiError(409, f"{error}; nothing was changed", code="not_saved")
        case PolicyNotActive():
            return ApiError(404, str(error), param=error.policy, code="policy_not_active")
        case GuideRefused():
            return BadRequest(f"structured output: {error}", code="invalid_guide")
        case HTTPException(detail="client disconnected prematurely"):  # litestar's, and a 500
            return ApiError(499, "the client closed the connection", code="client_closed")
        case HTTPException(__cause__=FileNotFoundError()):  # litestar's, of a file to be sent
            return ApiError(404, "the file was deleted meanwhile", code="file_not_found")
        case RecursionError():  # bodies are all that is nested; some can be read but not written
            return BadRequest("the body is nested too deeply", code="invalid_json")
        case HTTPException() if error.status_code < 500:
            code = _CODES.get(error.status_code)
            headers = {str(k): str(v) for k, v in (error.headers or {}).items()}
            return ApiError(error.status_code, error.detail, code=code, headers=headers)
    log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")
