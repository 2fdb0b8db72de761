"""A stream of `/v1/messages` that fails midway ends with that failure, in Anthropic's words.

vLLM makes it of a stream of chat completions. An error in that it takes for a chunk that it cannot
read: the client was sent the complaints of its validation, and the log their traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from appliance.http.error_formats import anthropic_error
from appliance.http.errors import ApiError

_BEGINNING: Final = 'data: {"error"'

_convert: Final = AnthropicServingMessages.message_stream_converter


class _Detail(msgspec.Struct):
    message: str
    code: int = 500


class _Error(msgspec.Struct):
    error: _Detail


def end_with_failures() -> None:
    """Have streams of messages end so from now on."""
    AnthropicServingMessages.message_stream_converter = _converted


async def _converted(serving: AnthropicServingMessages, chunks: Any) -> AsyncIterator[str]:
    failures: list[bytes] = []
    async with aclosing(_convert(serving, _until_failure(chunks, failures))) as events:
        async for event in events:
            yield event
    for failure in failures:
        yield f"event: error\ndata: {failure.decode()}\n\n"


async def _until_failure(chunks: Any, failures: list[bytes]) -> AsyncIterator[str]:
    """The chunks before a failure, which goes into `failures`."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(_BEGINNING):
                failures.append(_worded(chunk))
                return
            yield chunk


def _worded(chunk: str) -> bytes:
    detail = msgspec.json.decode(chunk.removeprefix("data:").strip(), type=_Error).error
    status = detail.code if 400 <= detail.code < 600 else 500
    error = msgspec.json.decode(anthropic_error(ApiError(status, detail.message), ""))
    return msgspec.json.encode({"type": "error", "error": error["error"]})
