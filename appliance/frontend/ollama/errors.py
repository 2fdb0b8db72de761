"""Why a request in Ollama's dialect is refused or fails: a status and one sentence."""

from __future__ import annotations

import logging

import msgspec
import pydantic
from litestar.exceptions import HTTPException
from vllm.entrypoints.serve import create_error_response

from appliance.frontend.serving.model_fronts import FrontNotBuilt, UnknownModel
from appliance.http.errors import ApiError

log = logging.getLogger(__name__)

TOO_LONG = "the input length exceeds the context length"
"""Ollama's words, which clients match."""


class OllamaError(Exception):
    """The answer is ``{"error": message}`` under `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.message})


def as_ollama_error(error: Exception) -> OllamaError:
    """The answer to `error`. One that is no refusal is logged and answered without details."""
    match error:
        case OllamaError():
            return error
        case ApiError():
            return OllamaError(error.status, error.body.error.message)
        case UnknownModel(asked=None):
            return OllamaError(400, "model is required")
        case UnknownModel():
            return OllamaError(404, f"model '{error.asked}' not found")
        case FrontNotBuilt():
            return OllamaError(500, str(error))
        case HTTPException() if error.status_code < 500:
            return OllamaError(error.status_code, error.detail)
        case pydantic.ValidationError():
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            return OllamaError(400, f"{field}: {first['msg']}" if field else first["msg"])
    known = create_error_response(error).error
    if known.type == "InternalServerError" and known.code == 500:
        log.error("a request failed unexpectedly", exc_info=error)
        return OllamaError(500, "internal error")
    return OllamaError(known.code, known.message)
