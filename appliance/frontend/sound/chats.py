"""The sounds in the body of a chat: found before vLLM reads it, called as its client calls them,
and looked at before they are decoded.

What is not found here, vLLM is not given either (`appliance.frontend.serving.media`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pybase64

from appliance.checkpoints.architectures.chat_sounds import RATE, SECONDS
from appliance.frontend.body_values import base64_in, decoded
from appliance.frontend.sound.files import MAX_VALUES, BadSound, checked_length
from appliance.http.errors import BadRequest

PATHS: Final = frozenset({"/v1/chat/completions", "/tokenize"})
"""Where messages may have sounds."""
_ELSEWHERE: Final = {
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
}
"""Where they may not: what a body calls its messages there."""
FORMATS: Final = ("wav", "mp3", "flac", "ogg")
"""What clients may call a sound. Its content alone says what it is."""
MIN_SECONDS: Final = 0.1
"""Of a sound: the encoder makes nothing of much shorter ones."""

BYTES: Final = 2 * 4 * SECONDS * RATE
"""What a sound takes in memory until it is submitted, however short it is: samples, and what is
made of them for the encoder, which is a spectrogram, or samples and silence."""

_DATA: Final = re.compile("data:", re.IGNORECASE)
_EXAMPLE: Final = '"data:audio/wav;base64,..."'
_NOT_READ: Final = (
    *("image_url", "input_image", "image", "image_embeds", "image_pil", "prompt_embeds"),
    *("audio_embeds", "video_embeds", "video_url", "file", "input_file", "document"),
)
"""Kinds of parts, and fields that make a part one of them."""


class ChatSound(NamedTuple):
    """A sound that a body sends."""

    name: str
    """The field, as in ``messages[0].content[1].input_audio.data``."""
    sent: object
    """A URL, or base64; what else it is, is refused."""
    is_url: bool

    def file(self) -> bytes:
        """Raises `BadSound`."""
        if not isinstance(self.sent, str) or not self.sent:
            how = f"as a data URL ({_EXAMPLE})" if self.is_url else "in base64"
            raise BadSound(f"send the sound {how}")
        if self.is_url:
            return decoded_url(self.sent)
        if _DATA.match(self.sent):
            raise BadSound('it is a data URL: send what is behind "base64," alone, or audio_url')
        return _decoded_base64(self.sent)

    def key(self) -> int:
        """What `call.sounds` knows it by."""
        return key_of_url(str(self.sent)) if self.is_url else hash(str(self.sent))


def characters(sounds: tuple[ChatSound, ...]) -> int:
    """Of the body, which are no text."""
    return sum(len(sound.sent) for sound in sounds if isinstance(sound.sent, str))


def key_of_url(url: str) -> int:
    """What `call.sounds` knows a sound by: its base64, which vLLM makes a URL of."""
    return hash(url.partition(",")[2])


def decoded_url(url: str) -> bytes:
    """The file in a data URL. Raises `BadSound` for other URLs."""
    if not _DATA.match(url):
        raise BadSound(
            f"no sound is fetched from URLs: send it as input_audio, or as a data URL ({_EXAMPLE})"
        )
    data = base64_in(url)
    if data is None:
        raise BadSound(f"the data URL has no base64: send {_EXAMPLE}")
    return _decoded_base64(data)


def _decoded_base64(data: str) -> bytes:
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise BadSound(f"it is no base64 ({error}): send the file in base64") from error


def sound_of(name: str, part: Mapping[str, Any]) -> ChatSound | None:
    """The sound in a part of a message that is called `name`, in the first of its fields that may
    have one; None if there is none."""
    said = sorted(_fields_of_sound(part))
    return _sent_as(said[0], name, part.get(said[0])) if said else None


def find(path: str, fields: Mapping[str, Any], most: int) -> tuple[ChatSound, ...]:
    """The sounds in a body for `path`, of which a prompt may have `most`. Raises `BadRequest` for
    more, for parts that are neither text nor sound, and for sounds where none are read."""
    if path in _ELSEWHERE:
        for name, part in _parts(_ELSEWHERE[path], fields):
            if _fields_of_sound(part):
                message = f"{name}: sounds are read from /v1/chat/completions alone: send it there"
                raise BadRequest(message, name, "unsupported_part")
    if path not in PATHS:
        return ()
    found: list[ChatSound] = []
    for name, part in _parts("messages", fields):
        found += _of_part(name, part)
    if len(found) > most:
        name = found[most].name
        message = f"{name}: a prompt of this model has at most {most} sounds"
        raise BadRequest(message, name, "too_many_sounds")
    return tuple(found)


def _parts(field: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of all messages, by their names."""
    messages = decoded(fields.get(field))
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        parts = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield f"{field}[{i}].content[{j}]", part


def _fields_of_sound(part: Mapping[str, Any]) -> set[str]:
    """Those that make it one."""
    return {one for one in ("input_audio", "audio_url") if part.get("type") == one or one in part}


def _of_part(name: str, part: Mapping[str, Any]) -> Iterator[ChatSound]:
    kind = part.get("type")
    for other in _NOT_READ:
        if kind == other or other in part:
            message = f"{name}: this model reads no {other}: send text and sound"
            raise BadRequest(message, name, "unsupported_part")
    said = _fields_of_sound(part)
    if not said:
        return
    if len(said) > 1:
        raise BadRequest(f"{name}: send one sound in a part", name, "invalid_sound")
    if part.get("uuid") is not None:
        message = f"{name}.uuid: sounds are known by their content: remove it"
        raise BadRequest(message, f"{name}.uuid", "unsupported_field")
    (field,) = said
    sent = part.get(field)
    if field == "input_audio" and (not isinstance(sent, dict) or sent.get("format") not in FORMATS):
        at = f"{name}.input_audio.format"
        raise BadRequest(f"{at}: use one of {', '.join(FORMATS)}", at, "invalid_sound")
    yield _sent_as(field, name, sent)


def _sent_as(field: str, name: str, sent: object) -> ChatSound:
    """The sound in a field of the part that is called `name`."""
    fields = sent if isinstance(sent, dict) else {}
    if field == "audio_url":
        return ChatSound(f"{name}.audio_url", fields.get("url") if fields else sent, is_url=True)
    return ChatSound(f"{name}.input_audio.data", fields.get("data"), is_url=False)


def look_at(sounds: tuple[ChatSound, ...]) -> tuple[dict[int, str], int]:
    """The names of sounds by their keys, and the bytes that all of them take in memory until they
    are submitted. Nothing is decoded. Raises `BadRequest` for what is no sound that is read, and
    for longer ones."""
    values = 0
    for sound in sounds:
        try:
            length = checked_length(sound.file())
            values += length.frames * length.channels
            if length.seconds > SECONDS:
                raise BadSound(
                    f"it is longer than {SECONDS} seconds: send it in several parts, as sounds of "
                    "their own"
                )
            if length.seconds < MIN_SECONDS:
                raise BadSound(f"it is shorter than {MIN_SECONDS} seconds: send a longer one")
            if values > MAX_VALUES:
                raise BadSound(
                    f"with it the request has more than {MAX_VALUES} samples: send fewer sounds"
                )
        except BadSound as error:
            raise BadRequest(f"{sound.name}: {error}", sound.name, "invalid_sound") from error
    return {sound.key(): sound.name for sound in sounds}, len(sounds) * BYTES
