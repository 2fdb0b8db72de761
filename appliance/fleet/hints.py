"""What a router reads of a request's body: its model, and its session or the prefix of its prompt.

Reading it never fails: a body that is no request gets an empty hint, and the box that it goes to
says what is wrong with it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from appliance.fleet.calls import Hint

_PREFIX_BYTES: Final = 4096
"""So much of a prompt says which prefix it has."""
_FIRST_MESSAGES: Final = 2
"""The system prompt and the first question stay the same through a conversation."""
_BOUNDARY: Final = re.compile(rb'boundary="?([^";,\s]+)"?', re.IGNORECASE)
_NAMED_MODEL: Final = re.compile(rb'\bname="?model"?(?:[;\s]|$)', re.IGNORECASE)
_MOST_PARTS: Final = 64


class _Asked(msgspec.Struct):
    """Fields of all dialects, not looked into."""

    model: msgspec.Raw = msgspec.Raw()
    name: msgspec.Raw = msgspec.Raw()
    """Ollama's older word for the model."""
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def read_hint(body: bytes, content_type: bytes = b"") -> Hint:
    """Of a request with this body."""
    if content_type.strip().lower().startswith(b"multipart/form-data"):
        return Hint(model=_model_of_form(body, content_type))
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Hint()
    model = _text(asked.model) or _text(asked.name)
    return Hint(model=model, session=_session(asked))


def _session(asked: _Asked) -> str:
    """What the client calls it, else a digest of how its prompt begins; empty without one."""
    for field in (asked.prompt_cache_key, asked.previous_response_id, asked.user):
        if named := _text(field):
            return named
    begins = bytes(asked.system) + bytes(asked.instructions)
    if messages := _list(asked.messages) or _list(asked.input):
        begins += b"".join(bytes(one) for one in messages[:_FIRST_MESSAGES])
    else:
        begins += bytes(asked.prompt) + bytes(asked.input)
    if not begins:
        return ""
    return hashlib.blake2b(begins[:_PREFIX_BYTES], digest_size=8).hexdigest()


def _text(field: msgspec.Raw) -> str:
    """A string that is not empty; else, empty."""
    if not bytes(field):
        return ""
    try:
        return msgspec.json.decode(field, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _list(field: msgspec.Raw) -> list[msgspec.Raw]:
    if not bytes(field):
        return []
    try:
        return msgspec.json.decode(field, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


def _model_of_form(body: bytes, content_type: bytes) -> str:
    """The field `model` of a form, as requests with sounds have it."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return ""
    for part in body.split(b"--" + boundary[1], _MOST_PARTS)[1:]:
        head, _, value = part.partition(b"\r\n\r\n")
        if _NAMED_MODEL.search(head.replace(b"\r\n", b" ")):
            return value.removesuffix(b"\r\n").decode("utf-8", "replace")
    return ""
