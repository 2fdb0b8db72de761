"""How many messages, texts and tokens a body may list, before time is spent on each of them.

What vLLM makes of an item takes the thread of all streams some microseconds to some hundred, and
a body has room for a million items. What is not as it should be here, vLLM refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from appliance.frontend.serving.engine_client import MAX_LISTED_TOKENS, TooManyListed
from appliance.http.errors import BadRequest
from appliance.service.front_frames import FrontModel

MAX_MESSAGES: Final = 1 << 14
"""Of a conversation, with the parts of their content."""
MAX_TEXTS: Final = 1 << 12
"""To embed, to classify or to rank in one request: each is a request of its own, and no more of a
key may wait."""

_CONVERSATIONS: Final = {"/v1/responses": "input", "/v1/responses/input_tokens": "input"}
"""Fields that hold the messages; elsewhere it is `messages`."""
_FITTING: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""Paths whose conversation has to fit into the model's context."""
_TRUNCATING: Final = frozenset({"truncate_prompt_tokens", "truncation"})
"""Fields with which it need not."""
_TEXTS: Final = (
    *("input", "inputs", "texts", "data", "documents", "queries"),
    *("text_1", "text_2", "data_1", "data_2"),
)
_LEAST_BYTES: Final = len(b"{},")
"""Of a message, or a part of one."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


def check_messages(path: str, fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for a conversation of more messages than the context has tokens, as each
    is rendered as one at least; or of more messages and parts of them than `MAX_MESSAGES`."""
    name = _CONVERSATIONS.get(path, "messages")
    raw = fields.get(name)
    fits = path in _FITTING and not _TRUNCATING & fields.keys()
    most = min(MAX_MESSAGES, model.max_context) if fits else MAX_MESSAGES
    if not isinstance(raw, msgspec.Raw) or memoryview(raw).nbytes < _LEAST_BYTES * most:
        return
    if fits and (count := len(_items(raw))) > model.max_context:
        message = (
            f"This model's maximum context length is {model.max_context} tokens. However, there are"
            f" {count} messages. Please reduce the number of messages."
        )
        raise BadRequest(message, name, "context_length_exceeded")
    if (count := _messages(raw)) > MAX_MESSAGES:
        raise BadRequest(
            f"{name}: a request may have {MAX_MESSAGES} messages and parts of messages, this has"
            f" {count}",
            name,
            "too_many_messages",
        )


def check_texts(fields: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for more texts than may be pooled in one request."""
    for name in _TEXTS:
        raw = fields.get(name)
        if not isinstance(raw, msgspec.Raw) or memoryview(raw).nbytes <= MAX_TEXTS:
            continue
        # One text may be a list of tokens.
        count = sum(_first(one) not in b"-0123456789" for one in _items(raw))
        if count > MAX_TEXTS:
            raise BadRequest(
                f"{name}: a request may have {MAX_TEXTS} texts, this has {count}: send several",
                name,
                "too_many_texts",
            )


def check_tokens(path: str, fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for lists of tokens that are too many for all choices of a call together,
    before each is made to a number, and copied for each choice; and for more tokens to be made text
    than a context has."""
    if path == "/detokenize" and isinstance(raw := fields.get("tokens"), msgspec.Raw):
        count, most = _commas(raw), max(MAX_LISTED_TOKENS, model.max_context)
        if count > most:
            raise BadRequest(
                f"tokens: {count} are more than {most}: send several requests",
                "tokens",
                "too_many_tokens",
            )
    try:
        choices = msgspec.json.decode(fields.get("n", b"1"), type=int | None) or 1
    except msgspec.ValidationError:
        return
    listed = sum(map(_commas, _lists_of_tokens(fields)))
    if listed * choices > MAX_LISTED_TOKENS:
        raise BadRequest(str(TooManyListed()), "n", "invalid_request")


def _messages(raw: msgspec.Raw) -> int:
    """Messages and parts of them; of a list of conversations, those of all."""
    return sum(
        sum(map(_parts, _items(one))) if _first(one) == b"[" else _parts(one) for one in _items(raw)
    )


def _parts(message: msgspec.Raw) -> int:
    """As how many a message counts: the parts of its content, one if that is text."""
    return max(1, len(_items(_content(message)))) if _first(message) == b"{" else 1


def _content(message: msgspec.Raw) -> msgspec.Raw:
    try:
        return msgspec.json.decode(message, type=_Message).content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(b"null")


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Those of a list; none of anything else."""
    if _first(raw) != b"[":
        return []
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _commas(raw: msgspec.Raw) -> int:
    return memoryview(raw).tobytes().count(b",")


def _lists_of_tokens(fields: Mapping[str, Any]) -> Iterator[msgspec.Raw]:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if isinstance(raw := fields.get(name), msgspec.Raw):
            yield raw
