"""Has the core ask the server of a model, and sends its client what that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

from litestar.types import Send

from appliance.frontend.calls import Call
from appliance.frontend.core import CallRefused, Core
from appliance.frontend.remote.bodies import PATHS, outgoing
from appliance.http.errors import ApiError, BadRequest
from appliance.http.request_ids import request_id
from appliance.service.front_frames import Forward, FrontModel, Passed
from appliance.vocabulary import RequestClass

HOPS: Final = b"x-appliance-hops"
"""How many appliances have passed a request on."""
MOST_HOPS: Final = 4
_PARENT: Final = b"traceparent"
_LONGEST_PARENT: Final = 256


def wrong_dialect(path: str, model: FrontModel) -> ApiError:
    """The error for an endpoint that a model of another server has not."""
    message = (
        f"model: {model.name} is a model of another server, which is asked with "
        f"{', '.join(PATHS[:-1])} or {PATHS[-1]}, and not with {path}"
    )
    return BadRequest(message, "model", "remote_model")


def checked_path(path: str, model: FrontModel) -> str:
    """An endpoint that such a model has. Raises `ApiError`."""
    if path not in PATHS:
        raise wrong_dialect(path, model)
    return path


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


async def answer(core: Core, call: Call, asked: Forward, send: Send, gone: asyncio.Event) -> None:
    """Send what comes, until its end or until the client is `gone`. Raises `CallRefused`."""
    work = asyncio.create_task(_send(core, call, asked, send))
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


def _head(piece: Passed) -> dict[str, Any]:
    kind = b"text/event-stream; charset=utf-8" if piece.streams else b"application/json"
    headers = [(b"content-type", kind)]
    if piece.last:
        headers.append((b"content-length", str(len(piece.data)).encode()))
    return {"type": "http.response.start", "status": piece.status, "headers": headers}
