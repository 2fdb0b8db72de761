"""Forms that send a sound (``multipart/form-data``), read from a body that is in memory: nothing is
written to a disk."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from appliance.frontend.sound.files import MAX_SECONDS, BadSound, checked_length
from appliance.http.errors import BadRequest
from appliance.vocabulary import Task

PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
FILE: Final = "file"
GRANULARITIES: Final = "timestamp_granularities[]"
"""The one field that may be there several times."""
MAX_FIELD_BYTES: Final = 1 << 13
"""Of a field that is no file: the text before a sound has some hundred tokens at most, and is read
for each part of a long one."""
BYTES_A_SECOND: Final = 120_000
"""What a sound takes in memory until it is submitted: samples of 16 kHz, and what an encoder
reads (128 numbers for each hundredth of a second)."""

_MAX_PARTS: Final = 64
_FORMATS: Final = ("json", "text", "verbose_json")
_ONLY: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "response_format": (_FORMATS, f"send one of {', '.join(_FORMATS)}"),
    GRANULARITIES: (("segment",), "times are those of segments; send segment, or remove it"),
    "use_beam_search": (("false", "False", "0"), "remove it"),
    "n": (("1",), "an answer is one text; remove it"),
    "vllm_xargs": ((), "no extension reads it; remove it"),
    "hotwords": ((), "write them into prompt"),
    "to_language": (("en",), "translations are English; remove it"),
    "chunking_strategy": (("auto",), "long sounds are divided where they are quiet; remove it"),
    "include[]": ((), "verbose_json has the log probability of each segment; remove it"),
}
"""The values that are taken of fields which vLLM or OpenAI have, and the remedy for others."""
_HARMLESS: Final = ("chunking_strategy",)
"""Of them those that vLLM does not have: what is taken is what happens anyway."""


class Form(NamedTuple):
    """What a client sent."""

    fields: dict[str, list[str]]
    """All that are no file."""
    file: bytes

    @property
    def model(self) -> str | None:
        return self.fields["model"][0] if "model" in self.fields else None

    def as_body(self) -> dict[str, msgspec.Raw]:
        """The fields as those of a JSON object, for what looks at bodies."""
        values = {name: msgspec.json.encode(said[0]) for name, said in self.fields.items()}
        return {name: msgspec.Raw(value) for name, value in values.items()}


def read(kind: str, body: bytes) -> Form:
    """The form in a body whose ``Content-Type`` is `kind`. Raises `BadRequest`."""
    name, options = parse_options_header(kind)
    boundary = options.get("boundary", "")
    if name != "multipart/form-data" or not boundary:
        raise BadRequest(
            "send a form (multipart/form-data) with the sound as file", code="invalid_form"
        )
    parts: list[tuple[MultipartSegment, bytearray]] = []
    try:
        with PushMultipartParser(boundary, max_segment_count=_MAX_PARTS) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    parts.append((event, bytearray()))
                elif event is not None:
                    parts[-1][1].extend(event)
        return _form(parts)
    except (MultipartError, UnicodeDecodeError) as error:
        raise BadRequest(f"the form cannot be read: {error}", code="invalid_form") from error


def _form(parts: list[tuple[MultipartSegment, bytearray]]) -> Form:
    fields: dict[str, list[str]] = {}
    file: bytes | None = None
    for part, data in parts:
        name = part.name[:100]
        if name == FILE:
            if file is not None:
                raise BadRequest("file: there twice", FILE, "invalid_form")
            if part.filename is None:
                raise BadRequest("file: send a file, with a name", FILE, "invalid_sound")
            file = bytes(data)
        elif len(data) > MAX_FIELD_BYTES:
            message = f"{name}: more than {MAX_FIELD_BYTES} bytes: shorten it"
            raise BadRequest(message, name, "text_too_long")
        elif name in fields and name != GRANULARITIES:
            raise BadRequest(f"{name}: there twice", name, "invalid_form")
        else:
            fields.setdefault(name, []).append(data.decode())
    if file is None:
        raise BadRequest("file: send the sound as a file", FILE, "invalid_sound")
    return Form(fields, file)


def checked(form: Form) -> Form:
    """The form without what only says what happens anyway. Raises `BadRequest` for values that
    would change the answer if they were obeyed, and are not."""
    for name, (allowed, remedy) in _ONLY.items():
        if any(value not in allowed for value in form.fields.get(name, ())):
            raise BadRequest(f"{name}: not supported: {remedy}", name, "unsupported_field")
    return form._replace(fields={k: v for k, v in form.fields.items() if k not in _HARMLESS})


def look_at(form: Form) -> int:
    """The bytes that the sound of a form takes in memory. Raises `BadRequest` for what is no sound
    that is read, and for a longer one."""
    try:
        length = checked_length(form.file)
    except BadSound as error:
        raise BadRequest(f"file: {error}", FILE, "invalid_sound") from error
    return int(min(length.seconds, MAX_SECONDS) * BYTES_A_SECOND)


def remedy(path: str, task: Task) -> str:
    """What to ask instead of `path`, where that does not fit a model of such a task."""
    if task is Task.TRANSCRIPTION:
        return f"; send it sound ({PATHS[0]})"
    return "; name a model that makes text of sound" if path in PATHS else ""
