"""Front ends as processes: fed with connections, replaced when they die, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
import uvloop

from appliance import framing
from appliance.api.operator_socket import OperatorProtocol
from appliance.daemon.lifecycle import Server
from appliance.forking.zygote import check_threads
from appliance.gateway.supervisor import FrontEndProcess, Patience, Supervisor
from appliance.http.connections import Connection
from appliance.http.errors import ApiError
from appliance.platform.admin_socket import open_socket
from appliance.platform.tls import LiveTls, Pair, read_pair
from appliance.service.front_frames import LARGE_BYTES, Down, Handover, Hello, Pong, Ready, Up
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles import front_end as front_end_double
from tests.unit.doubles.certificates import certify
from tests.unit.doubles.loop_clock import movable_clock

SLOW_SECONDS = 60.0
QUICK = Patience(ping_seconds=0.01, slow_seconds=SLOW_SECONDS, unanswered_pings=1_000_000)
"""A front end that owes an answer is found slow when a test moves the clock: no process of this
machine that is kept waiting for a moment."""
IMPATIENT = Patience(ping_seconds=0.01, slow_seconds=SLOW_SECONDS, unanswered_pings=1000)
SILENT = Patience(ping_seconds=1e6, slow_seconds=1e6, unanswered_pings=1_000_000)
"""Front ends do not say what they have."""
CHAT = "/v1/chat/completions"


class SessionDouble:
    """Welcomes a front end, and remembers what became of it."""

    def __init__(self, send: Callable[[Down], None], is_operator: Callable[[int], bool]) -> None:
        self.is_operator = is_operator
        self.pid = 0
        self.pongs = 0
        self.drains = 0
        self.over = False
        self.streams: dict[int, tuple[socket.socket, bytes]] = {}
        self._send = send

    def received(self, frame: Up, /) -> None:
        if isinstance(frame, Hello):
            self.pid = frame.pid
            self._send(front_end_double.WELCOME)
        elif isinstance(frame, Pong):
            self.pongs += 1

    def stream_begun(self, call: int, connection: socket.socket, ending: bytes, /) -> None:
        assert not self.over
        self.streams[call] = (connection, ending)

    def drained(self) -> None:
        self.drains += 1

    def lost(self) -> None:
        self.over = True
        for connection, _ in self.streams.values():
            connection.close()


class House:
    """A core with front ends, and a client of it."""

    def __init__(self, supervisor: Supervisor, sessions: list[SessionDouble], url: str) -> None:
        self.supervisor = supervisor
        self.sessions = sessions
        self.url = url

    async def ask(self, path: str = CHAT, **more: Any) -> dict[str, Any]:
        """On a connection of its own."""
        async with self.client() as client:
            answer: dict[str, Any] = (await client.post(path, **more)).json()
            return answer

    def client(self, **more: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_SECONDS, **more)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():  # noqa: ASYNC110 - processes tell of themselves when they like
                await asyncio.sleep(0.005)

    async def answers_pings(self, pid: int) -> None:
        """Return when this front end has answered a ping that was sent since: so was one to each of
        the others."""
        (session,) = (one for one in self.sessions if one.pid == pid)
        before = session.pongs
        # The first answer may be to a ping that was on its way.
        await self.until(lambda: session.pongs >= before + 2)

    async def pids(self, count: int) -> list[int]:
        """Of the front ends that live, when there are so many."""
        await self.until(lambda: sum(self._lives(one) for one in self.sessions) == count)
        await self.until(lambda: self.supervisor.ready == count)
        return [one.pid for one in self.sessions if self._lives(one)]

    def _lives(self, session: SessionDouble) -> bool:
        return bool(session.pid) and not session.over


async def core(scope: Any, receive: Any, send: Any) -> None:
    """Answers what is the core's."""
    known = {"core": scope["path"], "client": scope["client"], "scheme": scope["scheme"]}
    known["operator"] = bool(scope.get("appliance.operator"))
    body = json.dumps(known).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(
    count: int = 1,
    patience: Patience = QUICK,
    *,
    tls: LiveTls | None = None,
    kind: type[Connection] = Connection,
    listener: socket.socket | None = None,
) -> AsyncIterator[House]:
    sessions: list[SessionDouble] = []

    def open_session(
        send: Callable[[Down], None], is_operator: Callable[[int], bool]
    ) -> SessionDouble:
        sessions.append(SessionDouble(send, is_operator))
        return sessions[-1]

    supervisor = Supervisor(
        count, open_session, command=front_end_double.COMMAND, patience=patience
    )
    config = uvicorn.Config(
        core,
        http=kind,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
    server = Server(config, supervisor)
    with listener or socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        await server.listening.wait()
        supervisor.on_given_back = server.acceptor.take_back
        supervisor.start()
        name = listening.getsockname()
        url = "http://core"
        if isinstance(name, tuple):
            url = f"http{'s' if tls else ''}://127.0.0.1:{name[1]}"
        try:
            yield House(supervisor, sessions, url)
        finally:
            await supervisor.stop(0)
            server.should_exit = True
            await serving


async def test_a_path_decides_who_answers() -> None:
    """Front ends answer theirs, with the client's address; the core answers the others, and closes
    the connection, so that its next request is routed anew."""
    async with serving() as house, house.client() as client:
        (pid,) = await house.pids(1)

        theirs = await client.post(CHAT, content="x" * 1000)
        address = theirs.extensions["network_stream"].get_extra_info("client_addr")
        ours = await client.get("/livez")

    assert (theirs.json()["pid"], theirs.json()["path"]) == (pid, CHAT)
    assert theirs.json()["client"] == list(address)
    assert (theirs.json()["scheme"], theirs.json()["body"]) == ("http", "x" * 1000)
    assert ours.json()["core"] == "/livez"
    assert ours.headers["connection"] == "close"


async def test_a_front_end_gives_back_what_is_the_cores() -> None:
    """A later request of the same connection: the core answers it, to the same client."""
    async with serving() as house, house.client() as client:
        theirs = await client.post(CHAT)
        ours = await client.get("/livez")

    assert ours.json()["core"] == "/livez"
    assert ours.json()["client"] == theirs.json()["client"]


async def test_connections_wait_for_the_first_front_end() -> None:
    """Which takes a while to start; the core answers meanwhile."""
    async with serving() as house:
        early = asyncio.create_task(house.ask())
        assert house.supervisor.not_ready() == "no front end is ready"
        assert (await house.ask("/livez"))["core"] == "/livez"

        (pid,) = await house.pids(1)

        assert (await early)["pid"] == pid
        assert house.supervisor.not_ready() is None


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_https(tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The core decrypts; front ends know that the client spoke TLS, and who it is. On either event
    loop."""

    async def ask() -> None:
        certificate, key = certify(tmp_path, "box")
        pair = read_pair(certificate, key)
        assert isinstance(pair, Pair)
        trust = ssl.create_default_context(cafile=certificate)
        big = "y" * (1 << 20)
        async with (
            serving(tls=LiveTls(pair)) as house,
            house.client(verify=trust) as client,
        ):
            theirs = (await client.post(CHAT, content=big)).json()
            given_back = (await client.get("/livez")).json()
            ours = (await client.get("/livez")).json()

        assert (theirs["scheme"], theirs["body"]) == ("https", big)
        assert theirs["client"][0] == "127.0.0.1"
        assert given_back == {**ours, "client": theirs["client"]}
        assert (ours["core"], ours["scheme"]) == ("/livez", "https")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())


async def test_operators_are_known_on_either_side(tmp_path: Path) -> None:
    """A connection of the admin socket is an operator's for the session, and for the core."""
    path = tmp_path / "admin.sock"
    async with serving(kind=OperatorProtocol, listener=open_socket(path)) as house:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with house.client(transport=transport) as client:
            theirs = (await client.post(CHAT)).json()
            ours = (await client.get("/livez")).json()

        (session,) = house.sessions
        assert session.is_operator(theirs["connection"])
        assert not session.is_operator(theirs["connection"] + 1)
        assert (theirs["client"], ours["operator"]) == (None, True)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 1), (3, 2), (4, 2)])
async def test_large_bodies_keep_to_half_of_the_front_ends(count: int, kept: int) -> None:
    """So that others are answered at once."""
    large, small = "x" * LARGE_BYTES, "x" * 1000
    async with serving(count, SILENT) as house:
        await house.pids(count)

        busy = {(await house.ask(content=large))["pid"] for _ in range(2 * count)}
        others = {(await house.ask(content=small))["pid"] for _ in range(8 * count)}

        assert len(busy) == kept
        assert len(others) == max(1, count - kept)
        assert count == 1 or not busy & others


async def test_one_that_hangs_gets_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others answer, and so does the core; when all hang, the next connection still has one."""
    move = movable_clock(monkeypatch)
    async with serving(2) as house:
        stuck, well = await house.pids(2)
        os.kill(stuck, signal.SIGSTOP)
        await house.answers_pings(well)
        move(SLOW_SECONDS + 1)
        await house.until(lambda: house.supervisor.slow == 1)

        answers = [await house.ask() for _ in range(8)]
        alive = await house.ask("/livez")

        assert {answer["pid"] for answer in answers} == {well}
        assert alive["core"] == "/livez"

        os.kill(well, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_SECONDS  # the loop's own clock is moved
        while house.supervisor.slow < 2:
            assert time.monotonic() < deadline
            move(SLOW_SECONDS + 1)
            await asyncio.sleep(0.02)
        late = asyncio.create_task(house.ask())
        await house.ask("/livez")
        os.kill(stuck, signal.SIGCONT)
        os.kill(well, signal.SIGCONT)

        assert (await late)["pid"] in (stuck, well)


async def test_one_that_hangs_for_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed."""
    move = movable_clock(monkeypatch)
    async with serving(1, IMPATIENT) as house:
        (stuck,) = await house.pids(1)
        os.kill(stuck, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_SECONDS  # the loop's own clock is moved
        while not house.sessions[0].over:
            assert time.monotonic() < deadline
            move(IMPATIENT.ping_seconds)
            await asyncio.sleep(0)

        (other,) = await house.pids(1)

        assert other != stuck
        assert (await house.ask())["pid"] == other
        assert house.supervisor.restarts == 1


async def test_one_that_starts_slowly_may_take_longer() -> None:
    """What it owed while it imported does not count once it is ready; what it owes then does."""
    patience = Patience(unanswered_pings=3, starting_pings=8)
    handover, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handover.setblocking(False)
    ours, frames = socket.socketpair()
    process = FrontEndProcess(
        1, handover, SessionDouble, lambda: None, lambda connection, about: connection.close()
    )
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(lambda: process, ours)
    child = await asyncio.create_subprocess_exec("sleep", "600")
    process.forked(os.pidfd_open(child.pid))
    try:
        for _ in range(6):
            process.ping(patience)
        process.data_received(framing.encode(Ready()))
        for _ in range(3):
            process.ping(patience)
        assert not transport.is_closing()

        process.ping(patience)

        assert transport.is_closing()
        assert await asyncio.wait_for(child.wait(), PATIENCE_SECONDS) == -signal.SIGKILL
    finally:
        theirs.close()
        frames.close()
        await process.over.wait()


async def test_a_connection_that_comes_back_is_inherited_by_no_process() -> None:
    """A worker that had it would keep it open: its client would wait for an end that never comes.
    uvloop closes no descriptors in the processes that it starts."""
    handover, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handover.setblocking(False)
    back: asyncio.Queue[socket.socket] = asyncio.Queue()
    FrontEndProcess(1, handover, SessionDouble, lambda: None, lambda one, _: back.put_nowait(one))
    client, connection = socket.socketpair()
    with theirs, client, connection:
        about = Handover(connection=1, client=None, server=None, received=b"GET /livez HTTP/1.1")
        socket.send_fds(theirs, [msgspec.msgpack.encode(about)], [connection.fileno()])
        with await asyncio.wait_for(back.get(), PATIENCE_SECONDS) as given_back:
            assert not os.get_inheritable(given_back.fileno())
    asyncio.get_running_loop().remove_reader(handover)
    handover.close()


async def test_one_that_dies_ends_its_connections_and_no_others() -> None:
    """A new one is there at once. Before, the session hears of every stream that had begun."""
    async with serving(2) as house:
        first, second = await house.pids(2)
        async with (
            house.client() as client,
            client.stream("POST", front_end_double.ENDLESS) as answer,
        ):
            busy = int(answer.headers["x-pid"])

            os.kill(busy, signal.SIGKILL)

            with pytest.raises(httpx.TransportError):
                await answer.aread()
        await house.until(lambda: any(one.over for one in house.sessions))
        (died,) = (one for one in house.sessions if one.over)
        assert [ending for _, ending in died.streams.values()] == [front_end_double.ENDING]
        pids = await house.pids(2)

        assert busy not in pids
        assert len({first, second} & set(pids)) == 1
        assert (await house.ask())["pid"] in pids


async def test_a_front_end_whose_socket_is_full() -> None:
    """Takes no more until it was heard of again; what comes waits, and is lost nowhere."""
    async with serving(1) as house:
        (pid,) = await house.pids(1)
        os.kill(pid, signal.SIGSTOP)
        ends: list[socket.socket] = []
        handed = 0
        try:
            while True:
                ours, theirs = socket.socketpair()
                handover = Handover(connection=10**9 + handed, client=None, server=None)
                taken = house.supervisor.hand(theirs, handover, operator=False)
                theirs.close()
                ends.append(ours)
                if not taken:
                    break
                handed += 1
            late = asyncio.create_task(house.ask())
            await house.ask("/livez")
            assert not late.done()
        finally:
            for end in ends:
                end.close()
        os.kill(pid, signal.SIGCONT)

        assert (await late)["pid"] == pid
        assert handed > 0


async def test_a_drain_lets_answers_end() -> None:
    """Front ends end when they have answered; none is started, and what comes is refused."""
    async with serving(2) as house:
        await house.pids(2)
        async with (
            house.client() as client,
            client.stream("POST", front_end_double.ENDLESS) as answer,
        ):
            house.supervisor.drain()
            house.supervisor.drain()

            assert [one.drains for one in house.sessions] == [1, 1]
            refused = await client.post(CHAT)
            await house.until(lambda: sum(one.over for one in house.sessions) == 1)
            await house.supervisor.stop(0)

            with pytest.raises(httpx.TransportError):
                await answer.aread()
        assert len(house.sessions) == 2
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        handover = Handover(connection=1, client=None, server=None)
        with socket.socket() as late, pytest.raises(ApiError):
            house.supervisor.hand(late, handover, operator=False)


async def test_what_cannot_start_is_reported() -> None:
    """Readiness says that attempts failed."""
    supervisor = Supervisor(
        1, lambda *_: SessionDouble(*_), command=(sys.executable, "-c", "raise SystemExit(1)")
    )
    supervisor.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "failed" not in (supervisor.not_ready() or ""):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await supervisor.stop(0)


def test_a_process_with_threads_is_not_forked() -> None:
    """What a thread holds would stay held in the fork."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="cannot fork, as there are other threads: "):
            check_threads()
    finally:
        over.set()
        thread.join()
