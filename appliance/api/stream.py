"""Answers as they go out: whole or as server-sent events, and given up when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.api.choices import Choices
from appliance.api.errors import ApiError, as_api_error
from appliance.api.replies import Dialect, Piece

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_Result = TypeVar("_Result")


class HungUp(ApiError):
    """The client left before its answer was complete; nobody hears this one."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_closed")


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is cancelled (and `HungUp` raised) when the client leaves.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HungUp
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(choices: Choices, dialect: Dialect) -> bytes:
    """The body of an answer that is not streamed. Raises `GenerationFailed`."""
    answers: dict[int, Piece] = {}
    async with choices:
        while not choices.finished:
            for piece in await choices.pieces():
                _append(answers.setdefault(piece.index, Piece(piece.index, "")), piece)
    return dialect.body([answers[index] for index in sorted(answers)], choices.usage())


def _append(answer: Piece, piece: Piece) -> None:
    answer.text += piece.text
    answer.finish = answer.finish or piece.finish
    if piece.logged is not None:
        answer.logged = [*(answer.logged or ()), *piece.logged]
    if piece.ids is not None:
        answer.ids = [*(answer.ids or ()), *piece.ids]


async def events(
    choices: Choices, dialect: Dialect, *, include_usage: bool, keep_alive_seconds: float
) -> AsyncIterator[bytes]:
    """An answer as server-sent events. A comment goes out at once and whenever nothing came for
    `keep_alive_seconds`; a failure is the last event."""
    opened: set[int] = set()
    now = asyncio.get_running_loop().time
    yield KEEP_ALIVE
    silent_since = now()
    async with choices:
        try:
            while not choices.finished:
                pieces = await choices.pieces(silent_since + keep_alive_seconds - now())
                chunks = [c for piece in pieces for c in _chunks(piece, dialect, opened)]
                # Tokens may come that show nothing yet: half a character, what may become a stop.
                if chunks or now() >= silent_since + keep_alive_seconds:
                    yield b"".join(chunks) or KEEP_ALIVE
                    silent_since = now()
        except Exception as error:  # the status line is gone: told in the stream
            yield _event(msgspec.json.encode(as_api_error(error).body))
            return
    if include_usage:
        yield _event(dialect.usage_chunk(choices.usage()))
    yield DONE


def _chunks(piece: Piece, dialect: Dialect, opened: set[int]) -> list[bytes]:
    """The events of a piece; none when it holds nothing a client could see."""
    if not (piece.text or piece.logged or piece.finish or piece.ids):
        return []
    chunk = _event(dialect.chunk(piece))
    if piece.index in opened:
        return [chunk]
    opened.add(piece.index)
    opening = dialect.opening(piece.index)
    return [chunk] if opening is None else [_event(opening), chunk]


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(ASGIResponse):
    """Sends events as they are made; cancels `choices` when the client hangs up.

    Litestar's own `Stream` leaves closing its generator to the garbage collector when it is
    cancelled while sending. Here it is closed before the response ends.
    """

    _should_set_content_length = False

    def __init__(self, choices: Choices, source: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._choices = choices
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.start_response(send)
            await unless_hung_up(receive, self._send(send))
        except HungUp:
            return
        finally:
            self._choices.cancel()  # also when the source never got to enter them

    async def _send(self, send: Send) -> None:
        async with aclosing(self._source) as source:  # type: ignore[type-var]
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
