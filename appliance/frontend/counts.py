"""How many fields, objects, texts and tokens a body may list, before time is spent on each of them.

What vLLM makes of an item takes the thread of all streams some microseconds to some hundred, and
a body has room for millions of items. What is not as it should be here, vLLM refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from appliance.frontend.serving.engine_client import MAX_LISTED_TOKENS, TooManyListed
from appliance.http.errors import BadRequest
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import Task

MAX_FIELDS: Final = 1 << 10
"""Of a body."""
MAX_OBJECTS: Final = 1 << 13
"""In a field: messages, parts of them, calls, documents, at any depth."""
MAX_VALUES: Final = 1 << 16
"""In a field, in lists and objects of any depth, unless it is a list of tokens."""
MAX_ITEMS: Final = 1 << 11
"""Of a conversation in the Responses API: each is compared with many kinds of items."""
MAX_TOOLS: Final = 1 << 10
"""That a request may offer: each is a schema that is read several times."""
MAX_STOPS: Final = 1 << 7
"""Texts that end an answer: each is looked for after each token."""
MAX_TEXTS: Final = 1 << 11
"""To embed, to classify or to rank in one request: each is a request of its own."""
MAX_TOKENS: Final = 1 << 20
"""Of prompts that are sent as tokens, in one request."""
MAX_PAIRED: Final = 1 << 23
"""Characters of a query, once for each text that it is compared with: each pair is encoded."""

_FITTING: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""Paths whose conversation has to fit into the model's context."""
_TRUNCATING: Final = ("truncate_prompt_tokens", "truncation")
"""Fields with which it need not."""
_PLAIN: Final = (b"null", b'"disabled"')
"""Values of theirs with which it has to."""
_TEXTS: Final = (
    *("input", "inputs", "texts", "data", "documents", "queries"),
    *("text_1", "text_2", "data_1", "data_2", "items"),
)
_COMPARED: Final = ("documents", "items", "text_2", "data_2")
_PAIRED: Final = ("query", "queries", "text_1", "data_1", "instruction")
"""Fields whose one text may be compared with many."""
_OF_TOKENS: Final = ("stop_token_ids", "logit_bias", "allowed_token_ids")
_PROMPTS: Final = frozenset({"prompt", "input", "tokens", "context"})
"""Fields that may hold tokens, or lists of them."""
_STOPS: Final = ("stop", "stop_sequences")
_SCHEMAS: Final = frozenset(
    {"tools", "functions", "response_format", "structured_outputs", "text", "format"}
)
"""Fields with JSON schemas, which have many small objects, and are not compared with messages."""
_TOKENS: Final = re.compile(rb"[0-9,\s\[\]-]*")
_MAX_SHOWN: Final = 64
"""Characters of a field's name that are repeated."""
_SMALL_BYTES: Final = 1 << 10
"""A value of fewer has few values."""
_LEAST_CHARACTERS: Final = 1 << 18
_PER_TOKEN: Final = 16


def most_characters(tokens: int) -> int:
    """Of a text of which so many tokens are kept, or may be: what is longer is no text of theirs
    but in theory, and each character costs time."""
    return max(_LEAST_CHARACTERS, _PER_TOKEN * tokens)


def check_values(path: str, fields: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for more fields, objects or values than a body may have. O(bytes)."""
    if len(fields) > MAX_FIELDS:
        raise BadRequest(
            f"a body may have {MAX_FIELDS} fields, this has {len(fields)}", code="too_many_fields"
        )
    for name, raw in fields.items():
        if isinstance(raw, msgspec.Raw) and _first(raw) in (b"[", b"{"):
            if name in _STOPS and (count := _values(raw, MAX_STOPS)) > MAX_STOPS:
                raise _too_many(name, "texts", MAX_STOPS, count, "too_many_stops")
            if memoryview(raw).nbytes >= _SMALL_BYTES:
                _check_value(path, name, raw)


def _check_value(path: str, name: str, raw: msgspec.Raw) -> None:
    shown = name[:_MAX_SHOWN]
    count = 0 if name in _SCHEMAS else _outside_texts(raw, b"{", MAX_OBJECTS)
    if count > MAX_OBJECTS:
        raise _too_many(shown, "objects", MAX_OBJECTS, count, "too_many_objects")
    if name in _OF_TOKENS:  # bounded for all choices of a call together
        return
    listed = name == "input" and path.startswith("/v1/responses")
    if name in _PROMPTS and not listed and _are_tokens(raw):
        if (count := _values(raw, MAX_TOKENS)) > MAX_TOKENS:
            raise _too_many(shown, "tokens", MAX_TOKENS, count, "too_many_tokens")
        return
    if (count := _values(raw, MAX_VALUES)) > MAX_VALUES:
        raise _too_many(shown, "values", MAX_VALUES, count, "too_many_values")
    if name == "tools" and (count := len(_items(raw))) > MAX_TOOLS:
        raise _too_many(name, "tools", MAX_TOOLS, count, "too_many_tools")
    if listed and (count := len(_items(raw))) > MAX_ITEMS:
        raise _too_many(name, "items", MAX_ITEMS, count, "too_many_items")
    if listed or name == "messages":
        _check_kinds(name, raw)


def _check_kinds(name: str, raw: msgspec.Raw) -> None:
    """Raise `BadRequest` for what is no message, and no part of one."""
    for message in _items(raw):
        if _first(message) == b"[":  # one of several conversations
            _check_kinds(name, message)
        elif _first(message) != b"{":
            raise BadRequest(f"{name}: each message is an object", name)
        elif any(_first(part) not in (b"{", b'"') for part in _items(_content(message))):
            raise BadRequest(f"{name}: each part of a message's content is an object", name)


def check_messages(path: str, fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for a conversation of more messages than the context has tokens, as each
    is rendered as one at least."""
    if path not in _FITTING or any(_asks(fields.get(name)) for name in _TRUNCATING):
        return
    name = "input" if path.startswith("/v1/responses") else "messages"
    if (count := len(_items(fields.get(name)))) > model.max_context:
        message = (
            f"This model's maximum context length is {model.max_context} tokens. However, there are"
            f" {count} messages. Please reduce the number of messages."
        )
        raise BadRequest(message, name, "context_length_exceeded")


def check_tokenized(
    path: str, fields: Mapping[str, Any], model: FrontModel, *, besides: int = 0
) -> None:
    """Raise `BadRequest` for a text that is only to be made tokens, and is longer than any that the
    model could be asked with: each token of it is listed in the answer. So many characters
    `besides` are images and sounds."""
    if path != "/tokenize":
        return
    most = most_characters(model.max_context) + besides
    for name in ("prompt", "messages"):
        if (count := _characters(fields.get(name), most)) > most:
            raise _too_long(name, most, count)


def check_texts(fields: Mapping[str, Any], model: FrontModel) -> None:
    """Raise `BadRequest` for more texts than may be pooled in one request, and for texts that are
    compared, and too long or too many for that."""
    most = most_characters(model.max_context)
    compared = 0
    for name in (*_TEXTS, "query"):
        raw = fields.get(name)
        if not isinstance(raw, msgspec.Raw):
            continue
        if name in _PROMPTS and _are_tokens(raw):
            if (count := memoryview(raw).tobytes().count(b"[") - 1) > MAX_TEXTS:
                raise _too_many(name, "texts", MAX_TEXTS, count, "too_many_texts")
            continue
        texts = _items(raw)
        if len(texts) > MAX_TEXTS:
            raise _too_many(name, "texts", MAX_TEXTS, len(texts), "too_many_texts")
        if any(_first(text) == b"[" for text in texts) and (
            (count := _values(raw, MAX_TEXTS)) > MAX_TEXTS
        ):
            raise _too_many(name, "values", MAX_TEXTS, count, "too_many_texts")
        if name in _COMPARED:
            compared = max(compared, len(texts))
        if model.task is Task.SCORE or name in (*_COMPARED, *_PAIRED):
            longest = max((_characters(text, most) for text in texts or (raw,)), default=0)
            if longest > most:
                raise _too_long(name, most, longest)
    if model.task is Task.SCORE:
        _check_pairs(fields, compared)


def _check_pairs(fields: Mapping[str, Any], compared: int) -> None:
    """Raise `BadRequest` for a text that is too long to be compared with so many."""
    for name in _PAIRED:
        raw = fields.get(name)
        if len(_items(raw)) > 1:
            continue
        if (count := _characters(raw, MAX_PAIRED // max(compared, 1)) * compared) > MAX_PAIRED:
            raise BadRequest(
                f"{name}: once for each of {compared} texts it comes to {count} characters, more"
                f" than {MAX_PAIRED}: shorten it, or send fewer texts",
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
            raise _too_many("tokens", "tokens", most, count, "too_many_tokens")
    try:
        asked = msgspec.json.decode(fields.get("n", b"1"), type=int | None, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("n: a whole number is expected", "n") from error
    listed = sum(map(_commas, _lists_of_tokens(fields)))
    if listed * (asked or 1) > MAX_LISTED_TOKENS:
        raise BadRequest(str(TooManyListed()), "n", "invalid_request")


def _too_many(name: str, what: str, most: int, count: int, code: str) -> BadRequest:
    message = f"{name}: a request may have {most} {what} here, this has {count}"
    return BadRequest(message, name, code)


def _too_long(name: str, most: int, count: int) -> BadRequest:
    message = f"{name}: {count} characters are more than {most}: send several requests"
    return BadRequest(message, name, "text_too_long")


def _asks(raw: object) -> bool:
    """Whether a field is there and asks for something."""
    return isinstance(raw, msgspec.Raw) and bytes(raw) not in _PLAIN


def _content(message: msgspec.Raw) -> msgspec.Raw:
    try:
        return msgspec.json.decode(message, type=_Message).content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


def _items(raw: object) -> list[msgspec.Raw]:
    """Those of a list; none of anything else. O(bytes), 200 ns for an item."""
    if not isinstance(raw, msgspec.Raw) or _first(raw) != b"[":
        return []
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _are_tokens(raw: msgspec.Raw) -> bool:
    """Whether it is a list of whole numbers, or of such lists."""
    return _TOKENS.fullmatch(memoryview(raw)) is not None


def _values(raw: msgspec.Raw, most: int) -> int:
    """How many values it has, if they are more than `most`."""
    return _outside_texts(raw, b",", most - 1) + 1


def _outside_texts(raw: msgspec.Raw, mark: bytes, most: int) -> int:
    """How often a mark is in a value, if it is there more often than `most` times: not in texts."""
    whole = memoryview(raw).tobytes()
    if (count := whole.count(mark)) <= most:
        return count
    plain = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
    letters = np.frombuffer(plain, np.uint8)
    in_texts = np.cumsum(letters == ord(b'"'), dtype=np.uint8) & 1
    return int(np.count_nonzero((letters == ord(mark)) & (in_texts == 0)))


def _characters(raw: object, most: int) -> int:
    """Of a value, quotes and braces included, if they are more than `most`; one that is escaped
    counts once."""
    if not isinstance(raw, msgspec.Raw) or memoryview(raw).nbytes <= most:
        return 0
    whole = memoryview(raw).tobytes().replace(b"\\\\", b"/")
    escapes, long = whole.count(b"\\"), whole.count(b"\\u")
    return len(whole.decode(errors="replace")) - escapes - 4 * long


def _commas(raw: msgspec.Raw) -> int:
    return memoryview(raw).tobytes().count(b",")


def _lists_of_tokens(fields: Mapping[str, Any]) -> Iterator[msgspec.Raw]:
    for name in _OF_TOKENS:
        if isinstance(raw := fields.get(name), msgspec.Raw):
            yield raw
