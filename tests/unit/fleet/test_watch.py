"""Boxes that are followed: what each row says, and that a dead box holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

import appliance
from appliance.api.app import create_app
from appliance.errors import FleetError
from appliance.fleet import polling
from appliance.fleet.box_addresses import Box
from appliance.fleet.endpoints import Polled
from appliance.fleet.polling import NoAnswer
from appliance.fleet.watch import BoxWatch, FrontWatch, Row, read_front, row_of
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served
from tests.unit.fleet.served_boxes import ScriptedBox, fleet_of

LOAD = {"catalogue": ["m", "n"], "resident": ["n"], "waiting": 3, "waiting_by_model": {"m": 3}}
SHORT_SECONDS = 0.05


def polled(ready: int = 200, load: int = 200, body: object = LOAD, said: bytes = b"") -> Polled:
    return Polled(ready, load, msgspec.json.encode(body), said)


def box_at(name: str, port: int) -> Box:
    return Box(name, f"http://127.0.0.1:{port}", "127.0.0.1", port)


async def at_once(seconds: float) -> None:
    """A second that is over when the others had their turn."""
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (polled(), "ready", ""),
        (polled(503, body=LOAD | {"draining": True}), "draining", ""),
        (polled(503, said=b'{"reasons": ["no models", "slow"]}'), "not ready", "no models; slow"),
        (polled(503, said=b"gateway"), "not ready", ""),
        (polled(load=404), "failed", "/api/load is 404"),
        (polled(body={"draining": False}), "failed", "its answer is not the appliance's"),
        (polled(body=[]), "failed", "its answer is not the appliance's"),
        (NoAnswer("connection refused"), "unreachable", "connection refused"),
    ],
)
def test_a_row_has_a_state_and_why(answer: Polled | NoAnswer, state: str, reason: str) -> None:
    row = row_of("one", "http://x", answer, "1.2")
    assert (row["box"], row["url"], row["state"], row["reason"]) == (
        "one", "http://x", state, reason,
    )  # fmt: skip
    says_its_load = state in ("ready", "draining", "not ready")
    assert ("waiting" in row) == says_its_load
    assert row.get("version") == ("1.2" if says_its_load else None)


def test_a_key_that_does_not_open_the_load_is_named() -> None:
    row = row_of("one", "http://x", polled(load=403), "")
    assert (row["state"], "scope observe" in row["reason"]) == ("refused", True)


def test_a_box_of_an_earlier_version_says_less() -> None:
    row = row_of("one", "", polled(body={"catalogue": ["m"]}), "")
    assert (row["state"], row["waiting"], row["waiting_by_model"]) == ("ready", 0, None)


@pytest.mark.parametrize("body", [b"[]", b"no", b'{"boxes": 3}', b'{"boxes": [{}]}', b"[" * 9999])
def test_what_is_no_front_is_an_error(body: bytes) -> None:
    with pytest.raises(FleetError, match="not the front of a fleet"):
        read_front(body)


async def test_boxes_are_asked_for_all_they_say() -> None:
    """Real ones: with the version of their software, in the order in which they were given."""
    async with served(create_app(FakeService())) as port:
        boxes = (box_at("gone", 9), box_at("here", port))
        rows = await BoxWatch(boxes, None).once()

    assert [row["box"] for row in rows] == ["gone", "here"]
    assert (rows[0]["state"], rows[0]["reason"]) == ("unreachable", "connection refused")
    assert (rows[1]["state"], rows[1]["version"]) == ("ready", appliance.__version__)
    assert (rows[1]["resident"], rows[1]["coming"]) == (["small"], ["org/small"])


async def test_the_key_goes_along() -> None:
    box = KeyedBox("sk-1")
    async with served(box) as port:
        states = [
            (await BoxWatch([box_at("one", port)], key).once())[0]["state"]
            for key in ("sk-1", "sk-2", None)
        ]
    assert states == ["ready", "refused", "refused"]


async def test_a_box_that_is_silent_holds_up_no_other() -> None:
    """The other one is asked again and again, while it was not even given up once."""
    async with silent() as port, served(box := ScriptedBox()) as other:
        watch = BoxWatch([box_at("silent", port), box_at("other", other)], None, at_once)
        async with aclosing(watch.follow()) as news:
            for resident in (("a",), ("b",), ("c",)):
                box.resident = resident
                rows = await until(news, "other", resident=list(resident))
                assert rows["silent"]["state"] == "asking"


async def test_a_box_is_asked_again_when_it_gave_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is unreachable until it answers, and says nothing of before when it no longer does."""
    monkeypatch.setattr(polling, "POLL_SECONDS", SHORT_SECONDS)
    box = Stubborn()
    async with served(box) as port:
        watch = BoxWatch([box_at("one", port)], None, at_once)
        async with aclosing(watch.follow()) as news:
            row = (await until(news, "one", state="unreachable"))["one"]
            assert row["reason"] == f"no answer within {SHORT_SECONDS} s"
            monkeypatch.setattr(polling, "POLL_SECONDS", 60.0)
            box.answers.set()
            assert (await until(news, "one", state="ready"))["one"]["resident"] == ["m"]
            monkeypatch.setattr(polling, "POLL_SECONDS", SHORT_SECONDS)
            box.answers.clear()
            assert "resident" not in (await until(news, "one", state="unreachable"))["one"]
        box.answers.set()


async def test_the_version_is_asked_for_when_a_box_comes() -> None:
    """Not with every poll."""
    box = KeyedBox("")
    async with served(box) as port:
        async with aclosing(BoxWatch([box_at("one", port)], None, at_once).follow()) as news:
            while box.paths.count("/api/load") < 5:
                await anext(news)
            assert box.paths.count("/version") == 1


async def test_nothing_is_asked_when_it_is_left() -> None:
    """No poll goes on."""
    before = asyncio.all_tasks()
    async with silent() as port:
        watch = BoxWatch([box_at("silent", port), box_at("gone", 9)], None)
        async with aclosing(watch.follow()) as news:
            await anext(news)
            assert len(polls(before)) == 2
        assert not polls(before)


async def test_a_front_says_it_of_all_its_boxes() -> None:
    """Where they are it does not say."""
    boxes = {"a": ScriptedBox(models=("x", "y"), resident=("y",)), "b": None}
    async with fleet_of(boxes) as (client, _):
        rows = await FrontWatch(str(client.base_url), None).once()

    assert [(row["box"], row["state"], row["url"]) for row in rows] == [
        ("a", "ready", ""), ("b", "unreachable", ""),
    ]  # fmt: skip
    assert (rows[0]["catalogue"], rows[0]["resident"]) == (["x", "y"], ["y"])


async def test_a_front_that_is_none_or_gone_is_asked_again() -> None:
    async with served(create_app(FakeService())) as port:
        daemon = FrontWatch(f"http://127.0.0.1:{port}", None, at_once)
        async with aclosing(daemon.follow()) as news:
            found = [await anext(news), await anext(news)]
        with pytest.raises(FleetError, match="give --box NAME=URL"):
            await daemon.once()
    gone = FrontWatch("http://127.0.0.1:9", None, at_once)
    async with aclosing(gone.follow()) as news:
        found += [await anext(news), await anext(news)]

    assert all(isinstance(one, str) for one in found)
    assert "not the front of a fleet" in found[1]
    assert found[3] == "connection refused"


def polls(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Tasks of a watch that were not there before."""
    return [task for task in asyncio.all_tasks() - before if "BoxWatch" in repr(task)]


async def until(news: Any, box: str, **members: object) -> dict[str, Row]:
    """The rows by name, once those of a box are so."""
    async for rows in news:
        found = {row["box"]: row for row in rows}
        if all(found[box].get(name) == value for name, value in members.items()):
            return found
    raise AssertionError("it ended")


@asynccontextmanager
async def silent() -> AsyncIterator[int]:
    """The port of a server that takes connections and never answers."""
    over = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        over.set()


class Stubborn:
    """A box that answers only while it is to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self._box = ScriptedBox(models=("m",), resident=("m",))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.answers.wait()
        await self._box(scope, receive, send)


class KeyedBox:
    """A box that wants a key, if it has one, and counts what it is asked."""

    def __init__(self, key: str) -> None:
        self.paths: list[str] = []
        self._key = f"Bearer {key}".encode() if key else None
        self._box = ScriptedBox()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.paths.append(scope["path"])
        sent = dict(scope["headers"]).get(b"authorization")
        if scope["path"] == "/version":
            await _answer(send, 200, b'{"version": "7"}')
        elif self._key is not None and sent != self._key and scope["path"] != "/readyz":
            await _answer(send, 401, b"{}")
        else:
            await self._box(scope, receive, send)


async def _answer(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
