"""Front-end processes: started, fed with connections, listened to, and replaced when they die.

They are forked from a process that has imported vLLM (`front_forks`), so that a new one is there at
once. Each has a stream of frames and a socket over which connections are handed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from asyncio import BaseTransport
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import msgspec

from appliance import framing
from appliance.forking.orders import Fork
from appliance.forking.pauses import FIRST_PAUSE_SECONDS, pause_after
from appliance.forking.server import kill, wait_ended
from appliance.gateway.front_forks import ZYGOTE, front_forks
from appliance.http.errors import ApiError
from appliance.platform.descriptors import receive_descriptors
from appliance.service.front_frames import (
    MAX_RECEIVED_BYTES,
    Down,
    Drain,
    Handover,
    Hello,
    Ping,
    Pong,
    Ready,
    Role,
    StreamBegun,
    Up,
    decoder_for_core,
)
from appliance.worker.process import LAST_SECONDS

OPERATORS_REMEMBERED: Final = 4096
"""Connections of operators that a front end has had, the latest ones."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Of frames that a front end does not read; one with more hangs."""
HANDOVER_BYTES: Final = 1 << 20
"""What the handover socket is to hold; the system may give less."""
ANSWER_BYTES: Final = 1024

_decoder: Final = msgspec.msgpack.Decoder(Handover | StreamBegun)

log = logging.getLogger(__name__)


class FrameHandler(Protocol):
    """What a front end's frames are for. `appliance.gateway.sessions.Session` is one."""

    def received(self, frame: Up, /) -> None: ...

    def stream_begun(self, call: int, connection: socket.socket, ending: bytes, /) -> None:
        """The stream that answers a call has begun on `connection`, which is the session's to
        close. `ending` ends it, should the front end die before."""

    def drained(self) -> None:
        """The front end drains: it ends when its connections are answered."""

    def lost(self) -> None:
        """The front end died."""


class OpenSession(Protocol):
    """Begins a session with a new front end. `send` sends it a frame; `is_operator` says of a
    connection that was handed to it whether an operator is at its other end."""

    def __call__(
        self, send: Callable[[Down], None], is_operator: Callable[[int], bool], /
    ) -> FrameHandler: ...


@dataclass(frozen=True)
class Patience:
    """How long front ends may take."""

    ping_seconds: float = 0.25
    """Between two pings."""
    slow_seconds: float = 0.5
    """One that owes an answer for longer gets no new connections."""
    unanswered_pings: int = 80
    """One that owes so many hangs, and is killed. Counted, as a core that was held up pings no
    more often."""
    starting_pings: int = 480
    """The same for one that has not been ready yet: it may have to import vLLM for itself."""


class FrontEndProcess(asyncio.Protocol):
    """One front-end process, over the stream of its frames."""

    def __init__(
        self,
        number: int,
        handover: socket.socket,
        open_session: OpenSession,
        on_room: Callable[[], None],
        on_given_back: Callable[[socket.socket, Handover], None],
    ) -> None:
        self.number = number
        self.ready = False
        self.worked = False
        """Whether it served for a while."""
        self.draining = False
        self.connections = 0
        """That it has, as far as is known."""
        self.large = 0
        """Requests with a large body that it answers, as far as is known."""
        self.over = asyncio.Event()
        self._handover = handover
        self._on_room = on_room
        self._on_given_back = on_given_back
        self._transport: asyncio.Transport | None = None
        self._process: int | None = None
        """Its pidfd."""
        self._decoder = decoder_for_core()
        self._pings: deque[tuple[int, float]] = deque()
        """Those that are not answered: number and time."""
        self._numbers = itertools.count(1)
        self._full = False
        self._operators: OrderedDict[int, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._session = open_session(self.send, self._operators.__contains__)
        self._loop.add_reader(handover, self._take_back)

    # --- what is sent to it ----------------------------------------------------------------------

    def send(self, frame: Down) -> None:
        """Send a frame; it is lost if the front end has died, which is reported elsewhere."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framing.encode(frame))

    def ping(self, patience: Patience) -> None:
        """Ask for a sign of life; kill what gave none for long."""
        if self._process is None or self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        began = self.ready or self.worked
        most = patience.unanswered_pings if began else patience.starting_pings
        if len(self._pings) >= most or unread > MAX_UNREAD_BYTES:
            log.error("front end %d hangs, and is killed", self.number)
            self.kill()
            return
        number = next(self._numbers)
        self._pings.append((number, self._loop.time()))
        self.send(Ping(number))

    def drain(self) -> None:
        """Have it end when its connections are answered."""
        self.draining = True
        self._session.drained()
        self.send(Drain())

    def owes_for(self) -> float:
        """For how long it has not answered a ping; 0 if it has answered all."""
        return self._loop.time() - self._pings[0][1] if self._pings else 0.0

    @property
    def takes(self) -> bool:
        """Whether it may be handed connections."""
        return self.ready and not self.draining and not self.over.is_set()

    @property
    def full(self) -> bool:
        """Whether its handover socket is full and no frame came since."""
        return self._full

    def hand(self, connection: socket.socket, handover: Handover, *, operator: bool) -> bool:
        """Hand a connection over. False if its socket is full, or it is gone."""
        message = msgspec.msgpack.encode(handover)
        try:
            socket.send_fds(self._handover, [message], [connection.fileno()], socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._full = True
            return False
        except OSError as error:  # it is dying: the end of its frames tells
            log.debug("front end %d took no connection: %s", self.number, error)
            return False
        if operator:
            self._operators[handover.connection] = None
            if len(self._operators) > OPERATORS_REMEMBERED:
                self._operators.popitem(last=False)
        self.connections += 1
        self.large += handover.large
        return True

    def kill(self) -> None:
        """End it by force."""
        if self._process is not None:
            kill(self._process)
        if self._transport is not None:
            self._transport.abort()

    # --- what it says ----------------------------------------------------------------------------

    def forked(self, process: int) -> None:
        """It was started; `process` is its pidfd."""
        if self.over.is_set():
            kill(process)
            os.close(process)
        else:
            self._process = process

    def connection_made(self, transport: BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # of uvloop it is no instance
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._received(frame)
        except (msgspec.DecodeError, ValueError):
            log.exception("front end %d sent a bad frame", self.number)
            self.kill()
        except Exception:  # expendable, and what it had is given up in order
            log.exception("a frame of front end %d could not be handled", self.number)
            self.kill()

    def _received(self, frame: Up) -> None:
        match frame:
            case Pong():
                while self._pings and self._pings[0][0] <= frame.number:
                    self._pings.popleft()
                self.connections = frame.connections
                self.large = frame.large
                self.worked = self.ready
                self._session.received(frame)
                self._has_room()
            case Ready():
                self.ready = True
                self._pings.clear()  # those of its start, which it may answer yet
                log.info("front end %d is ready", self.number)
                self._session.received(frame)
                self._has_room()
            case Hello():
                log.debug("front end %d is process %d", self.number, frame.pid)
                self._session.received(frame)
            case _:
                self._session.received(frame)

    def _has_room(self) -> None:
        self._full = False
        if self.takes:
            self._on_room()

    def _take_back(self) -> bool:
        """Take a connection that it sends: one whose next request is the core's, or one on which a
        stream has begun. False if none came."""
        try:
            message, descriptors = receive_descriptors(
                self._handover, MAX_RECEIVED_BYTES + ANSWER_BYTES, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return False
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._loop.remove_reader(self._handover)
            return False
        connections = [socket.socket(fileno=number) for number in descriptors]
        try:
            about = _decoder.decode(message)
        except msgspec.DecodeError:
            log.exception("front end %d sent a connection with a bad message", self.number)
            connections.clear()
        for connection in connections:
            connection.setblocking(False)
            if isinstance(about, StreamBegun):
                self._session.stream_begun(about.call, connection, about.ending)
            else:
                self._on_given_back(connection, about)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ready = False
        while self._take_back():  # what it sent before
            pass
        self._loop.remove_reader(self._handover)
        self._handover.close()
        self.kill()
        self.over.set()
        self._session.lost()

    async def wait_ended(self) -> None:
        """Until its process is gone; a while at most."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await wait_ended(self._process)
        except TimeoutError:
            log.error("front end %d was killed and does not end", self.number)
        finally:
            os.close(self._process)
            self._process = None


class Supervisor:
    """Keeps front ends alive, and hands connections to the one that has least to do."""

    def __init__(
        self,
        count: int,
        open_session: OpenSession,
        *,
        command: Sequence[str] = ZYGOTE,
        patience: Patience | None = None,
    ) -> None:
        """`command`, with the number of the socket of orders behind it, is what front ends are
        forked from."""
        self.restarts = 0
        """How many front ends were started for ones that died."""
        self.on_given_back: Callable[[socket.socket, Handover], None] = _close
        """Takes connections that a front end gave back: the core answers."""
        self.forks = front_forks(command)
        self._count = count
        self._open_session = open_session
        self._patience = Patience() if patience is None else patience
        self._front_ends: dict[int, FrontEndProcess] = {}
        self._stopping = asyncio.Event()
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._tell_room: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the front ends, and go on keeping them."""
        self.forks.start()
        kept = [self._ping(), *(self._keep_front_end() for _ in range(self._count))]
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in kept]

    def on_room(self, tell: Callable[[], None]) -> None:
        """`tell` is called whenever a front end can take connections again."""
        self._tell_room.append(tell)

    def hand(self, connection: socket.socket, handover: Handover, *, operator: bool) -> bool:
        """Give a connection to the front end with the fewest connections of those that answer
        pings in time, or of all if none does. Large bodies keep to half of the front ends, and
        others to the other half. False if none can take it now. Raises `ApiError` if none will."""
        if self._draining:
            raise shutting_down()
        able = [front_end for front_end in self._front_ends.values() if front_end.takes]
        able.sort(key=lambda one: (one.full or self._is_slow(one), one.large > 0, one.connections))
        busy = sum(one.large > 0 for one in able)
        if handover.large and 2 * busy >= len(able):
            able.sort(key=lambda one: (one.full, one.large == 0))
        return any(one.hand(connection, handover, operator=operator) for one in able)

    @property
    def ready(self) -> int:
        """Front ends that take connections."""
        return sum(front_end.takes for front_end in self._front_ends.values())

    @property
    def slow(self) -> int:
        """Those of them that owe an answer to a ping for long."""
        return sum(one.takes and self._is_slow(one) for one in self._front_ends.values())

    @property
    def connections(self) -> int:
        """Connections that front ends have."""
        return sum(front_end.connections for front_end in self._front_ends.values())

    def not_ready(self) -> str | None:
        """Why no request for a front end can be answered; None if it can."""
        if self.ready:
            return None
        deaths = self.forks.deaths
        reason = f", {deaths} attempts failed; see the log" if deaths else ""
        return f"no front end is ready{reason}"

    def drain(self) -> None:
        """Have all front ends end when their connections are answered; start no others."""
        if self._draining:
            return
        self._draining = True
        for front_end in self._front_ends.values():
            front_end.drain()
        self._has_room()  # what waits is refused

    async def stop(self, patience_seconds: float) -> None:
        """End the front ends: those that are done in time by themselves."""
        self.drain()
        living = list(self._front_ends.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                for front_end in living:
                    await front_end.over.wait()
        self._stopping.set()
        for front_end in living:
            front_end.kill()
        await asyncio.gather(self.forks.stop(), *self._tasks)

    def _is_slow(self, front_end: FrontEndProcess) -> bool:
        return front_end.owes_for() > self._patience.slow_seconds

    # --- keeping ---------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self._stopping.is_set() or self._draining

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _keep_front_end(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._over:
            await self._until_forkable()
            if self._over:
                return
            front_end = await self._start()
            await front_end.over.wait()
            await front_end.wait_ended()
            del self._front_ends[front_end.number]
            if self._over:
                return
            pause = pause_after(pause, worked=front_end.worked)
            log.warning("a front end died; next in %.2f s", pause)
            self.restarts += 1
            await self._pause(pause)

    async def _until_forkable(self) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        began = asyncio.ensure_future(self.forks.until_there())
        try:
            await asyncio.wait((stopping, began), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            began.cancel()

    async def _start(self) -> FrontEndProcess:
        """Order another front end."""
        number = self.forks.next_number()
        frames, their_frames = socket.socketpair()
        handover, their_handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (handover, their_handover):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HANDOVER_BYTES)
        front_end = FrontEndProcess(
            number, handover, self._open_session, self._has_room, self._given_back
        )
        self._front_ends[number] = front_end
        frames.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: front_end, frames)
        with their_frames, their_handover:
            self.forks.fork(
                Fork(number, Role.FRONT_END),
                [their_frames.fileno(), their_handover.fileno()],
                lambda child: front_end.forked(child.handle),
            )
        return front_end

    async def _ping(self) -> None:
        while not self._stopping.is_set():
            for front_end in list(self._front_ends.values()):
                front_end.ping(self._patience)
            await self._pause(self._patience.ping_seconds)

    def _has_room(self) -> None:
        for tell in self._tell_room:
            tell()

    def _given_back(self, connection: socket.socket, handover: Handover) -> None:
        self.on_given_back(connection, handover)


def shutting_down() -> ApiError:
    """What is answered when front ends take no more connections."""
    return ApiError(503, "the appliance shuts down", code="shutting_down")


def _close(connection: socket.socket, _handover: Handover) -> None:
    connection.close()
