"""Connections that the core hands over: their descriptors, and who is at their other end."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import BaseTransport
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any, Final, TypeAlias, cast
from urllib.parse import unquote

import httptools
import msgspec
import uvicorn
from uvicorn.server import ServerState

from appliance.http.connections import Connection
from appliance.http.crowd import Crowd, Room, most_descriptors
from appliance.http.errors import ApiError
from appliance.platform.descriptors import receive_descriptors
from appliance.service.front_frames import MAX_RECEIVED_BYTES, Handover, StreamBegun
from appliance.service.front_paths import is_front_path, without_root

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 4096
PAUSE_SECONDS: Final = 1.0
"""How long none is taken when all descriptors are in use, by requests."""
KEEP_ALIVE_SECONDS: Final = 5
"""How long a connection may be idle between two requests."""

CONNECTION: Final = "connection"
"""Where a scope's state has the core's number of the connection."""

STREAM_BEGUN: Final = "stream_begun"
"""Key of the callback for the start of the stream that answers a call: the number of the
call, and the event that ends the stream if this process dies."""

IS_BLOCKED: Final = "is_blocked"
"""Where it has what says whether the client still has to take what was sent to it."""

_decoder: Final = msgspec.msgpack.Decoder(Handover)


SendUp: TypeAlias = Callable[[int, Handover | StreamBegun], bool]
"""Sends a connection's descriptor to the core; False if that is not possible now."""


class HandedConnection(Connection):
    """One whose ends are those that the core saw. It goes back with the first request on it that
    is the core's, unless an earlier one is still answered."""

    def __init__(
        self,
        handover: Handover,
        send_up: SendUp,
        on_lost: Callable[[], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._handover = handover
        self._send_up = send_up
        self._on_lost = on_lost
        self._head: bytearray | None = bytearray()
        """What came since a request began; None where a head is whole, or began in the middle of
        what came."""
        self._between = True
        """No request is coming."""
        self._is_the_cores = False

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.client = self._handover.client
        self.server = self._handover.server
        self.scheme = "https" if self._handover.scheme == "https" else "http"

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
        super().data_received(data)
        if self._is_the_cores:
            self._return()
        elif self._between:
            self._head = bytearray()

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_the_cores:
            return
        alone = self._head is not None and all(one.response_complete for one in self.unanswered)
        if alone and not is_front_path(without_root(_path(self.url), self.config.root_path)):
            self._is_the_cores = True
            return
        self._head = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_the_cores:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_the_cores:
            return
        super().on_message_complete()
        self._between = True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def is_blocked(self) -> bool:
        """Whether the client still has to take what was sent to it."""
        return self.flow.write_paused

    def stream_begun(self, call: int, event: bytes) -> None:
        """Have the core end the stream of a call with `event`, should this process die."""
        if not self.transport.is_closing():
            ending = b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)  # as all streams, in chunks
            descriptor = self.transport.get_extra_info("socket").fileno()
            self._send_up(descriptor, StreamBegun(call, ending))

    def _return(self) -> None:
        assert self._head is not None
        received = bytes(self._head)
        self.transport.pause_reading()
        descriptor = self.transport.get_extra_info("socket").fileno()
        back = msgspec.structs.replace(self._handover, received=received)
        if len(received) > MAX_RECEIVED_BYTES or not self._send_up(descriptor, back):
            error = ApiError(503, "try again on another connection", code="overloaded")
            self._refuse(error)
            return
        self.transport.abort()  # ours; the core has one of its own


def _path(url: bytes) -> str:
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        return ""
    return unquote((path or b"").decode("latin-1"))


class Connections:
    """Takes connections from the handover socket, and serves them."""

    def __init__(
        self,
        handover: socket.socket,
        app: Any,
        root_path: str = "",
        most_in_use: int | None = None,
    ) -> None:
        """When `most_in_use` descriptors are, connections without a request are closed; by default,
        what the system allows says."""
        self._handover = handover
        self._config = uvicorn.Config(
            app,
            http=HandedConnection,
            root_path=root_path,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._state = ServerState()
        self._crowd = Crowd(most_descriptors() if most_in_use is None else most_in_use)
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._ended = False
        self.on_lost: Callable[[], None] = lambda: None
        """Called whenever a connection was closed."""

    def __len__(self) -> int:
        return len(self._state.connections) + len(self._opening)

    def begin(self) -> None:
        """Take what the core hands over from now on."""
        self._handover.setblocking(False)
        self._tell_time()
        self._loop.add_reader(self._handover.fileno(), self.receive)

    def end(self) -> None:
        """Take nothing more; all connections are closed."""
        self._ended = True
        self._loop.remove_reader(self._handover.fileno())
        for connection in list(self._state.connections):
            cast(Any, connection).transport.abort()

    def close_idle(self) -> None:
        """Close those that wait for another request; what is being answered is answered."""
        for connection in list(self._state.connections):
            if cast(Any, connection).cycle is not None:
                connection.shutdown()

    def receive(self) -> None:
        """Take all that was handed over so far, as far as there are descriptors for it."""
        while True:
            room = self._crowd.room()
            if room is Room.NONE:
                self._loop.remove_reader(self._handover.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._receive_again)
            if room is not Room.THERE:
                return
            try:
                data, descriptors = receive_descriptors(self._handover, MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError as error:
                log.error("no connections can be taken any more: %s", error)
                self._loop.remove_reader(self._handover.fileno())
                return
            if not data and not descriptors:  # the core's end is closed
                self._loop.remove_reader(self._handover.fileno())
                return
            for descriptor in descriptors:
                self._open(data, socket.socket(fileno=descriptor))

    def _receive_again(self) -> None:
        if not self._ended:
            self._loop.add_reader(self._handover.fileno(), self.receive)

    def _open(self, data: bytes, connection: socket.socket) -> None:
        try:
            handover = _decoder.decode(data)
        except msgspec.DecodeError as error:
            log.error("a connection came without a proper message: %s", error)
            connection.close()
            return
        connection.setblocking(False)
        protocol = self._protocol(handover)
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: protocol, connection)
        )
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, protocol))

    def _opened(self, protocol: HandedConnection, task: asyncio.Task[object]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crowd.leave(protocol)
            log.warning("a connection was lost before it was served: %s", error)
            self.on_lost()

    def _tell_time(self) -> None:
        """Answers from now on have this second's date."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._loop.call_later(1.0, self._tell_time)

    def _protocol(self, handover: Handover) -> HandedConnection:
        state: dict[str, Any] = {CONNECTION: handover.connection}
        connection = HandedConnection(
            handover,
            self._send_up,
            self.on_lost,
            config=self._config,
            server_state=self._state,
            app_state=state,
            _loop=self._loop,
        )
        state[STREAM_BEGUN] = connection.stream_begun
        state[IS_BLOCKED] = connection.is_blocked
        connection.crowd = self._crowd
        self._crowd.enter(connection, handover.client, connection.give_way)
        return connection

    def _send_up(self, descriptor: int, about: Handover | StreamBegun) -> bool:
        message = msgspec.msgpack.encode(about)
        try:
            socket.send_fds(self._handover, [message], [descriptor])
        except OSError as error:  # the core is gone, or takes nothing now
            log.warning("a connection cannot be sent to the core: %s", error)
            return False
        return True
