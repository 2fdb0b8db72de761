"""vLLM's errors, in the words of this configuration and in the shape of their dialect.

vLLM names the flags of ``vllm serve`` as a remedy, where a model's table has keys. Below
``/v1/messages`` it answers a body that cannot be validated in OpenAI's shape, and other errors with
types that Anthropic does not have. What a client nested too deeply is a fault of the client.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar.types import Message, Scope, Send

from appliance.http.error_formats import anthropic_error
from appliance.http.errors import ApiError
from appliance.http.request_ids import request_id

ANTHROPIC: Final = "/v1/messages"
_KEYS: Final = (
    (b"--enable-auto-tool-choice and --tool-call-parser", b"tool_parser"),
    (b"--tool-call-parser", b"tool_parser"),
    (b"--reasoning-parser", b"reasoning_parser"),
)
"""Flags of ``vllm serve``, and the keys of a model's table that stand for them."""
_NO_IMAGES: Final = (
    b" is not a multimodal model",
    b" is served for text only: leave out images, sound and videos",
)
"""What vLLM says of a part of a message that is no text, and what is said here: the model may well
read images elsewhere."""
_NO_JSON: Final = (
    b"Only 'application/json' is allowed",
    b"Only 'application/json' is allowed; send the header Content-Type: application/json",
)
"""What vLLM says of a body of another type, such as one of `curl -d`, and what to do about it."""
_TOO_DEEP: Final = b"maximum recursion depth exceeded"
"""How Python says so of JSON in a text, such as the arguments of a call."""
_NESTED: Final = "JSON in a message is nested too deeply"
_JSON: Final = b"application/json"


class _Told(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    """Either shape."""

    error: _Told


class VllmErrors:
    """What `send` is for vLLM's application: an error is held until it is whole."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._head: Any = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Take a message of vLLM's answer."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] >= 400 and kind.startswith(_JSON):
                self._head = message
                return
        if self._head is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body, status = b"".join(self._parts), self._head["status"]
        if status == 500 and _TOO_DEEP in body:
            status, body = 400, _bad_request(_NESTED)
        body = self._reshaped(status, body)
        headers = [pair for pair in self._head["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        head: Any = {**self._head, "status": status, "headers": headers}
        await self._send(head)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _reshaped(self, status: int, body: bytes) -> bytes:
        for theirs, ours in (*_KEYS, _NO_IMAGES, _NO_JSON):
            body = body.replace(theirs, ours)
        if not self._scope["path"].startswith(ANTHROPIC):
            return body
        try:
            message = msgspec.json.decode(body, type=_Error).error.message
        except msgspec.DecodeError:
            return body
        error = ApiError(status, message)
        return anthropic_error(error, request_id(self._scope))


def _bad_request(message: str) -> bytes:
    """In vLLM's shape."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return msgspec.json.encode({"error": error})
