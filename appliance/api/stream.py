"""Answers as they go out: whole or as a stream, and given up when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Final, TypeVar

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.api.choices import Choices
from appliance.api.errors import ApiError, as_api_error
from appliance.api.replies import Dialect, Piece
from appliance.api.timing import server_timing

REQUEST_HEADER = "x-appliance-request"
"""What `/api/requests`, spans and events know an answer by: there before its first token."""

AS_IT_COMES: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of what nobody on the way is to keep or hold back."""

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


async def answer(
    receive: Receive,
    choices: Choices,
    dialect: Dialect,
    *,
    stream: bool,
    keep_alive_seconds: float,
) -> ASGIResponse:
    """The answer that `choices` make. An open stream with nothing to say is kept alive every
    `keep_alive_seconds`. Raises `GenerationFailed`, and `HungUp` when the client leaves."""
    if stream:
        source = events(choices, dialect, keep_alive_seconds=keep_alive_seconds)
        return EventStream(choices, source, dialect.media_type)
    try:
        body = await unless_hung_up(receive, whole_answer(choices, dialect))
    finally:
        choices.cancel()  # also when the answer was never begun
    headers = {REQUEST_HEADER: choices.request}
    if phases := server_timing(choices.times()):
        headers["server-timing"] = phases
    return ASGIResponse(body=body, media_type="application/json", headers=headers)


async def whole_answer(choices: Choices, dialect: Dialect) -> bytes:
    """The body of an answer that is not streamed. Raises `GenerationFailed`."""
    answers: dict[int, list[Piece]] = {}
    async with choices:
        while not choices.finished:
            for piece in await choices.pieces():
                answers.setdefault(piece.index, []).append(piece)
    return dialect.body([_joined(answers[index]) for index in sorted(answers)], choices.usage())


def _joined(pieces: Sequence[Piece]) -> Piece:
    """One choice's pieces as one."""
    return Piece(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        logged=_chained(piece.logged for piece in pieces),
        finish=next((piece.finish for piece in pieces if piece.finish), None),
        ids=_chained(piece.ids for piece in pieces),
        stop=next((piece.stop for piece in pieces if piece.stop), None),
        calls=[call for piece in pieces for call in piece.calls],
        reasoning="".join(piece.reasoning for piece in pieces),
    )


def _chained(parts: Iterable[list[_Result] | None]) -> list[_Result] | None:
    """None if there is no part."""
    given = [part for part in parts if part is not None]
    return list(chain.from_iterable(given)) if given else None


async def events(
    choices: Choices, dialect: Dialect, *, keep_alive_seconds: float
) -> AsyncIterator[bytes]:
    """An answer as a stream. It is kept alive whenever nothing came for `keep_alive_seconds`; a
    failure is the last event. What the time went to is a remark before the end, since headers are
    gone by then."""
    opened: set[int] = set()
    now = asyncio.get_running_loop().time
    yield dialect.beginning()
    silent_since = now()
    async with choices:
        try:
            while not choices.finished:
                pieces = await choices.pieces(silent_since + keep_alive_seconds - now())
                data = b"".join([_worded(piece, dialect, opened) for piece in pieces])
                # Tokens may come that show nothing yet: half a character, what may become a stop.
                if data or now() >= silent_since + keep_alive_seconds:
                    yield data or dialect.keep_alive
                    silent_since = now()
        except Exception as error:  # the status line is gone: told in the stream
            yield dialect.failure(as_api_error(error))
            return
    phases = server_timing(choices.times())
    remark = dialect.remark(f"server-timing: {phases}") if phases else b""
    yield remark + dialect.ending(choices.usage())


def _worded(piece: Piece, dialect: Dialect, opened: set[int]) -> bytes:
    """The events of a piece; none when it holds nothing a client could see."""
    shown = piece.text or piece.reasoning or piece.calls or piece.logged or piece.ids
    if not (shown or piece.finish):
        return b""
    if piece.index in opened:
        return dialect.chunk(piece)
    opened.add(piece.index)
    return dialect.opening(piece.index) + dialect.chunk(piece)


class Streamed(ASGIResponse):
    """Sends what `source` makes as it comes, until it ends or the client hangs up.

    Litestar's own `Stream` leaves closing its generator to the garbage collector when it is
    cancelled while sending. Here it is closed before the response ends.
    """

    _should_set_content_length = False

    def __init__(
        self, source: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers=dict(headers))
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(HungUp):
            await self.start_response(send)
            await unless_hung_up(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._source) as source:  # type: ignore[type-var]
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Streamed):
    """Sends events as they are made; cancels `choices` when the client hangs up."""

    def __init__(self, choices: Choices, source: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(source, media_type, {**AS_IT_COMES, REQUEST_HEADER: choices.request})
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.cancel()  # also when the source never got to enter them
