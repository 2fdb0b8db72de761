"""Answers that are sent while they are made, and given up when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.http.errors import ApiError

AS_IT_COMES: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of what nothing on the way is to keep or hold back."""

_Result = TypeVar("_Result")


class HungUp(ApiError):
    """The client left before its answer was complete; no client receives this error."""

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
