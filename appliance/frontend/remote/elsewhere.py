"""Has the core ask the server of a model, and sends its client what that answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import msgspec
from litestar.types import Send

from appliance.frontend.calls import Call
from appliance.frontend.core import CallRefused, Core
from appliance.frontend.remote.bodies import PATHS, outgoing
from appliance.frontend.remote.messages import Messages
from appliance.frontend.remote.ollama_chats import OllamaChat
from appliance.frontend.remote.said import BadAnswer, Chunks, refusal_message, whole
from appliance.frontend.remote.translation import Translation
from appliance.http.body_budget import CLIENT_SHARE, BodiesFull, BodyTooLarge
from appliance.http.errors import ApiError, BadRequest, as_refused
from appliance.http.request_ids import request_id
from appliance.service.front_frames import Forward, FrontModel, Passed, Refused
from appliance.vocabulary import RequestClass, Task

HOPS: Final = b"x-appliance-hops"
"""How many appliances have passed a request on."""
MOST_HOPS: Final = 4
_PARENT: Final = b"traceparent"
_LONGEST_PARENT: Final = 256
MESSAGES: Final = "/v1/messages"
_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_OLLAMA: Final = ("/api/chat", "/api/generate")
_LOGPROBS: Final = "logprobs"
AnyTranslation: TypeAlias = Messages | OllamaChat
TRANSLATED: Final = frozenset({MESSAGES, *_OLLAMA})
"""Endpoints of other dialects than OpenAI's."""


def wrong_dialect(path: str, model: FrontModel) -> ApiError:
    """The error for an endpoint that a model of another server has not."""
    message = f"model: {model.name} is a model of another server"
    if path == _COUNT_TOKENS:
        message += (
            ", whose tokenizer is not here; the usage of an answer of /v1/messages says how many "
            "tokens its prompt has"
        )
    else:
        paths = (*PATHS, *sorted(TRANSLATED))
        message += f", which is asked with {', '.join(paths[:-1])} or {paths[-1]}, not with {path}"
    return BadRequest(message, "model", "remote_model")


def checked_path(path: str, model: FrontModel) -> str:
    """An endpoint that such a model has. Raises `ApiError`."""
    if path not in PATHS and path not in TRANSLATED:
        raise wrong_dialect(path, model)
    if path in _OLLAMA and model.task is not Task.GENERATE:
        raise BadRequest(f'"{model.name}" does not support {path.rpartition("/")[2]}', "model")
    return path


def translated(
    path: str, body: bytes, name: str, *, strict: bool, keep_alive_seconds: float
) -> AnyTranslation:
    """A request of another dialect, in OpenAI's words; `name` is what it calls the model. Raises
    `ApiError`."""
    if path == MESSAGES:
        return Messages(body)
    return OllamaChat(path, body, name, strict=strict, keep_alive_seconds=keep_alive_seconds)


def frame(
    call: Call, scope: Any, path: str, fields: Mapping[str, Any], model: FrontModel, asked: str
) -> Forward:
    """What the core is asked. Raises `ApiError`."""
    headers = dict(scope["headers"])
    hops = headers.get(HOPS, b"0")
    passed = int(hops) if hops.isdigit() and len(hops) < 3 else 0
    if passed >= MOST_HOPS:
        message = (
            f"model: {model.name} was passed on by {passed} appliances: an operator has to set "
            "remote to the server that computes it"
        )
        raise ApiError(508, message, param="model", code="remote_loop")
    sent = outgoing(path, fields, model)
    along = [("x-request-id", request_id(scope)), (HOPS.decode(), str(passed + 1))]
    parent = headers.get(_PARENT, b"")
    if parent and len(parent) <= _LONGEST_PARENT and parent.isascii():
        along.append((_PARENT.decode(), parent.decode("ascii")))
    of_batch = call.request_class is RequestClass.BATCH
    return Forward(
        call=call.number,
        model=model.name,
        asked=asked,
        path=path,
        body=sent.body,
        streams=sent.streams,
        wants_usage=sent.wants_usage,
        prompt_tokens=sent.prompt_tokens,
        max_tokens=sent.max_tokens,
        choices=sent.choices,
        guided=sent.guided,
        request_class=RequestClass.BATCH if of_batch else sent.request_class,
        headers=tuple(along),
    )


async def answer(
    core: Core,
    call: Call,
    asked: Forward,
    send: Send,
    gone: asyncio.Event,
    translation: Translation | None = None,
) -> None:
    """Send what comes, until its end or until the client is `gone`. Raises `CallRefused`."""
    sending = _send(core, call, asked, send)
    if translation is not None:
        sending = _send_translated(core, call, asked, send, translation)
    work = asyncio.create_task(sending)
    left = asyncio.create_task(gone.wait())
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        if not work.done():  # the core hears that the call is over, and ends the request
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    if not work.cancelled():
        work.result()


async def _send(core: Core, call: Call, asked: Forward, send: Any) -> None:
    begun = False
    async with aclosing(core.forward(asked)) as pieces:
        async for piece in pieces:
            if piece.refused is not None:
                call.refuse(piece.refused)
                if not (begun and call.streams):
                    raise CallRefused(piece.refused)
                call.given_up.set()
                return
            call.decided.set()
            if not begun:
                begun = True
                await send(_head(piece))
            if piece.data or piece.last:
                await send(
                    {"type": "http.response.body", "body": piece.data, "more_body": not piece.last}
                )


async def _send_translated(
    core: Core, call: Call, asked: Forward, send: Any, translation: Translation
) -> None:
    async with aclosing(core.forward(asked)) as pieces:
        first = await anext(pieces)
        _check_taken(call, first)
        call.decided.set()
        if not first.streams:
            await _send_whole(call, asked, send, translation, first, pieces)
            return
        headers = [(b"content-type", translation.media_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        refusals: list[Refused] = []
        said = Chunks(asked.prompt_tokens, logprobs=_LOGPROBS in translation.fields)
        async with aclosing(_chunks(said, asked, pieces, refusals)) as chunks:
            async with aclosing(translation.stream(chunks)) as out:
                async for data in out:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        if refusals:
            call.refuse(refusals[0])
            if not call.streams:
                raise CallRefused(refusals[0])
            call.given_up.set()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(
    call: Call,
    asked: Forward,
    send: Any,
    translation: Translation,
    first: Passed,
    pieces: AsyncGenerator[Passed],
) -> None:
    body = bytearray(first.data)
    try:
        if not first.last:
            async for piece in pieces:
                _check_taken(call, piece)
                call.keep(len(piece.data))
                body += piece.data
        if first.status != 200:
            message = refusal_message(bytes(body))
            raise ApiError(first.status, message, code="remote_refused")
        logprobs = _LOGPROBS in translation.fields
        said = whole(bytes(body), asked.prompt_tokens, logprobs=logprobs)
        data = translation.whole(said)
    except BadAnswer as error:
        raise CallRefused(as_refused(_bad_answer(asked, error), call.number)) from error
    except BodiesFull as error:
        message = (
            "answers that are translated take all memory that bodies may have (api.max_bodies); "
            f"try again later, ask for a stream, or ask for the model with {asked.path}"
        )
        full = ApiError(503, message, code="remote_answers_full", headers={"Retry-After": "1"})
        raise CallRefused(as_refused(full, call.number)) from error
    except BodyTooLarge as error:  # so it is each time, and each time the server computes it
        message = (
            "the answer is too large to be translated: with its request it has more than "
            f"{CLIENT_SHARE} of api.max_bodies, which an operator may raise; ask for a stream, or "
            f"ask for the model with {asked.path}"
        )
        raise CallRefused(
            as_refused(ApiError(503, message, code="remote_answers_full"), call.number)
        ) from error
    except ApiError as error:
        raise CallRefused(as_refused(error, call.number)) from error
    await send_json(send, data)


async def _chunks(
    said: Chunks, asked: Forward, pieces: AsyncGenerator[Passed], refusals: list[Refused]
) -> AsyncGenerator[str]:
    """The events of a stream, until its end or until it breaks off: then a refusal is kept, or the
    last event is an error."""
    async for piece in pieces:
        if piece.refused is not None:
            refusals.append(piece.refused)
            return
        try:
            for chunk in said.feed(piece.data):
                yield chunk
        except BadAnswer as error:
            message = _bad_answer(asked, error).body.error.message
            fault = {"error": {"message": message, "code": 502}}
            yield f"data: {msgspec.json.encode(fault).decode()}\n\n"
            return


def _check_taken(call: Call, piece: Passed) -> None:
    """Raise `CallRefused` if there is no answer, or no more of it."""
    if piece.refused is not None:
        call.refuse(piece.refused)
        raise CallRefused(piece.refused)


def _bad_answer(asked: Forward, error: BadAnswer) -> ApiError:
    message = f"the server of {asked.model} gave an answer that cannot be used: {error}"
    return ApiError(502, message, code="remote_failed")


async def send_json(send: Any, data: bytes) -> None:
    """A whole answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _head(piece: Passed) -> dict[str, Any]:
    kind = b"text/event-stream; charset=utf-8" if piece.streams else b"application/json"
    headers = [(b"content-type", kind)]
    if piece.last:
        headers.append((b"content-length", str(len(piece.data)).encode()))
    return {"type": "http.response.start", "status": piece.status, "headers": headers}
