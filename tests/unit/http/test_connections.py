"""Clients that dawdle over a real connection: they lose it, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from appliance.http.connections import Connection
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.serving import served

MOMENT = 0.02
LONG = 1000.0

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
CHUNK = b"hello " * 200


class App:
    """Answers with the body of a request when it is `let`; `/nowhere` is answered unread. Of a
    `/stream` chunks are sent as long as the client takes them, or until it is `let` end."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.asked = asyncio.Event()
        self.held = asyncio.Event()
        """A stream waits until its client reads."""
        self.lost = asyncio.Event()
        """The client of a stream left."""
        self.sent = 0
        """Chunks of streams."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/nowhere":
            await self._answer(send, 404, b"")
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.asked.set()
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        if scope["path"] == "/later":
            await self.let.wait()
        await self._answer(send, 200, body if scope["path"] != "/big" else b"b" * (16 << 20))

    async def _answer(self, send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, receive: Any, send: Any) -> None:
        left = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not (left.done() or self.let.is_set()):
            sending = asyncio.ensure_future(
                send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            )
            await asyncio.sleep(0)
            if not sending.done():
                self.held.set()
            await sending
            self.sent += 1
        if left.done():
            self.lost.set()
        else:
            await send({"type": "http.response.body", "body": b"end"})
            await left


@asynccontextmanager
async def connected(
    app: Any = None, **limits: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server that waits for clients as long as `limits` say, else as good
    as for ever."""
    patient = {"head_seconds": LONG, "body_seconds": LONG, "unread_seconds": LONG}
    http = type("Tested", (Connection,), patient | limits)
    async with asyncio.timeout(PATIENCE_SECONDS), served(app or App(), http) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


def refusal(answer: bytes) -> tuple[int, Any]:
    """The status, and the body, of an answer that is the last one of its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/json" in head
    assert b"\r\nx-request-id: " in head
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("begin", [b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"P", b"\r\n"])
async def test_a_head_that_does_not_end(begin: bytes) -> None:
    """Is answered with 408, and the connection closed."""
    async with connected(head_seconds=MOMENT) as (reader, writer):
        writer.write(begin)
        status, body = refusal(await reader.read())

    assert (status, body["error"]["code"]) == (408, "slow")


async def test_a_connection_on_which_nothing_comes() -> None:
    """Is closed without a word."""
    async with connected(head_seconds=MOMENT) as (reader, _):
        assert await reader.read() == b""


async def test_empty_lines_behind_a_request() -> None:
    """Are no request: whoever sends nothing else loses the connection."""
    async with connected(head_seconds=MOMENT) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        await reader.read()


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/completions", ("error", "message")),
        ("/v1/messages", ("error", "message")),
        ("/api/chat", ("error",)),
    ],
)
async def test_a_body_that_stalls(path: str, where: tuple[str, ...]) -> None:
    """Is told in the words of its dialect."""
    async with connected(body_seconds=MOMENT) as (reader, writer):
        writer.write(HEAD % (path.encode(), 100) + b'{"model"')
        status, body = refusal(await reader.read())
    for name in where:
        body = body[name]

    assert (status, body) == (408, "the request's body did not come in time")


async def test_a_body_that_stalls_behind_its_answer() -> None:
    """Is no reason to answer twice."""
    async with connected(body_seconds=MOMENT) as (reader, writer):
        writer.write(HEAD % (b"/nowhere", 100) + b"{")
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_body_that_is_answered_early(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Is read to its end before the connection is closed, so that the client sees the answer; what
    stands behind it is no request."""

    def post(port: int) -> bytes:
        size = 16 << 20
        head = HEAD.replace(b"Host", b"Connection: close\r\nHost") % (b"/nowhere", size)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + b"b" * size + LAST)
            answer = b""
            while data := client.recv(1 << 16):
                answer += data
        return answer

    async def case() -> bytes:
        async with asyncio.timeout(PATIENCE_SECONDS), served(App()) as port:
            return await asyncio.to_thread(post, port)

    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(case())

    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


class Watched(Connection):
    """Tells how often it found that time was over."""

    head_seconds = LONG
    body_seconds = MOMENT
    body_bytes = 0
    looked = 0
    enough = 0
    on_enough: Callable[[], None]

    def _look(self) -> None:
        super()._look()
        Watched.looked += 1
        if Watched.looked == Watched.enough:
            Watched.on_enough()


async def test_a_body_that_comes_slowly() -> None:
    """Is waited for, as long as enough of it comes each time."""
    body = json.dumps({"model": "small", "prompt": "hello"}).encode()
    seen = asyncio.Event()
    Watched.looked, Watched.enough, Watched.on_enough = 0, 3, staticmethod(seen.set)
    async with asyncio.timeout(PATIENCE_SECONDS), served(App(), Watched) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % (b"/v1/completions", len(body)) + body[:5])
        await seen.wait()
        writer.write(body[5:])
        status = await reader.readline()
        writer.close()

    assert status == b"HTTP/1.1 200 OK\r\n"


async def test_a_request_that_is_answered_takes_its_time() -> None:
    """An answer may take longer than a head, also if another head has begun behind it."""
    app = App()
    seen = asyncio.Event()
    Watched.looked, Watched.enough, Watched.on_enough = 0, 3, staticmethod(seen.set)
    hasty = type("Hasty", (Watched,), {"head_seconds": MOMENT})
    async with asyncio.timeout(PATIENCE_SECONDS), served(app, hasty) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % (b"/later", 2) + b"{}GET /li")
        await seen.wait()
        app.let.set()
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer  # behind the answer, for what has begun


class Heard(Connection):
    """Tells when something came."""

    around_bytes = 500
    came: asyncio.Event

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Heard.came.set()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /livez HTTP/1.1\r\nX: ", b"a" * 501),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"e" * 501),
    ],
)
async def test_too_much_with_a_body(begin: bytes, more: bytes) -> None:
    """A head without an end, or what stands between chunks, is not kept."""
    Heard.came = asyncio.Event()
    async with asyncio.timeout(PATIENCE_SECONDS), served(App(), Heard) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        await Heard.came.wait()
        writer.write(more)
        status, body = refusal(await reader.read())
        writer.close()

    assert (status, body["error"]["code"]) == (431, "head_too_large")


async def test_what_is_no_http() -> None:
    """Is refused in JSON, like everything else."""
    async with connected() as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = refusal(await reader.read())

    assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_no_other_protocol_is_spoken() -> None:
    """Who asks for one is answered in HTTP."""
    async with connected() as (reader, writer):
        writer.write(
            b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
        )
        status = await reader.readline()

    assert status == b"HTTP/1.1 200 OK\r\n"


OFFER = (
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)
"""As Java's client sends it."""
TOKENIZE = json.dumps({"model": "small", "prompt": "hello"}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(TOKENIZE) + TOKENIZE
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    TOKENIZE[:5],
    len(TOKENIZE) - 5,
    TOKENIZE[5:],
)
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (OFFER + LENGTH, 1),
        (OFFER + CHUNKS, 1),
        (2 * (OFFER + LENGTH + OFFER + CHUNKS), 4),
    ],
    ids=["length", "chunks", "pipelined"],
)
@pytest.mark.parametrize("piece", [1 << 16, 7, 1], ids=["whole", "pieces", "bytes"])
async def test_a_body_behind_an_offer_of_another_protocol(
    sent: bytes, answers: int, piece: int
) -> None:
    """Is read, however it is sent, and no byte of it is taken for another request."""
    ended = asyncio.Event()

    class Pieces(Connection):
        def data_received(self, data: bytes) -> None:
            for at in range(0, len(data), piece):
                super().data_received(data[at : at + piece])

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    async with asyncio.timeout(PATIENCE_SECONDS), served(App(), Pieces) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent + LAST)
        answer = await reader.read()
        writer.close()
        await ended.wait()

    found = [one.partition(b"\r\n\r\n") for one in answer.split(b"HTTP/1.1 ")[1:]]
    assert [head[:3] for head, _, _ in found] == [b"200"] * (answers + 1)
    assert all(body == TOKENIZE for _, _, body in found[:-1])


async def test_connect() -> None:
    """Is refused by name, and what is behind it is no request."""
    async with connected() as (reader, writer):
        writer.write(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n" + LAST)
        answer = await reader.read()

    status, body = refusal(answer)
    assert (status, body["error"]["code"]) == (405, "not_a_proxy")
    assert b"\r\nallow: \r\n" in answer


class Narrow(Connection):
    """Of what is sent the system takes little."""

    unread_seconds = MOMENT

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("what", ["stream", "answer"])
def test_a_client_that_does_not_read(
    loop: Callable[[], asyncio.AbstractEventLoop], what: str
) -> None:
    """Loses the connection, on either event loop."""
    case = {"stream": a_stream_that_is_not_read, "answer": an_answer_that_is_not_read}[what]
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(case())


async def a_stream_that_is_not_read() -> None:
    """It is held back as soon as the system takes no more, and given up in the end; another
    connection is answered."""
    app = App()
    async with asyncio.timeout(PATIENCE_SECONDS), served(app, Narrow) as port:
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(("127.0.0.1", port))
            stuck.sendall(HEAD % (b"/stream", 2) + b"{}")
            await app.held.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD % (b"/echo", 2) + b"{}")
            await reader.readuntil(b"{}")
            writer.close()
            await app.lost.wait()

    assert app.sent * len(CHUNK) < 2**20


async def test_who_reads_late() -> None:
    """Is behind while the system takes no more, and gets all of it when it reads. What the system
    keeps is a part of what it would."""
    app = App()
    async with connected(app) as (reader, writer):
        writer.transport.pause_reading()
        head = HEAD.replace(b"Host", b"Connection: close\r\nHost")
        writer.write(head % (b"/stream", 2) + b"{}")
        await app.held.wait()
        app.let.set()
        writer.transport.resume_reading()
        answer = await reader.read()

    assert answer.count(CHUNK) == app.sent
    assert answer.endswith(b"end\r\n0\r\n\r\n")
    assert len(answer) < 2**23


async def an_answer_that_is_not_read() -> None:
    """All of it was made, and the connection is closed behind it."""
    lost = asyncio.Event()

    class Told(Narrow):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async with asyncio.timeout(PATIENCE_SECONDS), served(App(), Told) as port:
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(("127.0.0.1", port))
            stuck.sendall(b"GET /big HTTP/1.0\r\nHost: localhost\r\n\r\n")
            await lost.wait()
