"""One TCP connection that speaks HTTP/1.1, and can be dropped in any way at any time."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

NARROW_BYTES = 4096
"""What a client has room for that the server finds out about soon when it does not read."""
IDLE_SECONDS = 2.0
"""A connection that was not used for so long may be about to be closed by the server."""


class Closed(Exception):
    """The server closed the connection before the answer was whole."""


@dataclass
class Reply:
    """Status and headers of an answer, whose body is still to be read."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `Closed`."""
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline() or b"x", 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
            elif length := int(self.headers.get("content-length", 0)):
                yield await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise Closed from error

    async def body(self) -> bytes:
        """All of it. Raises `Closed`."""
        return b"".join([piece async for piece in self.pieces()])


class Connection:
    """Kept open from one request to the next, and opened anew when it was dropped."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        narrow: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`narrow` has little room for what it does not read. Every request has these `headers`,
        too: a key, for example."""
        self._address = (host, port)
        self._headers = dict(headers or {})
        self._narrow = narrow
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0
        self._last = False
        """Whether the server closes the connection behind its answer."""

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        share: float = 1.0,
    ) -> None:
        """Ask; `body` is bytes, or becomes JSON. Of the request only this `share` is sent."""
        idle = time.monotonic() - self._used > IDLE_SECONDS
        if self._streams is not None and (idle or self._last):
            self.drop()
        if self._streams is None:
            self._streams = await self._open()
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._address[0]}"]
        named = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        lines += [
            f"{name}: {value}" for name, value in (named | self._headers | (headers or {})).items()
        ]
        request = "\r\n".join([*lines, "", ""]).encode() + content
        _, writer = self._streams
        writer.write(request[: max(1, int(len(request) * share))])
        await writer.drain()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._narrow:
            return await asyncio.open_connection(*self._address)
        plug = socket.socket()
        try:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
            plug.setblocking(False)
            await asyncio.get_running_loop().sock_connect(plug, self._address)
            return await asyncio.open_connection(sock=plug, limit=NARROW_BYTES)
        except BaseException:
            plug.close()
            raise

    async def reply(self) -> Reply:
        """Wait for what the answer begins with. Raises `Closed`."""
        if self._streams is None:  # dropped since it was asked
            raise Closed
        reader, _ = self._streams
        try:
            status = (await reader.readline()).split()
            headers = {}
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
        except ConnectionError as error:
            raise Closed from error
        if len(status) < 2 or line != b"\r\n":
            raise Closed
        self._used = time.monotonic()
        self._last = headers.get("connection") == "close"
        return Reply(int(status[1]), headers, reader)

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> Reply:
        """Send and wait. Raises `Closed`."""
        await self.send(method, path, body, **more)
        return await self.reply()

    def done(self) -> None:
        """The answer was read to its end; the connection may be used again."""
        self._used = time.monotonic()

    def drop(self, *, reset: bool = False) -> None:
        """Hang up: with a FIN, or with an RST as when the client's machine or process is gone."""
        if self._streams is None:
            return
        _, writer = self._streams
        self._streams = None
        if reset:
            plug = writer.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()


async def ask_json(
    url_host: str,
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """One request on a connection of its own: status, and the body decoded. Raises `Closed`, and
    `OSError` if nobody listens."""
    connection = Connection(url_host, port, headers=headers)
    try:
        reply = await connection.ask(method, path, body)
        content = await reply.body()
    finally:
        connection.drop()
    return reply.status, json.loads(content) if content else None
