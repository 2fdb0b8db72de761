"""One life of the daemon and its HTTP server: signs of life, signals, the drain, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import uvicorn

from appliance.errors import ApplianceError
from appliance.gateway.acceptor import Acceptor, FrontEnds, listen_at
from appliance.http.connections import Connection
from appliance.http.lifespan import Lifespan
from appliance.platform.systemd import Notifier
from appliance.units import Address

STATUS_SECONDS = 5.0
"""How often the service manager gets the state, if it wants it no more often."""

FRESH_SECONDS = 1.0
"""How long a connection that was accepted may take to send its request while we end."""

GRACE_SECONDS = 3
"""How long connections, and front ends, may take to send what they have after the drain."""

BACKLOG = 2048
"""Connections that wait to be accepted, as in `appliance.socket`."""

log = logging.getLogger("appliance.serve")


class Served(Protocol):
    """The daemon, as far as its life goes. `appliance.daemon.daemon.Daemon` is one."""

    def start(self) -> None: ...

    async def drain(self, patience_seconds: float) -> None: ...

    async def stop(self) -> None: ...

    def progresses(self) -> bool:
        """Whether ending this process would help no request."""

    def summary(self) -> str:
        """How things stand, in a few words."""


class ServedBeside(Protocol):
    """The front ends, as far as the daemon's life goes. `appliance.gateway.supervisor.Supervisor`
    is it."""

    def start(self) -> None: ...

    def drain(self) -> None:
        """Have them end when what they have is answered."""

    async def stop(self, patience_seconds: float) -> None:
        """End them; those that are done in time by themselves."""


class Server(uvicorn.Server):
    """Answers what is the core's, and has front ends answer what is theirs.

    Each of its answers is the last of its connection, so that the next request is routed anew.
    It leaves signals alone: uvicorn would raise them again when it is done, and end the process
    before the workers are.
    """

    acceptor: Acceptor
    """There once it listens."""

    def __init__(self, config: uvicorn.Config, front_ends: FrontEnds | None = None) -> None:
        """The protocol of `config` has to be a `Connection`. Without `front_ends` everything is
        the core's."""
        config.headers = [*config.headers, ("connection", "close")]
        super().__init__(config)
        self.listening = asyncio.Event()
        self._front_ends = front_ends
        self._bound: list[socket.socket] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises `ApplianceError` where that cannot be, and what the application raises."""
        config = self.config
        if config.lifespan == "on":
            self.lifespan = Lifespan(config.loaded_app)
        await super().startup([])
        if sockets is None:
            try:
                sockets = self._bound = bound_at(config.host, config.port, config.backlog)
            except ApplianceError:
                await self.lifespan.shutdown()
                raise
        kind = config.http_protocol_class
        assert issubclass(kind, Connection)
        self.acceptor = Acceptor(self._make, kind, self._front_ends, config.ssl, config.root_path)
        self.acceptor.start(sockets)
        if places := ", ".join(map(_place, filter(_is_tcp, sockets))):
            log.info("listening at %s", places)
        self.listening.set()

    def _make(self) -> Connection:
        kind = self.config.http_protocol_class
        return kind(self.config, self.server_state, self.lifespan.state)  # type: ignore

    def stop_accepting(self) -> None:
        """Leave connections that were not accepted yet to the next process that has the sockets."""
        self.acceptor.stop()

    def _undecided(self) -> bool:
        """Whether a connection was accepted whose first request is on its way."""
        return self.acceptor.undecided > 0 or any(
            isinstance(one, Connection) and one.cycle is None
            for one in self.server_state.connections
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End. A connection whose first request is on its way is not closed under it."""
        self.stop_accepting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.force_exit else FRESH_SECONDS):
                while self._undecided():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        self.acceptor.end()
        await super().shutdown([*(sockets or []), *self._bound])
        with contextlib.suppress(TimeoutError):  # which uvicorn leaves out when it ends at once
            await asyncio.wait_for(self.lifespan.shutdown(), GRACE_SECONDS)


def bound_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen where `api.bind` says. Raises `ApplianceError`, with the remedy."""
    try:
        return listen_at(host, port, backlog)
    except OSError as error:
        raise ApplianceError(_not_bound(host, port, error)) from error


def bound_beside(passed: Sequence[socket.socket], bind: Address) -> list[socket.socket]:
    """Sockets that listen at `bind`, which the configuration chose, unless one that the service
    manager passed does; the log warns of them. Raises `ApplianceError`."""
    if any(_serves(listener, bind) for listener in passed):
        return []
    log.warning(
        "api.bind: %s is not where the service manager listens (%s): the daemon listens there, "
        "too, but not while it restarts; set ListenStream=%s with `systemctl edit "
        "appliance.socket`, or leave api.bind out",
        bind,
        ", ".join(map(_place, passed)),
        bind,
    )
    return bound_at(bind.host, bind.port, BACKLOG)


def _is_tcp(listener: socket.socket) -> bool:
    return listener.family in (socket.AF_INET, socket.AF_INET6)


def _place(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


def _serves(listener: socket.socket, bind: Address) -> bool:
    """Whether connections to `bind` come to a socket."""
    host, port = listener.getsockname()[:2]
    return port == bind.port and host in (bind.host, "0.0.0.0", "::")


def _not_bound(host: str, port: int, error: OSError) -> str:
    """Why the address cannot be listened on, and what to do."""
    wrong = f"api.bind: {host}, port {port}: {error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        return f"{wrong}; end the program that listens there, or set another port"
    if error.errno == errno.EACCES:
        return f"{wrong}; set a port of 1024 or more"
    return f"{wrong}; set an address of this machine"


class Lifetime:
    """Runs a daemon behind a server until a signal or a failure ends it.

    The first SIGTERM or SIGINT drains: what runs may go on for `drain_seconds`, then it is ended
    with a named error. A second one ends everything at once. With `sockets` that another process
    has, too, connections are left to the next daemon as soon as the drain begins; without,
    they are answered until it is over.
    """

    def __init__(
        self,
        daemon: Served,
        server: Server,
        notifier: Notifier,
        sockets: Sequence[socket.socket] = (),
        *,
        drain_seconds: float,
        front_ends: ServedBeside | None = None,
    ) -> None:
        self._daemon = daemon
        self._front_ends = front_ends
        self._server = server
        self._notifier = notifier
        self._sockets = list(sockets)
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._failed = False

    def fail(self, error: BaseException) -> None:
        """The daemon cannot go on."""
        log.critical("the daemon cannot go on", exc_info=error)
        self._failed = True
        self._server.should_exit = True

    async def run(self) -> int:
        """From the start to the end; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end)
        self._daemon.start()
        if self._front_ends is not None:
            self._front_ends.start()
        telling = loop.create_task(self._tell())
        try:
            await self._server.serve(sockets=self._sockets or None)
        finally:
            self._notifier.tell(STOPPING=1, STATUS="ending the workers")
            if self._front_ends is not None:
                await self._front_ends.stop(0 if self._server.force_exit else GRACE_SECONDS)
            await self._daemon.stop()
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        return 1 if self._failed or not self._server.started else 0

    def end(self) -> None:
        """Begin to end, or end at once if that was begun."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain())
        elif self._ending is None:
            log.warning("ending at once, as a second signal came")
            self._draining.cancel()
            self._server.force_exit = True
            self._ending = loop.create_task(self._give_up())

    async def _drain(self) -> None:
        self._notifier.tell(STOPPING=1, STATUS="draining: what runs may end")
        if self._server.listening.is_set() and self._sockets:
            self._server.stop_accepting()
        if self._front_ends is not None:
            self._front_ends.drain()
        await self._daemon.drain(self._drain_seconds)
        self._server.should_exit = True

    async def _give_up(self) -> None:
        await self._daemon.drain(0)
        self._server.should_exit = True

    async def _tell(self) -> None:
        """Tell the manager when we listen, and from then on that we live while we do."""
        await self._server.listening.wait()
        self._notifier.tell(READY=1, STATUS=self._daemon.summary())
        if not self._notifier.listened_to:
            return
        bound = self._notifier.watchdog_seconds
        pause = STATUS_SECONDS if bound is None else min(STATUS_SECONDS, bound / 3)
        while True:
            if self._draining is not None:
                self._notifier.tell(WATCHDOG=1)
            elif self._daemon.progresses():
                self._notifier.tell(WATCHDOG=1, STATUS=self._daemon.summary())
            else:
                self._notifier.tell(STATUS=f"no progress: {self._daemon.summary()}")
            await asyncio.sleep(pause)
