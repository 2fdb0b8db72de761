"""What a watcher is told over HTTP: the state, what changes of it, and what happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.admin.watch import (
    LONGEST_SILENCE_SECONDS,
    MOST_SECONDS,
    Document,
    difference,
    state_of,
    without_nulls,
)
from appliance.api.app import create_app
from appliance.service.event_log import CAPACITY
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import served
from tui.connection import SILENT_SECONDS
from tui.state import merge

LEAVES = st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
DOCUMENTS = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), LEAVES, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), LEAVES | inner, max_size=4),
)


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def url(box: Box) -> AsyncIterator[str]:
    async with served(create_app(box.daemon, keep_alive_seconds=0.05)) as port:
        yield f"http://127.0.0.1:{port}"
        box.daemon.feed.close()


@asynccontextmanager
async def watching(
    url: str, after: int | None = None, every: float = 0.05
) -> AsyncIterator[Callable[[], Any]]:
    """What is asked for the next event: its id, or None, its kind, its data. At the end of all it
    raises `EOFError`. What never comes is not waited for without an end: silence is kept alive."""
    headers = {} if after is None else {"last-event-id": str(after)}
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        httpx.AsyncClient(timeout=None) as client,
        client.stream("GET", f"{url}/api/watch?every={every}", headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()

        async def one() -> tuple[int | None, str, Document]:
            fields: dict[str, str] = {}
            async for line in lines:
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value
                elif line == "" and "data" in fields:
                    break
            else:
                assert fields == {}, "it ended in the middle of an event"
                raise EOFError
            number = int(fields["id"]) if "id" in fields else None
            return number, fields["event"], json.loads(fields["data"])

        yield one


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_one_of_the_other(before: Document, after: Document) -> None:
    """What a watcher does with a patch leads to what the daemon meant; equal is nothing to say."""
    patch = difference(before, after)
    old = json.dumps(before)

    assert merge(json.loads(old), patch) == after
    assert (patch == {}) == (before == after)
    assert json.dumps(before) == old


def test_what_has_no_value_is_left_out() -> None:
    """A null in a patch says that something is gone; a document has none."""
    assert without_nulls({"a": None, "b": {"c": None, "d": [None]}}) == {"b": {"d": [None]}}


async def test_a_watcher_ends_up_with_the_state_as_it_is(box: Box, url: str) -> None:
    """State first, then deltas, with the events between, as a request comes, runs and ends."""
    async with watching(url) as one:
        number, kind, data = await one()
        assert (number, kind, data["missed"]) == (data["newest_event"], "state", True)
        state, seen = data["state"], []
        assert state["requests"] == {}
        assert set(state["models"]) == {"a", "b"}

        box.ask("r", "a")
        while "r" not in state["requests"]:
            _, kind, data = await one()
            if kind == "delta":
                state = merge(state, data["patch"])
            else:
                seen.append(kind)
        box.settle()
        spans = json.loads(json.dumps(state_of(box.daemon.snapshot(), {})["spans"]))
        while state["spans"] != spans or "request_ended" not in seen:
            number, kind, data = await one()
            if kind == "delta":
                assert number is None
                state = merge(state, data["patch"])
            else:
                seen.append(kind)

    assert seen == ["request_arrived", "model_switched", "model_loaded", "request_ended"]
    assert state["models"]["a"]["state"] == "loaded"
    assert state["requests"] == {}
    assert [row["kind"] for row in spans.values()].count("prefill") == 1
    assert all("ended_unix_seconds" in row for row in spans.values())


async def test_a_state_has_times_for_ages_and_no_nulls(box: Box, url: str) -> None:
    """What does not change is not sent again: a request that waits makes no delta."""
    box.ask("first", "a", output=50)
    box.ask("second", "b")
    async with watching(url) as one:
        _, _, data = await one()
        second = data["state"]["requests"]["second"]
        assert second["arrived_unix_seconds"] == pytest.approx(data["unix_seconds"], abs=5)
        assert second["reason"] == {"code": "other_model", "instance": 0, "behind": "a"}
        assert "age_seconds" not in second
        box.now += 5
        box.daemon.drain_model("b", True)
        patches = []
        while not patches:
            _, kind, data = await one()
            if kind == "delta":
                patches.append(data["patch"])
    assert patches == [{"models": {"b": {"draining": True}}}]
    for life in box.world.lives.values():
        life.outcome = "cancelled"


async def test_a_lost_worker_is_reported_at_once(box: Box, url: str) -> None:
    """With the event the state as it became, before anything else, however rarely it is told."""
    async with watching(url, every=60) as one:
        _, kind, data = await one()
        assert (kind, data["state"]["instances"]["0"]["state"]) == ("state", "up")
        box.workers[0].die()
        _, lost, _ = await one()
        box.daemon.drain_model("b", True)
        _, delta, data = await one()
        _, changed, _ = await one()
    assert (lost, delta, changed) == ("instance_lost", "delta", "model_changed")
    assert data["patch"]["instances"]["0"]["state"] in ("lost", "starting")


async def test_who_comes_back_hears_what_it_missed(box: Box, url: str) -> None:
    """The state, then the events behind the last one it saw."""
    before = box.daemon.feed.newest
    box.daemon.load_model("a")
    box.settle()

    async with watching(url, after=before) as one:
        first, second, third = await one(), await one(), await one()

    assert (first[0], first[1], first[2]["missed"]) == (None, "state", False)
    assert (second[0], second[1]) == (before + 1, "model_load_requested")
    assert (third[0], third[1]) == (before + 2, "model_loaded")


async def test_a_watcher_that_missed_too_much_learns_it(box: Box, url: str) -> None:
    """The state then stands for the events that are not kept."""
    before = box.daemon.feed.newest
    for _ in range(CAPACITY + 1):
        box.daemon.evict_model("a")

    async with watching(url, after=before) as one:
        number, kind, data = await one()
        if not data["missed"]:
            number, kind, data = await one()

    assert (number, kind) == (box.daemon.feed.newest, "state")
    assert data["missed"]


@pytest.mark.parametrize("every", ["x", "0.01", "61", "nan", ""])
async def test_a_strange_pace_is_refused(url: str, every: str) -> None:
    """By the name of the parameter."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        answer = await client.get(f"{url}/api/watch", params={"every": every})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "every")


@pytest.mark.parametrize(
    ("keep_alive", "longest"), [(0.05, 3600.0), (3600.0, 0.05)], ids=["configured", "bounded"]
)
async def test_silence_is_short_however_seldom_there_are_changes(
    box: Box, monkeypatch: pytest.MonkeyPatch, keep_alive: float, longest: float
) -> None:
    """A comment ends it, long before changes are due, and longer ones are configured in vain."""
    monkeypatch.setattr("appliance.api.admin.watch.LONGEST_SILENCE_SECONDS", longest)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        served(create_app(box.daemon, keep_alive_seconds=keep_alive)) as port,
        httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
        client.stream("GET", f"http://127.0.0.1:{port}/api/watch?every=60") as response,
    ):
        lines = response.aiter_lines()
        heard = ""
        while heard != "event: state":
            heard = await anext(lines)
        box.daemon.drain_model("a", True)  # a change that will be told when it is due
        while heard != "event: model_changed":
            heard = await anext(lines)
        while not heard.startswith((":", "event: delta")):
            heard = await anext(lines)
        box.daemon.feed.close()

    assert heard == ": keep-alive"


def test_the_dashboard_waits_longer_than_a_watch_is_silent() -> None:
    """One comment may be lost, or late."""
    assert SILENT_SECONDS > 2 * LONGEST_SILENCE_SECONDS


async def test_a_drain_ends_it(box: Box, url: str) -> None:
    """Who watches hears the end of the daemon, after what changed last."""
    async with watching(url, every=MOST_SECONDS) as one:
        await one()
        box.daemon.drain_model("b", True)
        await box.daemon.drain(PATIENCE_SECONDS)
        (_, event, _), (_, change, data) = await one(), await one()
        with pytest.raises(EOFError):
            await one()

    assert (event, change) == ("model_changed", "delta")
    assert data["patch"] == {"models": {"b": {"draining": True}}}
