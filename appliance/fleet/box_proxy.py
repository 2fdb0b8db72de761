"""The proxy of one box: sends requests to its daemon, and gives answers on as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing, suppress
from typing import Any, Final

import httpcore

from appliance.errors import FleetError
from appliance.fleet.calls import (
    Answer,
    Call,
    Failed,
    Head,
    Headers,
    Hint,
    Item,
    answer_headers,
    request_headers,
)
from appliance.fleet.known_boxes import Report, read_load

POLL_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 3.0
_KEEP_ALIVE_SECONDS: Final = 4.0
"""A second less than a daemon keeps a connection that is not used."""
_NOT_SENT: Final = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout)
_MOST_ERROR_BYTES: Final = 200
_AHEAD_BYTES: Final = 1 << 20
"""So much of an answer is read before it is given on."""


class BoxProxy:
    """Of the daemon at `url`, with `key` for its load. Used in one event loop."""

    def __init__(self, name: str, url: str, key: str | None) -> None:
        self.name = name
        self._url = httpcore.URL(url)
        self._host = self._url.host + (b":%d" % self._url.port if self._url.port else b"")
        self._key = key
        self._load = b""
        self._dead = True
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
            http2=False,
        )

    async def close(self) -> None:
        await self._pool.aclose()

    async def forward(
        self, hint: Hint, call: Call, seconds: float | None = None
    ) -> AsyncGenerator[Item, None]:
        """The daemon's answer to a call, with at most so many seconds between its bytes. Closing
        this ends the connection, so the daemon cancels the request."""
        if self.name in hint.excluded:
            yield Failed(box=self.name, reason="it has refused already", taken=False)
            return
        taken = False
        try:
            async with self._pool.stream(**self._request(call, seconds)) as response:
                taken = True
                yield Head(
                    box=self.name,
                    status=response.status,
                    headers=answer_headers(tuple(response.headers)),
                )
                async with aclosing(_as_they_come(response.aiter_stream())) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except _NOT_SENT as error:
            yield Failed(box=self.name, reason=f"no daemon answers ({error})", taken=taken)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            reason = f"the daemon broke off ({error or type(error).__name__})"
            yield Failed(box=self.name, reason=reason, taken=True)

    async def answer(self, call: Call, seconds: float | None = None) -> Answer:
        """The whole answer to a call, which is a small one."""
        status, body = 0, bytearray()
        headers: Headers = ()
        async with aclosing(self.forward(Hint(), call, seconds)) as items:
            async for item in items:
                match item:
                    case Head():
                        status, headers = item.status, item.headers
                    case Failed():
                        return Answer(box=self.name, status=0, body=item.reason.encode())
                    case chunk:
                        body += chunk
        return Answer(box=self.name, status=status, headers=headers, body=bytes(body))

    async def check(self) -> None:
        """Raises `FleetError` unless the box is ready. One that drains is not ill: what it has
        begun goes on."""
        ready = await self._poll(b"/readyz")
        if ready.status == 200:
            return
        if ready.status and read_load((await self._poll(b"/api/load")).body).draining:
            return
        said = ready.body[:_MOST_ERROR_BYTES].decode("utf-8", "replace")
        raise FleetError(f"{self.name}: /readyz is {ready.status or 'not answered'}: {said}")

    async def report(self) -> Report:
        """What the box says of itself now; its last words, if it does not answer."""
        polled = await self._poll(b"/api/load")
        if polled.status == 200:
            self._load = polled.body
        self._dead = polled.status != 200
        return Report(box=self.name, load=self._load, dead=self._dead)

    async def _poll(self, path: bytes) -> Answer:
        headers = ((b"authorization", b"Bearer " + self._key.encode()),) if self._key else ()
        call = Call(method="GET", target=path, headers=headers)
        return await self.answer(call, seconds=POLL_SECONDS)

    def _request(self, call: Call, seconds: float | None) -> dict[str, Any]:
        headers = [(b"host", self._host), *request_headers(call.headers)]
        if call.body or call.method not in ("GET", "HEAD"):
            headers.append((b"content-length", b"%d" % len(call.body)))
        url = httpcore.URL(
            scheme=self._url.scheme, host=self._url.host, port=self._url.port, target=call.target
        )
        timeouts = {"connect": CONNECT_SECONDS} | ({"read": seconds} if seconds else {})
        return {
            "method": call.method,
            "url": url,
            "headers": headers,
            "content": call.body,
            "extensions": {"timeout": timeouts},
        }


async def _as_they_come(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream at once, in as few pieces as that allows: what has come while the last
    piece was given on is one piece. Each costs two ways through the cluster."""
    arrived, room, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ahead = bytearray()

    async def read() -> None:
        try:
            async for chunk in stream:
                ahead.extend(chunk)
                arrived.set()
                if len(ahead) >= _AHEAD_BYTES:
                    room.clear()
                    await room.wait()
        finally:
            over.set()
            arrived.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            if ahead:
                piece = bytes(ahead)
                ahead.clear()
                room.set()
                yield piece
            elif over.is_set():
                break
            else:
                await arrived.wait()
                arrived.clear()
        await reading
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reading
