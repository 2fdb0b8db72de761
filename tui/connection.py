"""A running daemon: follows its state and events, comes back when it is lost, asks it things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec

from tui.messages import AnswerPiece, DaemonRefused, Document, Kind, Message, PieceKind

UNIX = "unix:"
EVERY_SECONDS = 0.25
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 4.0
SILENT_SECONDS = 15.0
"""A daemon that has nothing to say says that every five seconds."""
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 5.0
UNAUTHORIZED = 401
REQUEST_HEADER = "x-appliance-request"
DONE = "[DONE]"


class DaemonConnection:
    """Over HTTP, or over the admin socket (`unix:/PATH`). Implements `DaemonSource`."""

    live = True

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = url
        self._clock = clock
        self._sleep = sleep
        if transport is None and url.startswith(UNIX):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix(UNIX))
        self._client = httpx.AsyncClient(
            base_url="http://appliance" if url.startswith(UNIX) else url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=transport,
            timeout=httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS),
        )

    async def follow(self) -> AsyncIterator[Message]:
        """Waits twice as long before every next try, until something arrives."""
        seen: str | None = None
        wait = FIRST_WAIT_SECONDS
        while True:
            reason = "the daemon ended"
            try:
                headers = {} if seen is None else {"last-event-id": seen}
                async with self._client.stream(
                    "GET", "/api/watch", params={"every": EVERY_SECONDS}, headers=headers
                ) as response:
                    await _check(response)
                    async for kind, data, number in _events(_lines(response.aiter_bytes())):
                        seen = number or seen
                        wait = FIRST_WAIT_SECONDS
                        yield Message(self._clock(), kind, data)
            except (httpx.TransportError, DaemonRefused, msgspec.DecodeError) as error:
                reason = str(error) or type(error).__name__
            yield Message(self._clock(), Kind.LOST, {"reason": reason, "seconds": wait})
            await self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = await self._client.request(method, path, json=body, timeout=ANSWER_SECONDS)
            await _check(response)
            return msgspec.json.decode(response.content)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except msgspec.DecodeError as error:
            raise self._not_an_appliance() from error

    async def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        """Without a limit: between tokens a request waits for the turns of other models, which is
        for the daemon to bound."""
        yield AnswerPiece(self._clock(), PieceKind.ASKED, {})
        try:
            async with self._client.stream(
                "POST", path, json=body, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
            ) as response:
                await _check(response)
                request = response.headers.get(REQUEST_HEADER, "")
                yield AnswerPiece(self._clock(), PieceKind.BEGUN, {"request": request})
                async for line in _lines(response.aiter_bytes()):
                    name, _, value = line.partition(":")
                    value = value.strip()
                    if name == "data" and value == DONE:
                        return
                    if name == "data":
                        data = msgspec.json.decode(value, type=dict)
                        yield AnswerPiece(self._clock(), PieceKind.DATA, data)
                    elif not name and value:
                        yield AnswerPiece(self._clock(), PieceKind.REMARK, {"text": value})
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except msgspec.DecodeError as error:
            raise self._not_an_appliance() from error
        raise DaemonRefused("the answer broke off")

    def _unreachable(self, error: httpx.TransportError) -> DaemonRefused:
        return DaemonRefused(f"the daemon cannot be reached: {error}")

    def _not_an_appliance(self) -> DaemonRefused:
        return DaemonRefused(f"what answers at {self.name} is not the appliance")

    async def close(self) -> None:
        await self._client.aclose()


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """A line feed ends one, and nothing else: httpx would also cut the JSON in it at U+2028."""
    begun = b""
    async for data in pieces:
        *whole, begun = (begun + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[Kind, Document, str | None]]:
    """What is server-sent: kind, data, and the id if it has one."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            kind = fields.get("event", "")
            known = Kind(kind) if kind in (Kind.STATE, Kind.DELTA) else Kind.NOTICE
            yield known, msgspec.json.decode(fields["data"], type=dict), fields.get("id")
            fields = {}


async def _check(response: httpx.Response) -> None:
    """Raises `DaemonRefused` for an error, in its own words where it has some."""
    if response.is_success:
        return
    content = await response.aread()
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"{response.request.url.path} answered {response.status_code}"
    if response.status_code == UNAUTHORIZED:  # what to do comes first: a line is cut at its end
        message = f"put a key with the scope admin into $APPLIANCE_API_KEY ({message})"
    raise DaemonRefused(str(message))
