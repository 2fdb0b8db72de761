"""Responses in their published schema: what it has and vLLM's answers lack.

vLLM writes null where the schema allows a field to be missing but not to be null, and does not say
some of what the schema requires. Both are mended where vLLM's objects are made and written, so that
answers, events and what is stored of them say the same.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Final

from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseFormatTextConfig,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseTextConfig,
)
from openai.types.shared import ResponseFormatText
from pydantic import BaseModel
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
)

_NOT_NULL: Final[tuple[tuple[type[BaseModel], tuple[str, ...]], ...]] = (
    (ResponseOutputText, ("logprobs",)),
    (ResponseOutputMessage, ("phase",)),
    (ResponseReasoningItem, ("content", "encrypted_content", "status")),
    (ResponseTextConfig, ("verbosity",)),
)
"""What is left out where it is null."""

_HOLDERS: Final[tuple[type[BaseModel], ...]] = (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponsesResponse,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponseCompletedEvent,
)
"""What is written with one of those in it, inner ones first: a serializer is made of its parts."""

_TEXT: Final[ResponseFormatTextConfig] = ResponseFormatText(type="text")
_made_by_vllm: Final = ResponsesResponse.from_request


@cache
def publish_responses() -> None:
    """Have this process's vLLM write responses as they are published."""
    for model, names in _NOT_NULL:
        for name in names:
            model.model_fields[name].exclude_if = _is_null
        model.model_rebuild(force=True)
    for model in _HOLDERS:
        model.model_rebuild(force=True)
    maker: Any = ResponsesResponse
    maker.from_request = staticmethod(_from_request)


def _is_null(value: object) -> bool:
    return value is None


def _from_request(
    request: ResponsesRequest, *args: Any, status: str, **settings: Any
) -> ResponsesResponse:
    """vLLM's response to a request, and what the schema requires besides."""
    response = _made_by_vllm(request, *args, status=status, **settings)
    text = response.text or ResponseTextConfig()
    if text.format is None:
        text = text.model_copy(update={"format": _TEXT})
    besides: dict[str, Any] = {
        "text": text,
        "top_logprobs": response.top_logprobs or 0,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": None,
        "store": bool(request.store),
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": (request.model_extra or {}).get("safety_identifier"),
    }
    for name, value in besides.items():
        setattr(response, name, value)
    return response
