"""TLS of connections that front ends answer: the core encrypts, and pumps what it decrypts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import BaseTransport, Transport
from collections.abc import Callable
from typing import Final, cast

from appliance.gateway.request_lines import PEEK_BYTES, body_bytes, path_of

LAST_SECONDS: Final = 60.0
"""How long a client may take for what a front end had answered when it closed."""


class TlsBeginning(asyncio.Protocol):
    """A connection whose handshake is done: waits for its first path, and tells it once.

    Whatever comes is kept; `take` hands it over to the protocol that goes on.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_path: Callable[[TlsBeginning, str], None],
        on_lost: Callable[[TlsBeginning], None],
    ) -> None:
        """`connection` is what TLS is spoken on."""
        self.transport: Transport
        self._connection = connection
        self._shaken = False
        self._on_path = on_path
        self._on_lost = on_lost
        self._told = False
        self._received = bytearray()

    @property
    def silent(self) -> bool:
        """Whether nothing came yet."""
        return not self._received

    @property
    def body_bytes(self) -> int:
        """The size of the first request's body, as far as that is known."""
        return body_bytes(bytes(self._received[:PEEK_BYTES]))

    def take(self, protocol: asyncio.Protocol) -> None:
        """`protocol` goes on, as if it had been there from the beginning."""
        self._told = True
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if self._received:
            protocol.data_received(bytes(self._received))

    def close(self) -> None:
        """Close the connection; one whose handshake is not done at once."""
        if self._shaken:
            self.transport.close()
        else:  # the handshake fails; its descriptor is not ours to close any more
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: BaseTransport) -> None:
        transport = cast(Transport, transport)  # of uvloop it is no instance
        self.transport = transport
        self._shaken = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        path = None if self._told else path_of(bytes(self._received[:PEEK_BYTES]))
        if path is not None:
            self._told = True
            self._on_path(self, path)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)


class PumpSide(asyncio.Protocol):
    """One side of a pump: what comes goes to the other side, no faster than that takes it."""

    def __init__(self) -> None:
        self.other: PumpSide
        self._transport: Transport | None = None
        self._ended = False
        self._last: asyncio.TimerHandle | None = None
        self._waiting = bytearray()
        """What came for this side before it was there; no more is read until then."""

    def connection_made(self, transport: BaseTransport) -> None:
        transport = cast(Transport, transport)  # of uvloop it is no instance
        self._transport = transport
        if self._waiting:
            transport.write(bytes(self._waiting))
            self._waiting.clear()
        if self._ended:
            transport.close()
        else:
            self.other.read_on()

    def data_received(self, data: bytes) -> None:
        self.other.write(data)

    def pause_writing(self) -> None:
        self.other.read_no_more()

    def resume_writing(self) -> None:
        self.other.read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if self._last is not None:
            self._last.cancel()
        self.other.end()

    def write(self, data: bytes) -> None:
        """Send what the other side received."""
        if self._transport is not None:
            self._transport.write(data)
        elif not self._ended:
            self._waiting += data
            self.other.read_no_more()

    def read_no_more(self) -> None:
        """The other side takes nothing more for now."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.is_reading():
            transport.pause_reading()

    def read_on(self) -> None:
        """The other side takes more."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def end(self) -> None:
        """The other side is lost: send what there is, in time, and close."""
        if self._ended:
            return
        self._ended = True
        if self._transport is not None:
            self._transport.close()
            loop = asyncio.get_running_loop()
            self._last = loop.call_later(LAST_SECONDS, self._transport.abort)
