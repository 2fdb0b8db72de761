"""The endpoints of an admin who watches: everything at once, and what happens from then on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.http.errors import BadRequest
from appliance.http.json import json_answer
from appliance.http.streaming import AS_IT_COMES, Streamed
from appliance.service.interface import Watch

KEEP_ALIVE = b": keep-alive\n\n"


def event_routes(service: Watch, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    """Events are server-sent. Each has a number as its id; a client that comes back with the last
    one it saw (``Last-Event-ID``) goes on behind it, if that is not too long ago."""

    @get("/api/snapshot", operation_id="snapshot")
    async def snapshot() -> ASGIResponse:
        return json_answer(service.snapshot())

    @get("/api/events", operation_id="events")
    async def events(request: Request[Any, Any, Any]) -> ASGIResponse:
        return WatchResponse(_worded(service, last_seen(request), keep_alive_seconds))

    return [snapshot, events]


def last_seen(request: Request[Any, Any, Any]) -> int | None:
    """The number of the last event that a client saw before it came back. Raises `BadRequest`."""
    seen = request.headers.get("last-event-id")
    if seen is not None and not (seen.isascii() and seen.isdigit() and len(seen) < 20):
        raise BadRequest("Last-Event-ID is not the id of an event", "Last-Event-ID")
    return None if seen is None else int(seen)


async def _worded(
    service: Watch, after: int | None, keep_alive_seconds: float
) -> AsyncIterator[bytes]:
    """Events as they go out; a comment whenever nothing happened for a while."""
    async with aclosing(service.events(after)) as batches:  # type: ignore[type-var]
        coming = asyncio.ensure_future(anext(batches, []))
        shown = 0
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=keep_alive_seconds)
                if not done:
                    yield KEEP_ALIVE
                    continue
                batch = coming.result()
                if batch is None:
                    state = service.snapshot()
                    shown = state.newest_event  # more may have happened since it was found missing
                    yield server_sent("snapshot", msgspec.json.encode(state), state.newest_event)
                elif batch:
                    new = [notice for notice in batch if notice.number > shown]
                    events = [server_sent(n.kind, msgspec.json.encode(n), n.number) for n in new]
                    yield b"".join(events)
                else:
                    return
                coming = asyncio.ensure_future(anext(batches, []))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


def server_sent(kind: str, data: bytes, number: int | None = None) -> bytes:
    """An event as it goes out. Without a number the client keeps the last one it saw."""
    numbered = b"" if number is None else b"id: %d\n" % number
    return numbered + b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


class WatchResponse(Streamed):
    """Sends what comes until it ends, or the client leaves."""

    def __init__(self, source: AsyncIterator[bytes], media_type: str = "text/event-stream") -> None:
        super().__init__(source, media_type, AS_IT_COMES)
