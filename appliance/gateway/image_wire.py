"""What a host answers when it is asked for an image: read so that no answer is long or dear.

The core reads it, which has others to serve. A host that sends little at a time, or much that is
no image, would take its time: each read and each piece costs as much, however small it is. So they
are counted, and the event loop has its turn in between.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, Final

import httpcore

MAX_FILE_BYTES: Final = 20 << 20
MAX_HEAD_BYTES: Final = 16 * 1024
"""Of all that comes before the file."""
MAX_EXTRA_BYTES: Final = 1 << 20
"""Of all that comes and is not the file: headers, and what is around pieces."""
FREE_PIECES: Final = 4096
MEAN_PIECE_BYTES: Final = 512
"""Of pieces and of reads, beyond those that are free."""
_READ_BYTES: Final = 64 * 1024
_HEAD_READ_BYTES: Final = 2 * 1024
"""A read of the head may be some hundred answers with a status of 1xx."""
_AT_ONCE: Final = 16
"""Pieces between turns of the event loop."""
_OK: Final = 200


class NotFetched(Exception):
    """An image that cannot be had; the message says why, in words for the client."""


class Wire(httpcore.AsyncNetworkBackend):
    """Connects, and counts what comes. For one fetch."""

    def __init__(self, host: str) -> None:
        """`host` is its name, for errors."""
        self.host = host
        self._head = True
        self._bytes = 0
        self._reads = 0

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        connected = await httpcore.AnyIOBackend().connect_tcp(
            host, port, timeout, local_address, socket_options
        )
        return _Stream(self, connected)

    @property
    def read_bytes(self) -> int:
        """How much may be read at once."""
        return _HEAD_READ_BYTES if self._head else _READ_BYTES

    def came(self, size: int) -> None:
        """So much was read. Raises `NotFetched` for what is too much, or too little at a time."""
        self._bytes += size
        self._reads += 1
        if self._head and self._bytes > MAX_HEAD_BYTES:
            raise NotFetched(f"{self.host} sends more than {MAX_HEAD_BYTES} bytes before the file")
        if self._bytes > MAX_FILE_BYTES + MAX_EXTRA_BYTES:
            raise NotFetched(f"{self.host} sends too much around the file: ask another host")
        self._check_pieces(self._reads, self._bytes)

    def _check_pieces(self, count: int, size: int) -> None:
        if count > FREE_PIECES + size // MEAN_PIECE_BYTES:
            raise NotFetched(f"{self.host} sends it in too small pieces: ask another host")

    async def file(self, response: httpcore.Response) -> bytes:
        """The file that a host answers with. Raises `NotFetched`."""
        self._head = False
        headers = {name.lower(): value for name, value in response.headers}
        if 300 <= response.status < 400 and b"location" in headers:
            raise NotFetched(f"{self.host} redirects to another URL: send that one")
        if response.status != _OK:
            raise NotFetched(f"{self.host} answers with status {response.status}")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise NotFetched(f"{self.host} sends it compressed, though that was not asked for")
        size = headers.get(b"content-length", b"0")
        too_large = size.isdigit() and int(size) > MAX_FILE_BYTES
        file = bytearray()
        pieces = 0
        async for piece in response.aiter_stream():
            if too_large or len(file) + len(piece) > MAX_FILE_BYTES:
                raise NotFetched(f"it has more than {MAX_FILE_BYTES} bytes: send a smaller image")
            file += piece
            pieces += 1
            self._check_pieces(pieces, len(file))
            if pieces % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return bytes(file)


class _Stream(httpcore.AsyncNetworkStream):
    """A connection of a `Wire`."""

    def __init__(self, wire: Wire, stream: httpcore.AsyncNetworkStream) -> None:
        self._wire = wire
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        await asyncio.sleep(0)  # what has come already is read without waiting
        data = await self._stream.read(min(max_bytes, self._wire.read_bytes), timeout)
        self._wire.came(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        secured = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(self._wire, secured)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
