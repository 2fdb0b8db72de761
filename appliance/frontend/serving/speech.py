"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, over vLLM's serving objects.

vLLM's own routes read a form to a disk, and its loader needs libraries that are not here or decodes
without a bound. So the form of the call at hand is read and looked at before
(`appliance.frontend.sound.forms`), and its sound is decoded here, in threads of the call's turn.
What is made of it, how it is divided and how its language is found are vLLM's.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.speech_to_text.base import serving as vllm_serving
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.exceptions import VLLMValidationError

from appliance.frontend.calls import current
from appliance.frontend.images import in_thread, threads
from appliance.frontend.sound.files import BadSound, decoded
from appliance.frontend.sound.forms import FILE, GRANULARITIES

SERVING: Final = ("openai_serving_transcription", "openai_serving_translation")
"""Attributes of the state that have to do with sound."""

router = APIRouter()


@router.post("/v1/audio/transcriptions")
@with_cancellation  # type: ignore[untyped-decorator]
async def transcribe(raw_request: Request) -> Any:
    """The text of a sound."""
    serving = raw_request.app.state.openai_serving_transcription
    return await _answer(raw_request, TranscriptionRequest, serving, "create_transcription")


@router.post("/v1/audio/translations")
@with_cancellation  # type: ignore[untyped-decorator]
async def translate(raw_request: Request) -> Any:
    """The text of a sound, in English."""
    serving = raw_request.app.state.openai_serving_translation
    return await _answer(raw_request, TranslationRequest, serving, "create_translation")


async def _answer(raw_request: Request, kind: type[BaseModel], serving: Any, create: str) -> Any:
    """Raises `RequestValidationError`, which vLLM's handlers answer, as what vLLM raises."""
    form = current.get().form
    assert form is not None
    fields: dict[str, Any] = {
        name: said if name == GRANULARITIES else said[0] for name, said in form.fields.items()
    }
    try:
        asked: Any = kind.model_validate(fields | {FILE: UploadFile(io.BytesIO())})
    except ValidationError as error:
        wrong = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(wrong) from error
    try:
        serving.model_cls.validate_language(asked.language)
    except ValueError as error:
        raise VLLMValidationError(f"language: {error}", parameter="language") from error
    answer = await getattr(serving, create)(form.file, asked, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    if not isinstance(answer, BaseModel):
        return StreamingResponse(answer, media_type="text/event-stream")
    if asked.response_format == "text":
        return PlainTextResponse(answer.text)  # type: ignore[attr-defined]
    return JSONResponse(answer.model_dump())


def decode_in_turns(state: State) -> None:
    """Have what a model's serving objects make of a sound belong to the turn of its call. Once,
    before the first call."""
    for name in SERVING:
        if (serving := getattr(state, name)) is not None:
            serving.shutdown()  # its own threads
            serving._decode_and_chunk_speech_async = partial(_in_turn, serving)
            serving._get_verbose_segments = partial(_segments, serving._get_verbose_segments)


async def _in_turn(serving: Any, file: bytes) -> Any:
    """Raises `VLLMValidationError`."""
    try:
        return await in_thread(current.get(), threads, serving._decode_and_chunk_speech, file)
    except BadSound as error:
        raise VLLMValidationError(f"file: {error}", parameter=FILE) from error


def _segments(made: Any, *, tokens: tuple[int, ...], **others: Any) -> list[Any]:
    """vLLM's segments of an output, which fails for silence: nothing but its end is said then."""
    return made(tokens=tokens, **others) if len(tokens) > 1 else []


def _load(file: io.BytesIO, *, sr: int, **_: Any) -> tuple[Any, int]:
    """In place of vLLM's `load_audio`. Raises `BadSound`."""
    return decoded(file.getvalue(), int(sr)), int(sr)


def bound_sounds() -> None:
    """Have vLLM decode sounds as they are looked at, and no others."""
    vllm_serving.load_audio = _load
