"""Ollama's `/api/chat` and `/api/generate` for a model of another server.

The server has its own defaults of how tokens are drawn, so Ollama's are not sent. What needs the
model's tokenizer cannot be done: `context` is refused, and prompts are not cut to `num_ctx`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from appliance.frontend.ollama import templates
from appliance.frontend.ollama.errors import OllamaError
from appliance.frontend.ollama.replies import Endpoint, Reply, events, understood
from appliance.frontend.ollama.requests import (
    ChatBody,
    GenerateBody,
    OllamaMessage,
    OllamaOptions,
    decoded,
    openai_messages,
)
from appliance.frontend.ollama.routes import kept_alive
from appliance.frontend.remote.bodies import CHAT, COMPLETIONS
from appliance.frontend.remote.said import BadAnswer
from appliance.frontend.remote.translation import raw
from appliance.http.errors import ApiError

_EFFORTS: Final = {True: "medium", False: "none"}
"""What OpenAI's API has in place of thoughts that are on or off."""


class OllamaChat:
    """One request."""

    media_type = b"application/x-ndjson"

    def __init__(
        self, path: str, body: bytes, name: str, *, strict: bool, keep_alive_seconds: float
    ) -> None:
        """`name` is what the client calls the model. Raises `ApiError`."""
        started = time.monotonic()
        endpoint: Endpoint = "chat" if path == "/api/chat" else "generate"
        kind: type[ChatBody] | type[GenerateBody] = ChatBody if endpoint == "chat" else GenerateBody
        try:
            asked: ChatBody | GenerateBody = decoded(body, kind, strict=strict)
            self.path, fields = _chat(asked) if isinstance(asked, ChatBody) else _generate(asked)
        except OllamaError as error:
            raise ApiError(error.status, error.message) from error
        self._keep_alive_seconds = keep_alive_seconds
        self._reply = Reply(name, endpoint, started)
        self.placed = b""
        """The whole answer, if the client wants no text but to have the model loaded: it is
        elsewhere."""
        if asked.loads:
            self.placed = self._reply.placed("unload" if asked.unloads else "load")
        options = asked.options or OllamaOptions()
        self.fields = raw(fields | options.asked())
        self.ignored: tuple[str, ...] = () if options.num_ctx is None else ("options.num_ctx",)

    def whole(self, said: dict[str, Any]) -> bytes:
        try:
            return self._reply.whole(understood(msgspec.json.encode(said)))
        except (OllamaError, msgspec.ValidationError) as error:
            raise BadAnswer(_why(error)) from error

    def stream(self, chunks: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
        """Lines, with white space in between while nothing comes."""
        return kept_alive(self._lines(chunks), self._keep_alive_seconds)

    async def _lines(self, chunks: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
        ended = False

        async def until_end() -> AsyncGenerator[str]:
            nonlocal ended
            async with aclosing(chunks):
                async for chunk in chunks:
                    ended = chunk.endswith("[DONE]\n\n")
                    yield chunk

        try:
            async for said in events(until_end()):
                if line := self._reply.line(said):
                    yield line
        except (OllamaError, msgspec.ValidationError) as error:  # the head is sent
            yield OllamaError(502, _why(error)).body + b"\n"
            return
        if ended:
            yield self._reply.last()


def _chat(asked: ChatBody) -> tuple[str, dict[str, Any]]:
    messages = openai_messages(asked.messages or ())
    return CHAT, _common(asked) | _of_chat(asked) | {
        "messages": messages,
        "tools": asked.tools or None,
    }


def _generate(asked: GenerateBody) -> tuple[str, dict[str, Any]]:
    """A chat of one message, or a plain completion of what no chat template is for. Raises
    `OllamaError`."""
    if asked.context:
        raise OllamaError(
            400,
            "context: the tokens of an earlier answer mean nothing to another server; send the "
            "conversation to /api/chat",
        )
    prompt = asked.prompt or ""
    if not (asked.raw or asked.suffix or asked.template):
        system = [OllamaMessage(role="system", content=asked.system)] if asked.system else []
        question = OllamaMessage(role="user", content=prompt, images=asked.images)
        messages = openai_messages([*system, question])
        return CHAT, _common(asked) | _of_chat(asked) | {"messages": messages}
    asked.check_places()
    if asked.template and not asked.suffix:
        values = {"System": asked.system or "", "Prompt": prompt, "Suffix": ""}
        prompt = templates.render(asked.template, values)
    return COMPLETIONS, _common(asked) | {
        "prompt": prompt,
        "suffix": asked.suffix or None,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }


def _common(asked: ChatBody | GenerateBody) -> dict[str, Any]:
    return {
        "stream": asked.streams,
        "stream_options": {"include_usage": True} if asked.streams else None,
        "response_format": asked.response_format,
    }


def _of_chat(asked: ChatBody | GenerateBody) -> dict[str, Any]:
    effort = asked.think if isinstance(asked.think, str) else None
    if isinstance(asked.think, bool):
        effort = _EFFORTS[asked.think]
    return {
        "reasoning_effort": effort,
        "logprobs": True if asked.logprobs else None,
        "top_logprobs": asked.top_logprobs if asked.logprobs else None,
    }


def _why(error: OllamaError | msgspec.ValidationError) -> str:
    if isinstance(error, OllamaError):
        return error.message
    return "a field of it is not as OpenAI's API has it"
