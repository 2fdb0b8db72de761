"""How many fields, objects, texts and tokens a body may list, before time is spent on each of them.

What vLLM makes of an item takes the thread of all streams some microseconds to some hundred, and
a body has room for a million items. What is not as it should be here, vLLM refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from appliance.frontend.serving.engine_client import MAX_LISTED_TOKENS, TooManyListed
from appliance.http.errors import BadRequest
from appliance.service.front_frames import FrontModel

MAX_FIELDS: Final = 1 << 10
"""Of a body."""
MAX_OBJECTS: Final = 1 << 14
"""In a field: messages, parts of them, calls, documents, at any depth."""
MAX_TOOLS: Final = 1 << 10
"""That a request may offer: each is a schema that is read several times."""
MAX_VALUES: Final = 1 << 17
"""In a field, in lists and objects of any depth, unless it is a text or a list of tokens."""
MAX_TEXTS: Final = 1 << 11
"""To embed, to classify or to rank in one request: each is a request of its own."""
MAX_PAIRED: Final = 1 << 23
"""Characters of a query, once for each text that it is compared with: each pair is encoded."""

_CONVERSATIONS: Final = {"/v1/responses": "input", "/v1/responses/input_tokens": "input"}
"""Fields that hold the messages; elsewhere it is `messages`."""
_FITTING: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""Paths whose conversation has to fit into the model's context."""
_TRUNCATING: Final = frozenset({"truncate_prompt_tokens", "truncation"})
"""Fields with which it need not."""
_TEXTS: Final = (
    *("input", "inputs", "texts", "data", "documents", "queries"),
    *("text_1", "text_2", "data_1", "data_2", "items"),
)
_PAIRED: Final = ("query", "queries", "text_1", "data_1", "instruction")
"""Fields whose one text may be compared with many."""
_OF_TOKENS: Final = ("stop_token_ids", "logit_bias", "allowed_token_ids")
_LISTS: Final = frozenset({*_TEXTS, *_OF_TOKENS, "prompt", "tokens", "context"})
"""Fields that hold texts or tokens, each with a bound of its own."""
_MAX_SHOWN: Final = 64
"""Characters of a field's name that are repeated."""
_LEAST_BYTES: Final = len(b"{},")
"""Of a message."""
_LEAST_CHARACTERS: Final = 1 << 18
_PER_TOKEN: Final = 16
"""Characters that may be made tokens without having to fit into the context: so many for each token
of the context, and `_LEAST_CHARACTERS` in any case."""


def check_values(fields: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for more fields, objects or values than a body may have. O(bytes)."""
    if len(fields) > MAX_FIELDS:
        raise BadRequest(
            f"a body may have {MAX_FIELDS} fields, this has {len(fields)}", code="too_many_fields"
        )
    for name, raw in fields.items():
        if isinstance(raw, msgspec.Raw) and memoryview(raw).nbytes >= MAX_TOOLS:
            _check_value(name[:_MAX_SHOWN], raw)


def _check_value(name: str, raw: msgspec.Raw) -> None:
    if _first(raw) == b'"':
        return
    if name == "tools" and (count := len(_items(raw))) > MAX_TOOLS:
        raise BadRequest(
            f"tools: a request may offer {MAX_TOOLS} tools, this has {count}",
            name,
            "too_many_tools",
        )
    if (count := _outside_texts(raw, b"{", MAX_OBJECTS)) > MAX_OBJECTS:
        raise BadRequest(
            f"{name}: a field may have {MAX_OBJECTS} objects (messages, their parts, calls of"
            f" tools), this has {count}",
            name,
            "too_many_objects",
        )
    if name in _LISTS:
        return
    if (count := _outside_texts(raw, b",", MAX_VALUES)) > MAX_VALUES:
        raise BadRequest(
            f"{name}: a field may have {MAX_VALUES} values, this has {count}",
            name,
            "too_many_values",
        )


def check_messages(path: str, fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for a conversation of more messages than the context has tokens, as each
    is rendered as one at least."""
    if path not in _FITTING or _TRUNCATING & fields.keys():
        return
    name = _CONVERSATIONS.get(path, "messages")
    raw = fields.get(name)
    if (
        not isinstance(raw, msgspec.Raw)
        or memoryview(raw).nbytes < _LEAST_BYTES * model.max_context
    ):
        return
    if (count := len(_items(raw))) > model.max_context:
        message = (
            f"This model's maximum context length is {model.max_context} tokens. However, there are"
            f" {count} messages. Please reduce the number of messages."
        )
        raise BadRequest(message, name, "context_length_exceeded")


def check_tokenized(path: str, fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for a text that is only to be made tokens, and is longer than any that the
    model could be asked with: each token of it is listed in the answer."""
    if path != "/tokenize":
        return
    most = max(_LEAST_CHARACTERS, _PER_TOKEN * model.max_context)
    for name in ("prompt", "messages"):
        raw = fields.get(name)
        if not isinstance(raw, msgspec.Raw) or memoryview(raw).nbytes <= most:
            continue
        if (count := _characters(raw)) > most:
            raise BadRequest(
                f"{name}: {count} characters are more than {most}: send several requests",
                name,
                "text_too_long",
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


def check_pairs(fields: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for a text that is too long to be compared with so many."""
    lists = (fields[name] for name in ("documents", "items", "text_2", "data_2") if name in fields)
    texts = max((len(_items(one)) for one in lists if isinstance(one, msgspec.Raw)), default=0)
    for name in _PAIRED:
        raw = fields.get(name)
        if not isinstance(raw, msgspec.Raw) or len(_items(raw)) > 1:
            continue
        if (count := _characters(raw) * texts) > MAX_PAIRED:
            raise BadRequest(
                f"{name}: once for each of {texts} texts it comes to {count} characters, more than"
                f" {MAX_PAIRED}: shorten it, or send fewer texts",
                name,
                "text_too_long",
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


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Those of a list; none of anything else."""
    if _first(raw) != b"[":
        return []
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _outside_texts(raw: msgspec.Raw, mark: bytes, most: int) -> int:
    """How often a mark is in a value, if it is there more often than `most` times: not in texts."""
    whole = memoryview(raw).tobytes()
    if (count := whole.count(mark)) <= most:
        return count
    plain = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
    letters = np.frombuffer(plain, np.uint8)
    in_texts = np.cumsum(letters == ord(b'"'), dtype=np.uint8) & 1
    return int(np.count_nonzero((letters == ord(mark)) & (in_texts == 0)))


def _characters(raw: msgspec.Raw) -> int:
    """Of a value, quotes and braces included; an escaped one counts once."""
    whole = memoryview(raw).tobytes()
    return len(whole.decode(errors="replace")) - 5 * whole.count(b"\\u")


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _commas(raw: msgspec.Raw) -> int:
    return memoryview(raw).tobytes().count(b",")


def _lists_of_tokens(fields: Mapping[str, Any]) -> Iterator[msgspec.Raw]:
    for name in _OF_TOKENS:
        if isinstance(raw := fields.get(name), msgspec.Raw):
            yield raw
