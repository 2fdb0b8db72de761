"""HTTP connections: how long a client may take, and what becomes of those that leave or stall.

uvicorn bounds only how long a connection may be idle between two requests. Here

- a request's head has to be whole in time, and its body has to come on: else 408, where nothing was
  answered yet, and the end of the connection;
- a client that offers another protocol is served as if it had not (`appliance.http.upgrades`);
- what is around a body (a head, the sizes of chunks, trailers) is bounded, too: 431;
- a client that does not read what is sent is detected soon, because the system may buffer only
  little for it; in the end its connection is closed, and its requests end;
- all requests of a lost connection are notified. uvicorn notifies only the last one; with several
  sent at once (pipelining) an earlier one is being answered, and would go on without a client.

Where it is we who keep a client waiting (an earlier answer is under way, a body is not read yet)
its time does not run out. The event loop looks for bytes before it looks at the time: a loop that
was held up is not taken for a client that was.
"""

from __future__ import annotations

import socket
from asyncio import BaseTransport, TimerHandle, Transport
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from appliance.http.crowd import Crowd
from appliance.http.error_formats import shape_of
from appliance.http.errors import ApiError, BadRequest
from appliance.http.request_ids import request_id
from appliance.http.upgrades import PlainParser
from appliance.service.front_frames import Handover
from appliance.service.front_paths import without_root

HEAD_SECONDS: Final = 20.0
"""Some hundred bytes, over a slow line; what proxies and other servers give, too."""
BODY_SECONDS: Final = 30.0
BODY_BYTES: Final = 16 * 1024
"""In every `BODY_SECONDS` so much of a body has to come, or its end: any line is faster."""
UNREAD_SECONDS: Final = 60.0
"""How long a client may take nothing of what waits for it."""
UNSENT_BYTES: Final = 16 * 1024
"""What the system may keep beyond what the client has room for. It would take megabytes."""
LINGER_SECONDS: Final = 30.0
"""How long the rest of a body is read, and forgotten, that was answered before it was whole. Closed
at once, the connection would be reset, and most clients would not see the answer."""
AROUND_BYTES: Final = 64 * 1024
AROUND_EACH: Final = 8
"""What is around a body: so much, and so many times the body, as chunks of one byte take six."""


class Awaited(Enum):
    """What a client is to send."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """Knows all its requests that are not answered yet, and what it waits for."""

    head_seconds = HEAD_SECONDS
    body_seconds = BODY_SECONDS
    body_bytes = BODY_BYTES
    unread_seconds = UNREAD_SECONDS
    around_bytes = AROUND_BYTES

    for_operators: ClassVar = False
    """Whether who is let in is an operator."""
    handover: Handover | None = None
    """What is known of a connection that another process accepted."""
    refusal: ApiError | None = None
    """What is answered to every request, if none is let in."""
    crowd: Crowd | None = None
    """Where it was entered, and leaves when it is lost."""

    unanswered: tuple[RequestResponseCycle, ...] = ()
    _lingering: TimerHandle | None = None
    """The last answer was given, and its request still comes."""
    _awaited = Awaited.NOTHING
    _reading: TimerHandle | None = None
    _writing: TimerHandle | None = None
    _unread = 0
    """Bytes that the client had not taken when it was last looked at."""
    _requests = 0
    """Begun so far."""
    _around = 0
    _body = 0
    """Bytes of the request that is coming: around its body, and of it."""
    _body_before = 0
    """Of its body, when it was last looked at."""

    @classmethod
    def admits(cls, connection: socket.socket) -> bool:
        """Whether requests of the peer are let in; else they are refused."""
        return True

    # --- what a client sends ---------------------------------------------------------------------

    def connection_made(self, transport: BaseTransport) -> None:
        self.root_path = ""  # uvicorn would put it before every path
        if self.refusal is not None:
            self.app = refusing(self.refusal)
        super().connection_made(transport)  # type: ignore[arg-type]
        self.parser = PlainParser(self)
        # As uvicorn has it: an answer may close the connection while more requests stand in line.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        # Whatever the system does not take is waited for, also when nothing more is to be sent. Not
        # 0: under TLS, where a buffer is full that has as much as its limit, nothing would be sent.
        self.transport.set_write_buffer_limits(high=1, low=0)
        self._await(Awaited.HEAD)
        if self.handover is not None:
            self._go_on(self.handover)

    def _go_on(self, handover: Handover) -> None:
        self.client, self.server = handover.client, handover.server
        self.scheme = "https" if handover.scheme == "https" else "http"
        if handover.received:
            self.data_received(handover.received)

    def data_received(self, data: bytes) -> None:
        request, body = self._requests, self._body
        super().data_received(data)
        if self._requests != request or self.transport.is_closing():
            return
        if self._awaited is Awaited.NOTHING and self._all_answered():  # empty lines, for ever
            self._await(Awaited.HEAD)
        self._around += len(data) - (self._body - body)
        if self._around > self.around_bytes + AROUND_EACH * self._body:
            self._refuse(ApiError(431, "the head is too large", code="head_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._around = self._body = 0
        if self._awaited is not Awaited.HEAD:
            self._await(Awaited.HEAD)

    def on_headers_complete(self) -> None:
        # An offer comes again without it; behind the last answer nothing is a request.
        if self.parser.should_upgrade() or self._lingering is not None:
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = _Closing(self, self.cycle)
            scope = self.scope  # which the application has not seen yet
            scope["path"] = without_root(scope["path"], self.config.root_path)
            scope["raw_path"] = without_root(
                scope["raw_path"].decode("latin-1"), self.config.root_path
            ).encode("latin-1")
        waiting = [cycle for cycle in self.unanswered if not cycle.response_complete]
        if self.cycle is not before:
            waiting.append(self.cycle)
        self.unanswered = tuple(waiting)
        self._await(Awaited.BODY)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body += len(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._await(Awaited.NOTHING)
        if self._lingering is not None:
            self.transport.close()

    def close_behind(self, cycle: RequestResponseCycle) -> None:
        """Its answer is the last one, or cannot go on: close, but not before a request that comes
        is whole."""
        if cycle.response_complete and cycle.more_body and cycle is self.cycle:
            if self._lingering is None:
                self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def plain_head(self) -> bytes:
        """The head that was parsed last, without its offer of another protocol."""
        version = b"HTTP/" + self.parser.get_http_version().encode()
        line = b" ".join((self.parser.get_method(), self.url, version))
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([line, *fields, b"", b""])

    def _await(self, what: Awaited) -> None:
        self._awaited = what
        self._body_before = self._body
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if what is not Awaited.NOTHING:
            seconds = self.head_seconds if what is Awaited.HEAD else self.body_seconds
            self._reading = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """The time for what is awaited is over."""
        others = [one for one in self.unanswered if not one.response_complete]
        comes = False
        if self._awaited is Awaited.BODY:
            others = [one for one in others if one is not self.cycle]
            comes = self._body - self._body_before >= self.body_bytes
        if others or comes or self.flow.read_paused:
            self._await(self._awaited)
        elif self._requests or self._around:
            what = "head" if self._awaited is Awaited.HEAD else "body"
            self._refuse(ApiError(408, f"the request's {what} did not come in time", code="slow"))
        else:
            self.transport.close()  # a client that sent nothing expects no answer

    def _all_answered(self) -> bool:
        return all(one.response_complete for one in self.unanswered)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be handed on, if nothing of another answer was sent, and close."""
        others = [one for one in self.unanswered if not one.response_complete]
        path, fresh = "", True
        if self._awaited is Awaited.BODY:
            others = [one for one in others if one is not self.cycle]
            path, fresh = self.cycle.scope["path"], not self.cycle.response_started
        if fresh and not others:
            self.transport.write(self._answer(error, path))
        self._let_go()
        self.transport.close()

    def _answer(self, error: ApiError, path: str) -> bytes:
        scope = {"headers": []} if self.scope is None else self.scope
        fields, body = _worded(error, path, request_id(scope))  # type: ignore[arg-type]
        head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
        line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        return f"{line}{head}\r\n".encode() + body

    def _should_upgrade(self) -> bool:
        return False  # to WebSockets: there are none

    def _unsupported_upgrade_warning(self) -> None:
        """Reached by CONNECT alone: what follows is no request, and no handler takes it."""
        message = "CONNECT is for proxies, and this is none; ask for a path"
        none = {"allow": ""}  # of what has no path (RFC 9110, 10.2.1)
        self._refuse(ApiError(405, message, code="not_a_proxy", headers=none))

    # --- what a client takes ---------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        if self._writing is None:
            self._writing = self.loop.call_later(self.unread_seconds, self._look_at_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking_at_unread()

    def _look_at_unread(self) -> None:
        self._writing = None
        before = self._unread
        if self.transport.get_write_buffer_size() < before:
            self.pause_writing()
        else:
            self.transport.abort()

    def _stop_looking_at_unread(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # --- the end ---------------------------------------------------------------------------------

    def give_way(self) -> bool:
        """Close, unless a request is under way; whether that was done."""
        if self.transport is None or self.transport.is_closing():
            return False
        if self._lingering is None and not self._all_answered():
            return False
        self.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.crowd is not None:
            self.crowd.leave(self)
        if self._lingering is not None:
            self._lingering.cancel()
        self._await(Awaited.NOTHING)
        self._stop_looking_at_unread()
        self._let_go()

    def _let_go(self) -> None:
        for cycle in self.unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.unanswered = ()


class _Closing(Transport):
    """What an answer is written to; the connection decides when it is closed."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._connection = connection
        self._cycle = cycle
        self.write = connection.transport.write  # type: ignore[method-assign]
        self.is_closing = connection.transport.is_closing  # type: ignore[method-assign]

    def close(self) -> None:
        self._connection.close_behind(self._cycle)


def _worded(error: ApiError, path: str, name: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of the answer to a request of this id, which is the last one."""
    body = shape_of(path)(error, name)
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": name,
        "request-id": name,
        "connection": "close",
        **error.headers,
    }
    return fields, body


def refusing(error: ApiError) -> Any:
    """An ASGI application that answers every request with an error, and closes."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        fields, body = _worded(error, scope["path"], request_id(scope))
        headers = [(field.encode(), value.encode()) for field, value in fields.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return refuse
