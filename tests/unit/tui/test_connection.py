"""How the dashboard hears a daemon, loses it, and finds it again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from appliance.api.app import create_app
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.doubles.serving import served
from tui.connection import LONGEST_WAIT_SECONDS, DaemonConnection
from tui.messages import DaemonRefused, Kind, Message, PieceKind


def sent(*events: tuple[str, dict[str, Any], int | None]) -> httpx.Response:
    """A stream that ends."""
    text = ": keep-alive\n\n"
    for kind, data, number in events:
        text += f"id: {number}\n" if number is not None else ""
        text += f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
    return httpx.Response(200, text=text)


class Sleeper:
    """Waits for nothing, and remembers."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def connected(
    answer: Callable[[httpx.Request], httpx.Response], sleep: Sleeper | None = None
) -> DaemonConnection:
    return DaemonConnection(
        "http://appliance",
        "secret",
        clock=lambda: 5.0,
        sleep=sleep or Sleeper(),
        transport=httpx.MockTransport(answer),
    )


async def hear(connection: DaemonConnection, count: int) -> list[Message]:
    heard: list[Message] = []
    async with aclosing(connection.follow()) as messages:  # type: ignore[type-var]
        async for message in messages:
            heard.append(message)
            if len(heard) == count:
                break
    await connection.close()
    return heard


async def test_what_is_sent_is_received() -> None:
    """States and deltas as such, everything else as something that happened."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return sent(
            ("state", {"s": 1}, 7), ("delta", {"d": 1}, None), ("model_load_requested", {"n": 8}, 8)
        )

    heard = await hear(connected(answer), 4)

    assert [(m.kind, m.data) for m in heard[:3]] == [
        (Kind.STATE, {"s": 1}), (Kind.DELTA, {"d": 1}), (Kind.NOTICE, {"n": 8}),
    ]  # fmt: skip
    assert (heard[3].kind, heard[3].data["reason"]) == (Kind.LOST, "the daemon ended")
    assert asked[0].url.path == "/api/watch"
    assert asked[0].headers["authorization"] == "Bearer secret"
    assert "last-event-id" not in asked[0].headers


async def test_any_character_is_received() -> None:
    """Also those at which text has a new line for Unicode, and none for server-sent events."""
    data = {"quarantine": "one\u2028two\u2029three\x85four"}

    heard = await hear(connected(lambda request: sent(("delta", data, None))), 1)

    assert [(m.kind, m.data) for m in heard] == [(Kind.DELTA, data)]


async def test_it_comes_back_where_it_was() -> None:
    """With the number of the last event; waits grow until something is heard again."""
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("last-event-id"))
        if len(asked) in (1, 9):
            return sent(("model_load_requested", {}, 40 + len(asked)))
        raise httpx.ConnectError("refused")

    sleep = Sleeper()
    heard = await hear(connected(answer, sleep), 12)

    assert asked == [None, *["41"] * 8, "49"]
    assert sleep.waits[:8] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert max(sleep.waits) == LONGEST_WAIT_SECONDS
    assert sleep.waits[8] == 0.25
    assert heard[-1].data == {"reason": "refused", "seconds": 0.5}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(403, json={"error": {"message": "no such scope"}}), "no such scope"),
        (
            httpx.Response(401, json={"error": {"message": "no such key"}}),
            "put a key with the scope admin into $APPLIANCE_API_KEY (no such key)",
        ),
        (httpx.Response(404, text="nothing here"), "/api/watch answered 404"),
        (httpx.Response(200, text="event: state\ndata: {\n\n"), "Input data was truncated"),
    ],
)
async def test_what_is_wrong_is_said(answer: httpx.Response, reason: str) -> None:
    """In the daemon's words where it has some; and it is tried again."""
    heard = await hear(connected(lambda request: answer), 2)

    assert [m.kind for m in heard] == [Kind.LOST, Kind.LOST]
    assert heard[0].data["reason"] == reason


async def test_questions_are_answered_or_refused() -> None:
    """JSON, or why not."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/gone":
            raise httpx.ConnectError("refused")
        if request.url.path == "/html":
            return httpx.Response(200, text="<html>")
        if request.method == "DELETE":
            return httpx.Response(404, json={"error": {"message": "no request 'x' is live"}})
        return httpx.Response(200, json={"body": json.loads(request.content)})

    connection = connected(answer)

    assert await connection.ask("PUT", "/a", {"b": 1}) == {"body": {"b": 1}}
    for method, path, words in [
        ("DELETE", "/x", "no request 'x' is live"),
        ("GET", "/gone", "cannot be reached"),
        ("GET", "/html", "is not the appliance"),
    ]:
        with pytest.raises(DaemonRefused, match=words):
            await connection.ask(method, path)
    await connection.close()


ASKED = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def listen(connection: DaemonConnection) -> list[tuple[PieceKind, dict[str, Any]]]:
    pieces = connection.stream("/v1/chat/completions", ASKED)
    heard = [(piece.part, piece.data) async for piece in pieces]
    await connection.close()
    return heard


async def test_an_answer_is_received_as_it_comes() -> None:
    """Who it is, its events and its remarks, up to the end that it says."""
    text = ": keep-alive\n\n" + 'data: {"n":"\u2028"}\n\n: server-timing: a\n\ndata: [DONE]\n\n'
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, headers={"x-appliance-request": "chat-1"}, text=text)

    assert await listen(connected(answer)) == [
        (PieceKind.ASKED, {}), (PieceKind.BEGUN, {"request": "chat-1"}),
        (PieceKind.REMARK, {"text": "keep-alive"}), (PieceKind.DATA, {"n": "\u2028"}),
        (PieceKind.REMARK, {"text": "server-timing: a"}),
    ]  # fmt: skip
    assert json.loads(asked[0].content) == ASKED
    assert asked[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(403, json={"error": {"message": "no scope 'infer'"}}), "no scope 'infer'"),
        (httpx.Response(200, text="data: {}\n\n"), "the answer broke off"),
        (httpx.Response(200, text="data: <html>\n\n"), "is not the appliance"),
        (httpx.ConnectError("refused"), "cannot be reached: refused"),
    ],
)
async def test_an_answer_that_is_none(answer: httpx.Response | Exception, words: str) -> None:
    """Why, in the daemon's words where it has some."""

    def respond(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(DaemonRefused, match=words):
        await listen(connected(respond))


async def test_who_stops_listening_ends_the_request() -> None:
    """The server hears that the client left, in the middle of an answer."""
    left = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"x-appliance-request", b"chat-1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async with served(answer) as port:
        connection = DaemonConnection(f"http://127.0.0.1:{port}")
        async with aclosing(connection.stream("/v1/chat/completions", ASKED)) as pieces:  # type: ignore[type-var]
            heard = [await anext(pieces) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            await left.wait()
        await connection.close()

    assert [piece.part for piece in heard] == [PieceKind.ASKED, PieceKind.BEGUN, PieceKind.DATA]
    assert heard[1].data == {"request": "chat-1"}


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    with box_maker(monkeypatch, slabs=20) as make_box:
        box = make_box()
        box.start()
        yield box


async def test_a_real_api_is_received(box: Box) -> None:
    """Over a socket: the state first, then what happens."""
    async with served(create_app(box.daemon)) as port:
        connection = DaemonConnection(f"http://127.0.0.1:{port}")
        async with aclosing(connection.follow()) as messages:  # type: ignore[type-var]
            first = await anext(messages)
            box.daemon.drain_model("a", True)
            heard = [await anext(messages) for _ in range(2)]
        assert (await connection.ask("GET", "/api/models/a"))["draining"]
        await connection.close()
        box.daemon.feed.close()

    assert first.kind is Kind.STATE
    assert set(first.data["state"]["models"]) == {"a", "b"}
    assert {m.kind for m in heard} == {Kind.NOTICE, Kind.DELTA}
