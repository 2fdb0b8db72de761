"""What another server answers, as our clients are sent it: the model has our name, and the usage is
read off. Nothing here reads or writes a connection."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

MAX_EVENT_BYTES: Final = 4 << 20
MOST_TOKENS: Final = 1 << 40
"""What a server may say that one answer took."""
RESPONSES: Final = "/v1/responses"
DONE: Final = b"data: [DONE]\n\n"
_LAST_OF_RESPONSES: Final = ("response.completed", "response.incomplete", "response.failed")


class BadAnswer(Exception):
    """An answer that is not of OpenAI's API; the message says how, and quotes nothing of it."""


class Usage(NamedTuple):
    """Tokens of an answer."""

    input: int = 0
    cached: int = 0
    """Of the input."""
    output: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Said(msgspec.Struct):
    """The usage in the words of each endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


_Fields = dict[str, msgspec.Raw]


def whole(body: bytes, path: str, model: str) -> tuple[bytes, Usage | None]:
    """An answer that is one JSON object, of what the client calls `model`; None: it does not say
    its usage. Raises `BadAnswer`."""
    fields = _fields(body, "the answer is no JSON object")
    if path != RESPONSES and not {"choices", "data"} & fields.keys():
        raise BadAnswer("the answer has neither choices nor data")
    usage = _usage(fields.get("usage"))
    return _named(body, fields, model), usage


class Events:
    """The events of a stream. The last one is kept in `last`: it is to be sent when the usage is
    counted."""

    def __init__(self, path: str, model: str, *, wants_usage: bool) -> None:
        self.usage: Usage | None = None
        self.pieces = 0
        """Pieces of text that came: about as many tokens, if nothing says how many."""
        self.last = b""
        """Not empty once the stream is whole."""
        self.failed = False
        """Whether the server said that it failed."""
        self._responses = path == RESPONSES
        self._model = model
        self._wants_usage = wants_usage
        self._rest = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> bytes:
        """What the client is sent for what came. Raises `BadAnswer`."""
        self._rest += data.replace(b"\r", b"")
        out = []
        while not self.last:
            end = self._rest.find(b"\n\n", max(0, self._searched - 1))
            if end < 0:
                break
            event = bytes(self._rest[:end])
            del self._rest[: end + 2]
            self._searched = 0
            if event:
                out.append(self._event(event))
        self._searched = len(self._rest)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        """What is sent for an event: nothing for comments."""
        lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return b""
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines)
        if data.strip() == b"[DONE]":
            if self._responses:
                return b""
            self.last = DONE
            return b""
        fields = _fields(data, "an event of the stream is no JSON object")
        if self._responses:
            return self._of_response(fields, data)
        return self._of_completion(fields, data)

    def _of_completion(self, fields: _Fields, data: bytes) -> bytes:
        if "error" in fields and "choices" not in fields:
            self.failed = True
            return b"data: %b\n\n" % data
        usage, bare = _usage(fields.get("usage")), _is_empty(fields.get("choices"))
        if usage is not None:
            self.usage = usage
        if not bare:
            self.pieces += 1
        elif usage is not None and not self._wants_usage:
            return b""
        if not self._wants_usage and fields.pop("usage", None) is not None:
            data = msgspec.json.encode(fields)
        return b"data: %b\n\n" % _named(data, fields, self._model)

    def _of_response(self, fields: _Fields, data: bytes) -> bytes:
        kind = _text(fields.get("type"))
        self.pieces += kind.endswith(".delta")
        if kind == "error":
            self.failed = True
        if (raw := fields.get("response")) is not None:
            inner = _fields(bytes(raw), "an event of the stream has no response")
            self.usage = _usage(inner.get("usage")) or self.usage
            changed = _named(bytes(raw), inner, self._model)
            if changed != bytes(raw):
                data = msgspec.json.encode(fields | {"response": msgspec.Raw(changed)})
        said = b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        if kind not in _LAST_OF_RESPONSES:
            return said
        self.last = said
        return b""


def _fields(data: bytes, otherwise: str) -> _Fields:
    """The fields of a JSON object. Raises `BadAnswer`."""
    try:
        return msgspec.json.decode(data, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(otherwise) from error


def _named(data: bytes, fields: _Fields, model: str) -> bytes:
    """An object whose `model`, if it has one, is the name that the client knows."""
    if "model" not in fields:
        return data
    name = msgspec.json.encode(model)
    if bytes(fields["model"]) == name:
        return data
    return msgspec.json.encode(fields | {"model": msgspec.Raw(name)})


def _usage(raw: msgspec.Raw | None) -> Usage | None:
    """None if nothing is said, or nothing that can be read."""
    if raw is None:
        return None
    try:
        said = msgspec.json.decode(raw, type=_Said | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if said is None:
        return None
    given = said.prompt_tokens if said.input_tokens is None else said.input_tokens
    made = said.completion_tokens if said.output_tokens is None else said.output_tokens
    if given is None and made is None:
        return None
    details = said.prompt_tokens_details or said.input_tokens_details
    input_tokens = _count(given)
    cached = 0 if details is None else _count(details.cached_tokens)
    return Usage(input_tokens, min(cached, input_tokens), _count(made))


def _count(number: int | None) -> int:
    return min(max(number or 0, 0), MOST_TOKENS)


def _is_empty(raw: msgspec.Raw | None) -> bool:
    """Whether a list has nothing in it, or is not there."""
    return raw is None or bytes(raw).replace(b" ", b"") in (b"[]", b"null")


def _text(raw: msgspec.Raw | None) -> str:
    """A string without ends of lines; "" for anything else. Raises `BadAnswer`."""
    if raw is None:
        return ""
    try:
        return "".join(msgspec.json.decode(raw, type=str).splitlines())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
