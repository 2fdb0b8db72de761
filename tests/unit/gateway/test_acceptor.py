"""Connections are routed by the path of their first request, however its first line comes."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from appliance.daemon.lifecycle import Server
from appliance.gateway import acceptor
from appliance.gateway.acceptor import Acceptor, listen_at
from appliance.gateway.request_lines import NOT_HTTP, PEEK_BYTES, body_bytes, path_of
from appliance.http.connections import Connection
from appliance.http.crowd import Crowd, descriptors_in_use
from appliance.http.errors import ApiError
from appliance.platform.tls import LiveTls, Pair, read_pair
from appliance.service.front_frames import LARGE_BYTES, Handover
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.certificates import certify

MOMENT = 0.02
LONG = 1000.0
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


class FrontEndsDouble:
    """Takes connections while it has room, unread, and keeps them."""

    def __init__(self, *, room: bool = True) -> None:
        self.room = room
        self.refusal: ApiError | None = None
        self.handed: asyncio.Queue[tuple[socket.socket, Handover]] = asyncio.Queue()
        self.asked = asyncio.Event()
        self._tell: Callable[[], None] = lambda: None

    def hand(self, connection: socket.socket, handover: Handover, *, operator: bool) -> bool:
        self.asked.set()
        if self.refusal is not None:
            raise self.refusal
        if self.room:
            self.handed.put_nowait((connection.dup(), handover))
        return self.room

    def on_room(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def news(self) -> None:
        """There is room, or a refusal, from now on."""
        self.room = True
        self._tell()


async def core(scope: Any, receive: Any, send: Any) -> None:
    """Says which path it answers."""
    body = json.dumps({"core": scope["path"]}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Client:
    """A raw connection to the core."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """The only answer of the connection, which is closed then: status and JSON."""
        head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head.lower()
        found: dict[str, Any] = json.loads(body)
        return int(head.split()[1]), found

    async def read(self, count: int = -1) -> bytes:
        return await self._reader.read(count)

    def end(self) -> None:
        """Send no more."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


class House:
    """A server before front ends."""

    def __init__(self, server: Server, fronts: FrontEndsDouble, port: int) -> None:
        self.server = server
        self.fronts = fronts
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, first: bytes = b"", trust: ssl.SSLContext | None = None) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=trust))
        client.send(first)
        self.clients.append(client)
        return client


@asynccontextmanager
async def serving(
    fronts: FrontEndsDouble | None = None, tls: LiveTls | None = None, **limits: Any
) -> AsyncIterator[House]:
    """Waits for clients as long as `limits` say, else as good as for ever."""
    fronts = fronts or FrontEndsDouble()
    patient: dict[str, Any] = {"head_seconds": LONG, "wait_seconds": LONG} | limits
    config = uvicorn.Config(
        core,
        http=Connection,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
    with pytest.MonkeyPatch.context() as patch:
        kept = Acceptor.__init__
        patch.setattr(Acceptor, "__init__", lambda *args: kept(*args, **patient))
        server = Server(config, fronts)
        async with asyncio.timeout(PATIENCE_SECONDS):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                serving = asyncio.create_task(server.serve([listener]))
                await server.listening.wait()
                house = House(server, fronts, listener.getsockname()[1])
                yield house
                for client in house.clients:
                    client.close()
                server.force_exit = server.should_exit = True
                await serving
    while not fronts.handed.empty():
        fronts.handed.get_nowait()[0].close()


# --- the first line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "path"),
    [
        (b"", None),
        (b"POS", None),
        (b"POST ", None),
        (b"POST /v1/chat", None),
        (b"POST /v1/chat ", "/v1/chat"),
        (b"\r\n\r\nPOST /v1/chat?a=b", "/v1/chat"),
        (b"GET /a%2Fb%20c HTTP/1.1", "/a/b c"),
        (b"GET http://x:80/v1/models HTTP/1.1", "/v1/models"),
        (b"GET /\r\n", "/"),
        (b"OPTIONS * HTTP/1.1", "*"),
        (b"GET  /", NOT_HTTP),
        (b"nonsense\r\n", NOT_HTTP),
        (b"\x16\x03\x01" + b"a" * 40, NOT_HTTP),
        (b"\r\n" * PEEK_BYTES, NOT_HTTP),
        (b"GET /" + b"a" * PEEK_BYTES, NOT_HTTP),
        (b"GET /" + b"a" * 1000, None),
    ],
)
def test_the_path_of_the_first_bytes(begin: bytes, path: str | None) -> None:
    """It is known as soon as it ends; what is no request has none."""
    assert path_of(begin) == path


@pytest.mark.parametrize(
    ("begin", "size"),
    [
        (CHAT, 2),
        (b"POST / HTTP/1.1\r\nCONTENT-LENGTH:8388608\r\nHost: x\r\n\r\n", 8 << 20),
        (b"POST / HTTP/1.1\nContent-Length: 7\n\n", 7),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nX-Content-Length: 5\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n\r\nContent-Length: 9\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\n", 0),
    ],
)
def test_the_size_of_the_first_body(begin: bytes, size: int) -> None:
    """As far as the first bytes say it."""
    assert body_bytes(begin) == size


# --- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES])
async def test_a_large_body_is_reported(size: int) -> None:
    """Before it comes."""
    async with serving() as house:
        await house.connect(CHAT.replace(b"h: 2", b"h: %d" % size))

        connection, handover = await house.fronts.handed.get()

        assert handover.large is (size >= LARGE_BYTES)
        connection.close()


async def test_a_front_end_gets_a_connection_unread() -> None:
    """With the addresses of both ends."""
    async with serving() as house:
        await house.connect(CHAT)

        connection, handover = await house.fronts.handed.get()

        with connection:
            assert connection.recv(1 << 16) == CHAT
            assert handover.client == connection.getpeername()
        assert handover.server == ("127.0.0.1", house.port)
        assert (handover.scheme, handover.received) == ("http", b"")


async def test_the_first_line_comes_in_pieces() -> None:
    """It is looked at until the path is there, and stays unread."""
    async with serving() as house:
        client = await house.connect(CHAT[:10])
        while not house.server.acceptor.undecided:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        for at in range(10, 30):
            client.send(CHAT[at : at + 1])
            await asyncio.sleep(0)
        client.send(CHAT[30:])

        connection, _ = await house.fronts.handed.get()

        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            received = b""
            while len(received) < len(CHAT):
                received += await asyncio.to_thread(connection.recv, 1 << 16)
        assert received == CHAT


async def test_the_core_answers_once() -> None:
    """Its answer closes the connection."""
    async with serving() as house:
        client = await house.connect(LIVE + LIVE)

        assert await client.answer() == (200, {"core": "/livez"})
        assert house.fronts.handed.empty()


async def test_what_is_no_http_is_the_cores() -> None:
    """It says so."""
    async with serving() as house:
        client = await house.connect(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = await client.answer()

    assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_who_says_nothing_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is closed without a word; who began to hears 408."""
    monkeypatch.setattr(acceptor, "LEAST_HEAD_SECONDS", MOMENT)
    async with serving(head_seconds=MOMENT) as house:
        silent, slow = await house.connect(), await house.connect(b"GET /li")

        assert await silent.read() == b""
        status, body = await slow.answer()

    assert (status, body["error"]["code"]) == (408, "slow")


async def test_who_leaves_before_a_request() -> None:
    """Is forgotten."""
    async with serving() as house:
        client = await house.connect()
        while not house.server.acceptor.undecided:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        client.close()
        while house.server.acceptor.undecided:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- when no front end can -----------------------------------------------------------------------


async def test_a_client_that_leaves_within_its_first_line() -> None:
    """What it sent hides its end from a look; its connection is closed all the same."""
    async with serving() as house:
        client = await house.connect(b"POST /v1/chat/comp")
        client.end()

        assert await client.read() == b""
        assert house.server.acceptor.undecided == 0
        assert house.fronts.handed.empty()


async def test_connections_wait_in_order() -> None:
    """Until there is room; the core's are answered meanwhile."""
    async with serving(FrontEndsDouble(room=False)) as house:
        clients = []
        for _ in range(3):
            house.fronts.asked.clear()
            clients.append(await house.connect(CHAT))
            if len(clients) == 1:
                await house.fronts.asked.wait()
        other = await house.connect(LIVE)
        assert (await other.answer())[0] == 200

        house.fronts.news()

        handed = [await house.fronts.handed.get() for _ in clients]
        numbers = [handover.connection for _, handover in handed]
        for connection, _ in handed:
            connection.close()
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"wait_seconds": MOMENT}, "none was ready"), ({"max_waiting": 0}, "0 requests wait")],
)
async def test_one_that_waits_too_long(limits: dict[str, float], reason: str) -> None:
    """Or with too many others: it is refused, and may try again."""
    async with serving(FrontEndsDouble(room=False), **limits) as house:
        client = await house.connect(CHAT)
        answer = await client.read()

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: 5\r\n" in answer.lower()
    assert reason.encode() in answer


async def test_what_waits_is_refused_when_all_end() -> None:
    """In the words of the path's dialect."""
    async with serving(FrontEndsDouble(room=False)) as house:
        client = await house.connect(CHAT.replace(b"/v1/chat/completions", b"/api/chat"))
        await house.fronts.asked.wait()

        house.fronts.refusal = ApiError(503, "it is over", code="shutting_down")
        house.fronts.news()

        assert await client.answer() == (503, {"error": "it is over"})


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path) -> tuple[LiveTls, ssl.SSLContext]:
    """What a server speaks, and a client that trusts it."""
    certificate, key = certify(tmp_path, "box")
    pair = read_pair(certificate, key)
    assert isinstance(pair, Pair)
    return LiveTls(pair), ssl.create_default_context(cafile=certificate)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_is_pumped_is_not_kept(
    tls: tuple[LiveTls, ssl.SSLContext], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A client that does not read stops who writes at the other end; all of it comes when it
    does."""

    async def case() -> None:
        async with serving(tls=tls[0]) as house:
            client = await house.connect(CHAT, tls[1])
            connection, handover = await house.fronts.handed.get()
            with connection:
                assert handover.scheme == "https"
                connection.settimeout(PATIENCE_SECONDS)
                begin = await asyncio.to_thread(connection.recv, len(CHAT), socket.MSG_WAITALL)
                assert begin == CHAT
                sent = await asyncio.get_running_loop().run_in_executor(
                    None, connection.sendall, b"a" * 1000
                )
                assert sent is None
                assert await client.read(1000) == b"a" * 1000
                many = b"b" * (64 << 20)
                writing = asyncio.get_running_loop().run_in_executor(None, connection.sendall, many)
                client._reader._transport.pause_reading()  # type: ignore[attr-defined]
                _, unwritten = await asyncio.wait({writing}, timeout=MOMENT)
                assert unwritten
                client._reader._transport.resume_reading()  # type: ignore[attr-defined]
                got = 0
                while got < len(many):
                    got += len(await client.read(1 << 20))
                await writing
            assert await client.read() == b""  # the front end closed

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(case())


async def test_a_client_that_leaves_is_reported(tls: tuple[LiveTls, ssl.SSLContext]) -> None:
    """The front end's end of the pair ends."""
    async with serving(tls=tls[0]) as house:
        client = await house.connect(CHAT, tls[1])
        connection, _ = await house.fronts.handed.get()
        client.close()
        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            received = b""
            while data := await asyncio.to_thread(connection.recv, 1 << 16):
                received += data

    assert received == CHAT


async def test_what_speaks_no_tls(tls: tuple[LiveTls, ssl.SSLContext]) -> None:
    """Is closed, and others are served."""
    async with serving(tls=tls[0]) as house:
        plain = await house.connect(LIVE)
        await plain.read()
        client = await house.connect(LIVE, tls[1])

        assert (await client.answer())[0] == 200


# --- listening -----------------------------------------------------------------------------------


def test_a_port_is_listened_at() -> None:
    """Of every address of a name; one that is taken is told of."""
    (listener,) = listen_at("127.0.0.1", 0, 10)
    with listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        with pytest.raises(OSError, match="in use"):
            listen_at("127.0.0.1", listener.getsockname()[1], 10)


# --- too many connections ------------------------------------------------------------------------


async def test_connections_without_a_request_give_way() -> None:
    """However many half-sent requests there are, a whole one is answered."""
    clients = 80
    most = descriptors_in_use() + clients + 30
    async with serving(most_in_use=most) as house:
        silent = [await house.connect() for _ in range(clients // 2)]
        for _ in range(clients // 2):
            await house.connect(b"GET /livez HTTP/1.1\r\nHost:")
        assert await silent[0].read() == b"", "the oldest is closed"
        client = await house.connect(LIVE)
        assert await client.answer() == (200, {"core": "/livez"})
        assert descriptors_in_use() <= most + 4

        await house.connect(CHAT)
        connection, _ = await house.fronts.handed.get()
        assert connection.recv(1000, socket.MSG_PEEK) == CHAT
        connection.close()


async def test_operators_are_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is any of theirs refused."""
    monkeypatch.setattr(Connection, "for_operators", True)
    async with serving(most_in_use=1) as house:
        clients = [await house.connect() for _ in range(20)]
        for client in clients:
            client.send(LIVE)
        for client in clients:
            assert (await client.answer())[0] == 200


async def test_where_all_have_a_request_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are accepted as soon as there are descriptors again."""
    in_use = 10
    counted = asyncio.Event()

    def count() -> int:
        counted.set()
        return in_use

    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", MOMENT)
    monkeypatch.setattr(acceptor, "Crowd", lambda most: Crowd(most, in_use=count))
    async with serving(most_in_use=10) as house:
        late = await house.connect(LIVE)
        for _ in range(3):
            counted.clear()
            await counted.wait()
        assert house.server.acceptor.undecided == 0
        in_use = 9
        assert await late.answer() == (200, {"core": "/livez"})


async def test_handshakes_that_do_not_end_give_way(
    tls: tuple[LiveTls, ssl.SSLContext],
) -> None:
    """Under TLS, too."""
    async with serving(tls=tls[0], most_in_use=descriptors_in_use() + 90) as house:
        silent = [await house.connect() for _ in range(60)]
        client = await house.connect(LIVE, trust=tls[1])
        assert await client.answer() == (200, {"core": "/livez"})
        assert await silent[0].read() == b""
