"""Anthropic's `/v1/messages` for a model of another server, by vLLM's translation to a chat.

vLLM's works on a template and a tokenizer, too: what belongs to them is left out here. System
messages within a conversation are moved to its beginning, as many templates take no others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final, cast

import msgspec
import pydantic
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from appliance.frontend.remote.bodies import CHAT
from appliance.frontend.remote.said import BadAnswer
from appliance.frontend.remote.translation import raw
from appliance.http.errors import BadRequest

_LEFT_OUT: Final = frozenset({"model", "max_completion_tokens", "thinking_token_budget"})
"""`max_tokens` says the same as the second one, and more servers know it."""
_FILTERED: Final = "content_filter"
_REFUSAL: Final = "refusal"
"""How an answer ends that the server cut off for what it says; vLLM's translation knows of none."""
_NO_SERVING: Final = cast(Any, None)
"""vLLM's translations of answers are methods of what serves a model here, and use none of it."""


class Messages:
    """One request."""

    path = CHAT
    media_type = b"text/event-stream; charset=utf-8"
    placed = b""

    def __init__(self, body: bytes) -> None:
        """Raises `BadRequest`."""
        try:
            asked = AnthropicMessagesRequest.model_validate_json(body)
            _check_sources(asked)
            chat = AnthropicServingMessages.to_chat_completion_request(
                asked, merge_inline_system=True
            )
        except pydantic.ValidationError as error:
            raise _first_fault(error) from error
        except ValueError as error:
            raise BadRequest(str(error)) from error
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply", code="invalid_json") from error
        said = chat.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        fields = {name: value for name, value in said.items() if name not in _LEFT_OUT}
        if "stream_options" in fields:
            fields["stream_options"] = {"include_usage": True}
        if fields.get("parallel_tool_calls") is not False:
            fields.pop("parallel_tool_calls", None)  # parallel calls are OpenAI's default
        if not fields.get("tools"):
            for name in ("tools", "tool_choice", "parallel_tool_calls"):
                fields.pop(name, None)
        self.fields = raw(fields)
        self.ignored: tuple[str, ...] = ()

    def whole(self, said: dict[str, Any]) -> bytes:
        """A message. A call that the end of the answer cut off is none."""
        (choice,) = said["choices"]
        message = choice["message"]
        cut = choice["finish_reason"] == "length"
        message["tool_calls"] = list(_whole_calls(message["tool_calls"], cut=cut))
        try:
            response = ChatCompletionResponse.model_validate(said | {"created": 0})
            answer = AnthropicServingMessages.messages_full_converter(_NO_SERVING, response)
        except (pydantic.ValidationError, ValueError, RecursionError) as error:
            raise BadAnswer("a field of it is not as OpenAI's API has it") from error
        found = answer.model_dump(exclude_none=True)
        if choice["finish_reason"] == _FILTERED:
            found["stop_reason"] = _REFUSAL
        return msgspec.json.encode(found)

    async def stream(self, chunks: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
        """Events."""
        filtered = False

        async def watched() -> AsyncGenerator[str]:
            nonlocal filtered
            async with aclosing(chunks):
                async for chunk in chunks:
                    filtered = filtered or f'"finish_reason":"{_FILTERED}"' in chunk
                    yield chunk

        events = AnthropicServingMessages.message_stream_converter(_NO_SERVING, watched())
        async with aclosing(events):
            async for event in events:
                if filtered and event.startswith("event: message_delta"):
                    event = event.replace('"stop_reason":null', f'"stop_reason":"{_REFUSAL}"')
                yield event.encode()


def _whole_calls(calls: list[dict[str, Any]], *, cut: bool) -> Iterator[dict[str, Any]]:
    """Those whose arguments are an object. Raises `BadAnswer` for others that were not cut off."""
    for call in calls:
        function = call["function"]
        function["arguments"] = function["arguments"] or "{}"
        try:
            msgspec.json.decode(function["arguments"], type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            if cut:
                continue
            raise BadAnswer("the model called a tool without JSON for its arguments") from error
        yield call


def _check_sources(asked: AnthropicMessagesRequest) -> None:
    """Raise `BadRequest` for images that are not in the body: vLLM's translation takes what it
    does not know for an empty one."""
    for message in asked.messages:
        blocks = () if isinstance(message.content, str) else message.content
        sources = [block.source for block in blocks if block.type == "image"]
        for block in blocks:
            items = block.content if isinstance(block.content, list) else ()
            sources += [item.get("source") for item in items if item.get("type") == "image"]
        for source in sources:
            kind = source.get("type") if isinstance(source, dict) else None
            if kind != "base64" or not source.get("data"):
                raise BadRequest(
                    "messages: nothing is fetched for a model of another server; send an image "
                    'with source.type "base64" and its data',
                    "messages",
                )


def _first_fault(error: pydantic.ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    field = str(first["loc"][0]) if first["loc"] else None
    return BadRequest(f"{place}: {first['msg']}" if place else first["msg"], field)
