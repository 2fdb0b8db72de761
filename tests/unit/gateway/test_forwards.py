"""Requests for models of other servers: limits and usage of keys, and what servers may do."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, digest
from appliance.access.organizations import Organization
from appliance.gateway.accounts import Accounts
from appliance.gateway.forwarding.forwards import Forwards
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.observability.metrics import Metrics
from appliance.service.front_frames import Down, Forward, Passed, TookPiece
from appliance.service.remote_models import RemoteModel, RemoteModels
from appliance.usage.entries import CUT, WHOLE
from appliance.usage.ledger import Ledger
from appliance.usage.report import report
from appliance.vocabulary import RequestClass
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.front import FrontDouble
from tests.unit.doubles.openai_server import (
    STREAM_HEAD,
    USAGE,
    OpenAiServer,
    chunk,
    event,
    openai_server,
    raw,
    saying,
    saying_then_nothing,
)

SECRET = "sk-of-the-other-server"
NOW = 1_790_000_000.0


class Front(FrontDouble):
    """Takes each piece at once, unless it does not `read`."""

    reads = True

    def _take(self, frame: Down) -> None:
        super()._take(frame)
        if isinstance(frame, Passed) and self.reads and not frame.last and frame.refused is None:
            asyncio.get_running_loop().call_soon(self.say, TookPiece(frame.call))

    def pieces(self, call: int) -> list[Passed]:
        return [frame for frame in self.heard(Passed) if frame.call == call]

    async def answered(self, call: int) -> list[Passed]:
        """All pieces, when there are no more."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not ((found := self.pieces(call)) and (found[-1].last or found[-1].refused)):
                self._news.clear()
                await self._news.wait()
        return found


class House:
    """A core with keys, a ledger and one model of another server."""

    def __init__(self, folder: Path, server: OpenAiServer) -> None:
        self.server = server
        self.file = KeyFile(folder / "keys.json")
        self.ledger = Ledger(folder / "usage", keep_months=2, max_rows=1000, now=lambda: NOW)
        self.ledger.open()
        self.model = RemoteModel(
            name="far",
            aliases=("gpt-4o",),
            address=f"{server.url}/v1",
            called="their/model",
            key=SECRET,
            connect_seconds=PATIENCE_SECONDS,
            silence_seconds=PATIENCE_SECONDS,
            max_context=1000,
            created=1,
        )

    def key(self, name: str, **fields: Any) -> str:
        secret = f"sk-{name}"
        self.file.add(Key(name=name, sha256=digest(secret), created_seconds=0.0, **fields))
        return secret

    def front(self, **changes: Any) -> Front:
        model = RemoteModel(
            **{f: getattr(self.model, f) for f in self.model.__struct_fields__} | changes
        )
        self.models = RemoteModels([model])
        self.access = Access(KeyRing(self.file.path), wall_clock=lambda: NOW)
        service: Any = FakeService()
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1000)
        accounts = Accounts(self.access, self.ledger)
        self.sessions = Sessions(
            service, self.access, Admission(service, self.access), settings, accounts
        )
        self.metrics = Metrics()
        self.sessions.forwards = Forwards(self.models, self.access, self.metrics.remotes)
        return Front(self.sessions)

    async def come_to(self, expected: object) -> None:
        """Until all that is over is counted: an entry is written in a thread."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.models.drain()
            while self.used() != expected:  # noqa: ASYNC110 - a thread's work
                await asyncio.sleep(0.005)

    def used(self) -> dict[tuple[str, str], tuple[int, int, int, int]]:
        """Requests and tokens by key and outcome."""
        rows = report(self.ledger.books.rows(), ("key", "model", "outcome"))
        assert all(row.model == "far" for row in rows)
        return {
            (str(row.key), str(row.outcome)): (
                row.requests, row.input_tokens, row.cached_tokens, row.output_tokens
            )
            for row in rows
        }  # fmt: skip


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with openai_server() as server:
        house = House(tmp_path, server)
        yield house
        await house.sessions.forwards.aclose()
        await house.ledger.aclose()


def ask(front: Front, call: int, **fields: Any) -> None:
    body = {"model": "their/model", "messages": []} | fields.pop("more", {})
    if fields.get("streams"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    given: dict[str, Any] = {
        "model": "far",
        "asked": "gpt-4o",
        "path": "/v1/chat/completions",
        "prompt_tokens": 5,
        "max_tokens": 20,
        "headers": (("x-request-id", "mine"),),
    }
    front.say(Forward(call=call, body=json.dumps(body).encode(), **given | fields))


async def asked(front: Front, secret: str, **fields: Any) -> list[Passed]:
    call = front.call(secret)
    ask(front, call, **fields)
    pieces = await front.answered(call)
    front.leave(call)
    return pieces


def text(pieces: list[Passed]) -> bytes:
    return b"".join(piece.data for piece in pieces)


async def until_free(house: House) -> None:
    """All that was asked is over, and counted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.models.drain()


# --- what comes back -----------------------------------------------------------------------------


async def test_an_answer_has_our_name_of_the_model_and_is_counted(house: House) -> None:
    """The server hears its own name and its own key; nothing of the client's."""
    front = house.front() if house.key("a") else None
    assert front is not None
    pieces = await asked(front, "sk-a")

    (one,) = house.server.asked
    assert one.path == "/v1/chat/completions"
    assert one.body["model"] == "their/model"
    assert one.headers["authorization"] == f"Bearer {SECRET}"
    assert one.headers["x-request-id"] == "mine"
    assert (pieces[0].status, pieces[-1].last) == (200, True)
    assert json.loads(text(pieces))["model"] == "gpt-4o"
    assert json.loads(text(pieces))["usage"] == USAGE
    assert house.used() == {("a", WHOLE): (1, 7, 0, 3)}


@pytest.mark.parametrize("wants", [True, False])
async def test_a_stream_shows_its_usage_to_those_who_asked(house: House, wants: bool) -> None:
    """It is counted in both cases, before the client has the end."""
    house.key("a")
    pieces = await asked(house.front(), "sk-a", streams=True, wants_usage=wants)

    assert pieces[0].streams
    *events, done, rest = text(pieces).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    found = [json.loads(one.removeprefix(b"data: ")) for one in events]
    assert [one["model"] for one in found] == ["gpt-4o"] * len(found)
    assert [one["choices"][0]["delta"]["content"] for one in found if one["choices"]] == [
        "one", "two", "three"
    ]  # fmt: skip
    assert [one["usage"] for one in found if one.get("usage")] == ([USAGE] if wants else [])
    assert any("usage" in one for one in found) is wants
    assert house.used() == {("a", WHOLE): (1, 7, 0, 3)}


async def test_what_the_server_says_of_a_request_is_the_answer(house: House) -> None:
    """A status of 400, say: nothing is counted."""
    house.key("a")
    house.server.answering = saying(raw(400, b'{"error": {"message": "temperature: wrong"}}'))

    pieces = await asked(house.front(), "sk-a")

    assert (pieces[0].status, text(pieces)) == (
        400,
        b'{"error": {"message": "temperature: wrong"}}',
    )
    assert house.used() == {}


async def test_a_large_answer_comes_in_pieces(house: House) -> None:
    """Each is sent when the one before is taken."""
    house.key("a")
    body = json.dumps({"data": "x" * 300_000, "usage": {"prompt_tokens": 4}}).encode()
    house.server.answering = saying(raw(200, body))
    front = house.front()
    front.reads = False
    call = front.call("sk-a")
    ask(front, call, path="/v1/embeddings", max_tokens=0)

    count = 0
    while not front.pieces(call) or not front.pieces(call)[-1].last:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(front.pieces(call)) == count:
                front._news.clear()
                await front._news.wait()
        count += 1
        assert len(front.pieces(call)) == count
        front.say(TookPiece(call))

    assert text(front.pieces(call)) == body
    assert house.used() == {("a", WHOLE): (1, 4, 0, 0)}


async def test_a_response_is_counted_by_its_own_words(house: House) -> None:
    """Of the Responses API, streamed."""
    house.key("a")
    usage = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}
    events = [
        {"type": "response.created", "response": {"model": "their/model"}},
        {"type": "response.output_text.delta", "delta": "one"},
        {"type": "response.completed", "response": {"model": "their/model", "usage": usage}},
    ]
    said = b"".join(
        b"event: %b\n%b" % (one["type"].encode(), event(one))  # type: ignore[attr-defined]
        for one in events
    )
    house.server.answering = saying(STREAM_HEAD + said)

    pieces = await asked(house.front(), "sk-a", path="/v1/responses", streams=True)

    assert text(pieces).count(b"gpt-4o") == 2
    assert b"their" not in text(pieces)
    assert pieces[-1].data.startswith(b"event: response.completed\ndata: ")
    assert house.used() == {("a", WHOLE): (1, 9, 8, 2)}


# --- faults --------------------------------------------------------------------------------------

FAULTS = {
    "redirect": (raw(302, b"", "text/plain", "location: http://127.0.0.1:1/"), 502, "redirects"),
    "key": (raw(401, b'{"error": "sk-of-the-other-server"}'), 502, "remote_key_file"),
    "forbidden": (raw(403, b"{}"), 502, "remote_key_file"),
    "name": (raw(404, b"{}"), 502, "remote_model"),
    "full": (raw(429, b"{}", "application/json", "retry-after: 17"), 429, "try again"),
    "down": (raw(503, b"{}"), 503, "try again"),
    "broken": (raw(500, b"oops"), 502, "failed with status 500"),
    "no JSON": (raw(200, b"{broken"), 502, "no JSON object"),
    "a list": (raw(200, b"[]"), 502, "no JSON object"),
    "nothing of ours": (raw(200, b'{"ok": true}'), 502, "neither choices nor data"),
    "HTML": (raw(200, b"<html>", "text/html"), 502, "text/html"),
    "HTML refusal": (raw(400, b"<html>", "text/html"), 502, "refuses with status 400"),
    "no HTTP": (b"220 smtp.example ESMTP\r\n\r\n", 502, "broke the connection off"),
    "half": (b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n", 502, "broke the connection off"),
    "cut": (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"c',
            502, "broke the connection off"),
    "huge head": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000, 502, "broke the connection off"),
    "packed": (raw(200, b"x", "application/json", "content-encoding: gzip"), 502, "compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_a_server_that_fails_is_an_error_that_says_so(
    house: House, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is charged; neither the answer nor the log has the key, nor the answer the
    address."""
    house.key("a", tokens_per_minute=30)
    data, status, words = FAULTS[name]
    house.server.answering = saying(data)
    front = house.front()

    with caplog.at_level(logging.DEBUG):
        (piece,) = await asked(front, "sk-a")

    assert piece.refused is not None
    assert piece.refused.status == status, piece.refused
    assert words in piece.refused.message
    assert "far" in piece.refused.message
    assert str(house.server.port) not in piece.refused.message
    assert SECRET not in piece.refused.message + caplog.text
    if name == "full":
        assert dict(piece.refused.headers) == {"Retry-After": "17"}
    await until_free(house)
    assert house.used() == {}
    assert house.access.rate_headers(house.access.on_behalf_of(digest("sk-a")))[1][1] == "30"  # type: ignore[arg-type]


async def test_a_server_that_is_not_there_is_503(house: House) -> None:
    """And the appliance is as ready as before; the next request tries again."""
    house.key("a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    front = house.front(address=f"http://127.0.0.1:{port}/v1")

    (piece,) = await asked(front, "sk-a")

    assert piece.refused is not None
    assert (piece.refused.status, piece.refused.code) == (503, "remote_unavailable")
    assert "cannot be reached" in piece.refused.message
    assert dict(piece.refused.headers)["Retry-After"] == "5"
    assert house.used() == {}


async def test_a_server_that_is_silent_is_given_up(house: House) -> None:
    """Before an answer, and within one: what came until then counts."""
    house.key("a")
    front = house.front(silence_seconds=0.2)
    house.server.answering = saying_then_nothing(b"")
    (piece,) = await asked(front, "sk-a")
    assert piece.refused is not None
    assert (piece.refused.status, piece.refused.message[-15:]) == (503, "try again later")
    assert house.used() == {}

    house.server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    pieces = await asked(front, "sk-a", streams=True)

    assert pieces[-1].refused is not None
    assert b"one" in text(pieces)
    await house.come_to({("a", CUT): (1, 5, 0, 1)})


@pytest.mark.parametrize(
    "tail", [b"", b"data: {broken\n\n", b"data: [1]\n\n", b"data: " + b"x" * (5 << 20)]
)
async def test_a_stream_that_breaks_off_says_so_and_counts(house: House, tail: bytes) -> None:
    """Never as if it were whole."""
    house.key("a")
    said = chunk("one", "their/model") + chunk("two", "their/model")
    house.server.answering = saying(STREAM_HEAD + said + tail)

    pieces = await asked(house.front(), "sk-a", streams=True)

    assert pieces[-1].refused is not None
    assert pieces[-1].refused.status == 502
    assert b"[DONE]" not in text(pieces)
    await house.come_to({("a", CUT): (1, 5, 0, 2)})


async def test_an_error_within_a_stream_ends_it(house: House) -> None:
    """As the server said it; it is no whole answer."""
    house.key("a")
    said = chunk("one", "their/model") + event({"error": {"message": "out of memory"}})
    house.server.answering = saying(STREAM_HEAD + said)

    pieces = await asked(house.front(), "sk-a", streams=True)

    assert b"out of memory" in text(pieces)
    assert pieces[-1].last
    await house.come_to({("a", CUT): (1, 5, 0, 1)})


async def test_a_stream_is_read_in_whatever_pieces_it_comes(house: House) -> None:
    """Byte by byte, with comments and ends of lines of either kind."""
    house.key("a")
    said = b": hello\r\n\r\n" + chunk("one", "their/model").replace(b"\n", b"\r\n")
    said += chunk(None, "their/model", usage=USAGE) + b"data: [DONE]\r\n\r\n"

    async def answer(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(len(said)):
            writer.write(said[number : number + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    house.server.answering = answer
    pieces = await asked(house.front(), "sk-a", streams=True)

    assert text(pieces).count(b"data:") == 2
    assert house.used() == {("a", WHOLE): (1, 7, 0, 3)}


# --- those who leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [True, False])
async def test_a_client_that_leaves_ends_the_request_there(house: House, dies: bool) -> None:
    """Or its front end, which dies; what came counts."""
    house.key("a")
    house.server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    front = house.front()
    call = front.call("sk-a")
    ask(front, call, streams=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while b"one" not in text(front.pieces(call)):
            front._news.clear()
            await front._news.wait()
        if dies:
            front.die()
        else:
            front.leave(call)
        there = await house.server.until_asked()
        await there.left.wait()
    await house.come_to({("a", CUT): (1, 5, 0, 1)})


async def test_one_that_leaves_before_an_answer_pays_its_prompt(house: House) -> None:
    """The server may have computed it."""
    house.key("a")
    house.server.answering = saying_then_nothing(b"")
    front = house.front()
    call = front.call("sk-a")
    ask(front, call)
    there = await house.server.until_asked()
    front.leave(call)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await there.left.wait()
    await house.come_to({("a", CUT): (1, 5, 0, 0)})


async def test_what_runs_when_the_appliance_ends_is_told(house: House) -> None:
    """And nothing more is taken."""
    house.key("a")
    house.server.answering = saying_then_nothing(b"")
    front = house.front()
    call = front.call("sk-a")
    ask(front, call)
    await house.server.until_asked()
    ending = asyncio.create_task(house.models.drain())
    (late,) = await asked(front, "sk-a")
    house.sessions.forwards.end_all()
    (piece,) = await front.answered(call)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ending

    assert late.refused is not None
    assert piece.refused is not None
    assert late.refused.code == piece.refused.code == "shutting_down"


# --- limits --------------------------------------------------------------------------------------


async def refused_code(front: Front, secret: str, **fields: Any) -> tuple[int, str]:
    pieces = await asked(front, secret, **fields)
    refused = pieces[-1].refused
    return (200, "") if refused is None else (refused.status, refused.code)


async def test_limits_of_the_key_hold_before_anything_goes_out(house: House) -> None:
    """Tokens of a minute, of a month, models, guides and the class of the work."""
    house.file.set_organization(Organization(name="acme", tokens_per_minute=20))
    keys: dict[str, dict[str, Any]] = {
        "minute": {"tokens_per_minute": 40},
        "month": {"tokens_per_month": 24},
        "models": {"models": ("small",)},
        "guides": {"guides": False},
        "online": {"classes": (RequestClass.INTERACTIVE,)},
        "acme": {"organization": "acme"},
        "some": {"concurrency": 2},
    }
    for name, fields in keys.items():
        house.key(name, **fields)
    front = house.front()

    assert await refused_code(front, "sk-minute") == (200, "")
    assert await refused_code(front, "sk-minute", max_tokens=60, choices=2) == (
        400, "token_limit_exceeded"
    )  # fmt: skip
    assert await refused_code(front, "sk-minute", max_tokens=34) == (429, "rate_limit_exceeded")
    assert await refused_code(front, "sk-month") == (400, "more_than_budget")
    assert await refused_code(front, "sk-models") == (404, "model_not_found")
    assert await refused_code(front, "sk-guides", guided=True) == (403, "permission_denied")
    batch = RequestClass.BATCH
    assert await refused_code(front, "sk-online", request_class=batch) == (403, "permission_denied")
    assert await refused_code(front, "sk-acme", choices=2) == (400, "token_limit_exceeded")
    assert await refused_code(front, "sk-some", choices=3) == (400, "invalid_request")
    assert len(house.server.asked) == 1
    assert house.used() == {("minute", WHOLE): (1, 7, 0, 3)}


async def test_what_was_reserved_is_settled_with_what_it_came_to(house: House) -> None:
    """Of a minute and of a month: each choice counts its prompt in the one, once in the other."""
    house.key("a", tokens_per_minute=1000, tokens_per_month=1000)
    front = house.front()

    await asked(front, "sk-a", choices=2, max_tokens=400)

    caller = house.access.on_behalf_of(digest("sk-a"))
    assert caller is not None
    left = dict(house.access.rate_headers(caller))["x-ratelimit-remaining-tokens"]
    assert 983 <= int(left) < 1000
    assert house.used() == {("a", WHOLE): (1, 7, 0, 3)}
    assert await refused_code(front, "sk-a", max_tokens=900) == (200, "")  # nothing stays reserved


async def test_sequences_at_once_count_with_those_of_other_requests(house: House) -> None:
    """A place is free again when a request is over."""
    house.key("a", concurrency=3)
    house.server.answering = saying_then_nothing(b"")
    front = house.front()
    call = front.call("sk-a")
    ask(front, call, choices=2)
    await house.server.until_asked()

    assert await refused_code(front, "sk-a", choices=2) == (429, "rate_limit_exceeded")
    front.leave(call)
    await until_free(house)
    assert not house.sessions.forwards.elsewhere._sequences


async def test_a_full_queue_of_the_model_is_429(house: House) -> None:
    house.key("a")
    house.server.answering = saying_then_nothing(b"")
    front = house.front(max_queue=1)
    call = front.call("sk-a")
    ask(front, call)
    await house.server.until_asked()

    assert await refused_code(front, "sk-a") == (429, "queue_full")


async def test_a_reload_asks_the_new_server_from_then_on(house: House) -> None:
    """What is under way goes on with the old one."""
    house.key("a")
    async with openai_server() as other:
        front = house.front()
        await asked(front, "sk-a")
        changed = RemoteModel(
            name="far", address=f"{other.url}/v1", called="x", max_context=10, created=1
        )
        house.models.change([changed])
        await asked(front, "sk-a")

        assert (len(house.server.asked), len(other.asked)) == (1, 1)
        assert "authorization" not in other.asked[0].headers


async def test_a_key_is_in_no_text_of_a_model(house: House) -> None:
    house.front()
    assert SECRET not in repr(house.model) + str(house.model)
