"""Accepts connections and routes each by its first request line: to a front end or to the core.

A descriptor that goes to a front end was only peeked at, so that nothing of the request is lost.
An answer of the core closes its connection, so that the next request is routed anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from appliance.gateway.request_lines import PEEK_BYTES, body_bytes, path_of
from appliance.gateway.tls import PumpSide, TlsBeginning
from appliance.http.connections import HEAD_SECONDS, UNSENT_BYTES, Connection
from appliance.http.crowd import Crowd, Room, most_descriptors
from appliance.http.errors import ApiError
from appliance.service.front_frames import LARGE_BYTES, Handover
from appliance.service.front_paths import is_front_path, without_root

AT_ONCE: Final = 64
"""Connections that are accepted before the event loop does something else."""
PAUSE_SECONDS: Final = 1.0
"""How long nothing is accepted when there are no descriptors left."""
FIRST_LOOK_SECONDS: Final = 0.01
LONGEST_LOOK_SECONDS: Final = 0.5
"""A first line that comes in pieces is looked at again after pauses that grow: what was peeked at
stays readable, so that readiness says nothing."""
LEAST_HEAD_SECONDS: Final = 1.0
"""What the core gives for the rest of a head whose first line took long."""
MAX_WAITING: Final = 1024
"""Connections that wait for a front end at once."""
WAIT_SECONDS: Final = 120.0
"""How long a connection waits for a front end. On a small machine that has other work, a front end
may take more than 30 s to start; most clients wait for minutes."""
RETRY_SECONDS: Final = 5

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_numbers = itertools.count(1)

log = logging.getLogger(__name__)


class FrontEnds(Protocol):
    """The front ends, as far as connections go. `appliance.gateway.supervisor.Supervisor` is it."""

    def hand(self, connection: socket.socket, handover: Handover, *, operator: bool) -> bool:
        """Give a connection to a front end, which then has a descriptor of its own. False if none
        can take it now: `on_room` is called when one can. Raises `ApiError` if none will."""

    def on_room(self, tell: Callable[[], None]) -> None:
        """`tell` is to be called whenever a front end can take connections again."""


@dataclass(frozen=True)
class _Waiting:
    """A connection that is a front end's, when one can take it."""

    connection: socket.socket
    handover: Handover
    until: float


class Acceptor:
    """Accepts on listening sockets. Connections of the core are made by `make`; without
    `front_ends` all are the core's. With `tls`, clients speak it."""

    def __init__(
        self,
        make: Callable[[], Connection],
        kind: type[Connection],
        front_ends: FrontEnds | None,
        tls: ssl.SSLContext | None = None,
        root_path: str = "",
        *,
        head_seconds: float = HEAD_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        max_waiting: int = MAX_WAITING,
        most_in_use: int | None = None,
    ) -> None:
        """`kind` is what `make` makes. A path below `root_path` means what it means without it. A
        first request line may take `head_seconds`; `max_waiting` connections wait for a front end,
        for `wait_seconds` at most. When `most_in_use` descriptors are, connections without a
        request are closed; operators' are not (by default, what the system allows says)."""
        self._make = make
        self._kind = kind
        self._front_ends = front_ends
        self._tls = tls
        self._root_path = root_path
        self._head_seconds = head_seconds
        self._wait_seconds = wait_seconds
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._beginnings: set[_Beginning | TlsBeginning] = set()
        most = most_descriptors() if most_in_use is None else most_in_use
        self._crowd = Crowd(None if kind.for_operators else most)
        self._waiting: deque[_Waiting] = deque()
        self._giving_up: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        if front_ends is not None:
            front_ends.on_room(self._hand_waiting)

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Accept from now on."""
        self._listeners = list(listeners)
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Accept no more. What was not accepted stays in the listening sockets."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._listeners = []

    def end(self) -> None:
        """Close the connections that have no request yet."""
        for beginning in list(self._beginnings):
            self._close(beginning)

    @property
    def undecided(self) -> int:
        """Accepted connections whose first request is not known yet."""
        return len(self._beginnings) + len(self._tasks)

    # --- accepting -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            room = self._crowd.room()
            if room is Room.SOON:
                return
            if room is Room.NONE:
                self._pause(listener)
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                log.error("no connection is accepted for %g s: %s", PAUSE_SECONDS, error)
                self._pause(listener)
                return
            connection.setblocking(False)
            if self._tls is None:
                beginning = _Beginning(connection, self._route, self._over, self._head_seconds)
                self._begin(beginning, _address(connection.getpeername))
                beginning.look()
            else:
                self._run(self._begin_tls(connection, self._tls))

    def _begin(self, beginning: _Beginning | TlsBeginning, peer: tuple[str, int] | None) -> None:
        self._beginnings.add(beginning)
        self._crowd.enter(beginning, peer, partial(self._give_way, beginning))

    def _give_way(self, beginning: _Beginning | TlsBeginning) -> bool:
        self._close(beginning)
        return True

    def _forget(self, beginning: _Beginning | TlsBeginning) -> None:
        """It has a request now, or is lost."""
        self._beginnings.discard(beginning)
        self._crowd.leave(beginning)

    def _pause(self, listener: socket.socket) -> None:
        """Accept nothing for a while; what comes waits in the listening socket."""
        self._loop.remove_reader(listener)
        self._loop.call_later(PAUSE_SECONDS, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def _begin_tls(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        beginning = TlsBeginning(connection, self._route_tls, self._forget)
        self._begin(beginning, _address(connection.getpeername))
        try:
            await self._loop.connect_accepted_socket(
                lambda: beginning,
                connection,
                ssl=context,
                ssl_handshake_timeout=self._head_seconds,
            )
        except (OSError, ssl.SSLError):  # a handshake that fails is the client's affair
            self._forget(beginning)
            connection.close()
            return
        self._loop.call_later(self._head_seconds, self._over, beginning)

    def _over(self, beginning: _Beginning | TlsBeginning) -> None:
        """The time for a first line is over. The core says so, if there is anything to answer."""
        if beginning not in self._beginnings:
            return
        if beginning.silent:
            self._close(beginning)
        elif isinstance(beginning, TlsBeginning):
            self._forget(beginning)
            self._take_tls(beginning, head_seconds=LEAST_HEAD_SECONDS)
        else:
            self._route(beginning, "")

    def _close(self, beginning: _Beginning | TlsBeginning) -> None:
        self._forget(beginning)
        if isinstance(beginning, TlsBeginning):
            beginning.close()
        else:
            beginning.let_go().close()

    # --- routing ---------------------------------------------------------------------------------

    def _route(self, beginning: _Beginning, path: str | None) -> None:
        """The path of a connection is known; None: the client left."""
        self._forget(beginning)
        connection = beginning.let_go()
        if path is None:
            connection.close()
        elif self._is_front(path) and self._kind.admits(connection):
            self._offer(connection, _handover_of(connection, body_bytes=beginning.body_bytes))
        else:
            self._to_core(connection, head_seconds=beginning.seconds_left())

    def _route_tls(self, beginning: TlsBeginning, path: str) -> None:
        self._forget(beginning)
        if not self._is_front(path):
            self._take_tls(beginning)
            return
        handover = _handover_of(
            beginning.transport.get_extra_info("socket"),
            scheme="https",
            body_bytes=beginning.body_bytes,
        )
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        encrypted, plain = PumpSide(), PumpSide()
        encrypted.other, plain.other = plain, encrypted
        beginning.take(encrypted)
        self._run(self._open(plain, ours))
        self._offer(theirs, handover)

    def _is_front(self, path: str) -> bool:
        path = without_root(path, self._root_path)
        return self._front_ends is not None and is_front_path(path)

    def _offer(self, connection: socket.socket, handover: Handover) -> None:
        """A front end gets the connection, now or later, or it is refused."""
        waiting = _Waiting(connection, handover, self._loop.time() + self._wait_seconds)
        if len(self._waiting) >= self._max_waiting:
            self._give_up(waiting, _no_front_end(f"{self._max_waiting} requests wait for one"))
        elif self._waiting or not self._is_settled(waiting):
            self._waiting.append(waiting)
            if self._giving_up is None:
                self._giving_up = self._loop.call_at(waiting.until, self._give_up_late)

    def _is_settled(self, waiting: _Waiting) -> bool:
        """Whether a front end has the connection now, or it is refused."""
        assert self._front_ends is not None
        try:
            if not self._front_ends.hand(
                waiting.connection, waiting.handover, operator=self._kind.for_operators
            ):
                return False
        except ApiError as error:
            self._give_up(waiting, error)
        else:
            waiting.connection.close()  # the front end has a descriptor of its own
        return True

    def _hand_waiting(self) -> None:
        while self._waiting and self._is_settled(self._waiting[0]):
            self._waiting.popleft()

    def _give_up_late(self) -> None:
        self._giving_up = None
        now = self._loop.time()
        while self._waiting and self._waiting[0].until <= now:
            late = _no_front_end(f"none was ready for {self._wait_seconds:g} s")
            self._give_up(self._waiting.popleft(), late)
        if self._waiting:
            self._giving_up = self._loop.call_at(self._waiting[0].until, self._give_up_late)

    def _give_up(self, waiting: _Waiting, error: ApiError) -> None:
        self._to_core(waiting.connection, handover=waiting.handover, refusal=error)

    # --- the core's connections ------------------------------------------------------------------

    def take_back(self, connection: socket.socket, handover: Handover) -> None:
        """A front end has no answer to the request that comes on a connection: the core has."""
        self._to_core(connection, handover=handover)

    def _to_core(
        self,
        connection: socket.socket,
        *,
        handover: Handover | None = None,
        refusal: ApiError | None = None,
        head_seconds: float | None = None,
    ) -> None:
        peer = _address(connection.getpeername) if handover is None else handover.client
        protocol = self._core_protocol(peer, handover, refusal, head_seconds)
        self._run(self._open(protocol, connection))

    def _take_tls(self, beginning: TlsBeginning, head_seconds: float | None = None) -> None:
        peer = _address(beginning.transport.get_extra_info("socket").getpeername)
        beginning.take(self._core_protocol(peer, head_seconds=head_seconds))

    def _core_protocol(
        self,
        peer: tuple[str, int] | None,
        handover: Handover | None = None,
        refusal: ApiError | None = None,
        head_seconds: float | None = None,
    ) -> Connection:
        protocol = self._make()
        protocol.handover, protocol.refusal = handover, refusal
        if head_seconds is not None:
            protocol.head_seconds = min(protocol.head_seconds, head_seconds)
        protocol.crowd = self._crowd
        self._crowd.enter(protocol, peer, protocol.give_way)
        return protocol

    async def _open(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError as error:  # the client left meanwhile
            log.debug("a connection was lost: %s", error)
            connection.close()
            self._crowd.leave(protocol)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Beginning:
    """A connection whose first request line is peeked at until it says the path."""

    def __init__(
        self,
        connection: socket.socket,
        on_path: Callable[[_Beginning, str | None], None],
        on_late: Callable[[_Beginning], None],
        head_seconds: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_path = on_path
        self._until = self._loop.time() + head_seconds
        self._late = self._loop.call_at(self._until, on_late, self)
        self._again: asyncio.TimerHandle | None = None
        self._reading = False
        self._pause = FIRST_LOOK_SECONDS
        self.silent = True
        """Whether nothing came yet."""
        self.body_bytes = 0
        """Of the first request, as far as that is known."""

    def look(self) -> None:
        """Look whether the path is there; go on looking if not, unless no more comes."""
        ended = not self.silent and _has_ended(self._connection)  # before: what came is whole then
        try:
            begin = self._connection.recv(PEEK_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._reading = True
            self._loop.add_reader(self._connection, self.look)
            return
        except OSError:
            begin = b""
        path = path_of(begin) if begin else None
        if path is None and ended:
            path = ""
        if path is not None or not begin:
            self.body_bytes = body_bytes(begin)
            self._on_path(self, path)
            return
        self.silent = False
        self._stop_reading()
        self._again = self._loop.call_later(self._pause, self.look)
        self._pause = min(self._pause * 2, LONGEST_LOOK_SECONDS)

    def seconds_left(self) -> float:
        """For the rest of the head."""
        return max(LEAST_HEAD_SECONDS, self._until - self._loop.time())

    def let_go(self) -> socket.socket:
        """The connection, which is not looked at any more."""
        self._stop_reading()
        self._late.cancel()
        if self._again is not None:
            self._again.cancel()
        return self._connection

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._connection)


def listen_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen at every address of `host`. Raises `OSError`."""
    kinds = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
    )
    with contextlib.ExitStack() as opened:
        listeners = []
        for family, address in dict.fromkeys((kind[0], kind[4]) for kind in kinds):
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
            listeners.append(listener)
        opened.pop_all()
    return listeners


def _has_ended(connection: socket.socket) -> bool:
    """Whether the client sends no more. What it sent before hides that from who peeks."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _handover_of(connection: socket.socket, *, scheme: str = "http", body_bytes: int) -> Handover:
    return Handover(
        connection=next(_numbers),
        client=_address(connection.getpeername),
        server=_address(connection.getsockname),
        scheme=scheme,
        large=body_bytes >= LARGE_BYTES,
    )


def _address(name_of: Callable[[], object]) -> tuple[str, int] | None:
    """The end of a TCP connection; None for others, and for those that are lost already."""
    try:
        name = name_of()
    except OSError:
        return None
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _no_front_end(reason: str) -> ApiError:
    return ApiError(
        503,
        f"no front end can take the request: {reason}; try again in {RETRY_SECONDS} s",
        code="starting",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
