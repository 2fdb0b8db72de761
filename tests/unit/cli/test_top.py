"""What happens in a daemon, over HTTP and on the command line, over worker doubles."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.service.event_log import CAPACITY, NoticeKind
from appliance.service.interface import Snapshot
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import ModelFailed
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import PID, Box, setup_of, small
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served
from tui.recording import NoRecording, NotRecorded

Call = Callable[..., Awaitable[Result]]


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
    """Where the daemon answers."""
    async with served(create_app(box.daemon, keep_alive_seconds=0.05)) as port:
        yield f"http://127.0.0.1:{port}"
        box.daemon.feed.close()


@pytest.fixture
async def call(url: str) -> Call:
    """Runs `appliance` against the daemon."""

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--url", url])

    return run


@asynccontextmanager
async def watching(url: str, after: int | str | None = None) -> AsyncIterator[Callable[[], Any]]:
    """What is asked for the next event: its number, its kind, its data. Asked for a comment, it
    waits for the next one of those and says nothing."""
    headers = {} if after is None else {"last-event-id": str(after)}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
        client.stream("GET", f"{url}/api/events", headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()

        async def one(comment: bool = False) -> tuple[int, str, dict[str, Any]] | None:
            fields: dict[str, str] = {}
            async for line in lines:
                if comment and line.startswith(":"):
                    return None
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value
                elif line == "" and "data" in fields:
                    break
            return int(fields["id"]), fields["event"], json.loads(fields["data"])

        yield one


def somebody_looks(box: Box) -> asyncio.Event:
    """Set when a client is given the snapshot that events begin with."""
    looked, snapshot = asyncio.Event(), box.daemon.snapshot

    def look() -> Snapshot:
        looked.set()
        return snapshot()

    box.daemon.snapshot = look  # type: ignore[method-assign]
    return looked


def kinds(box: Box, after: int) -> list[str]:
    """What was told behind a number."""
    return [notice.kind for notice in box.daemon.feed._ring if notice.number > after]


async def test_a_snapshot_is_everything(box: Box, url: str) -> None:
    """Readiness, instances, models and requests at one time."""
    box.ask("r", "a")

    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        found = (await client.get(f"{url}/api/snapshot")).json()

    assert found["readiness"] == {"ok": True, "reasons": [], "degraded": []}
    assert [row["id"] for row in found["requests"]] == ["r"]
    assert [row["model"] for row in found["status"]["models"]] == ["a", "b"]
    assert found["status"]["instances"][0]["state"] == "up"
    assert found["newest_event"] == box.daemon.feed.newest
    box.settle()


async def test_top_says_what_is_out_of_order(box: Box, url: str) -> None:
    """An instance in quarantine, with the reason."""
    box.daemon.quarantine_instance(0, "its fan is loud")

    result = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", "--url", url])

    assert "instance 0 is quarantined: its fan is loud" in result.stdout


async def test_events_begin_with_a_snapshot(box: Box, url: str) -> None:
    """Then everything that happens comes, numbered without a gap."""
    async with watching(url) as one:
        number, kind, data = await one()
        assert (kind, data["requests"], data["newest_event"]) == ("snapshot", [], number)
        await one(comment=True)  # keeps the connection alive

        box.ask("r", "a")
        box.settle()

        seen = [await one() for _ in range(4)]
    assert [n for n, _, _ in seen] == [number + index for index in range(1, 5)]
    assert [k for _, k, _ in seen] == [
        "request_arrived",
        "model_switched",
        "model_loaded",
        "request_ended",
    ]
    assert seen[0][2]["facts"] == {"id": "r", "model": "a", "request_class": "interactive"}
    assert seen[3][2]["facts"]["outcome"] == "length"
    assert seen[3][2]["facts"]["output_tokens"] == 5


async def test_a_client_comes_back(box: Box, url: str) -> None:
    """With the id of the last event that it saw it goes on behind it."""
    before = box.daemon.feed.newest
    box.daemon.load_model("a")

    async with watching(url, after=before) as one:
        number, kind, _ = await one()

    assert (number, kind) == (before + 1, "model_load_requested")
    box.settle()


async def test_who_missed_something_gets_a_snapshot(box: Box, url: str) -> None:
    """Instead of what is not kept any more."""
    before = box.daemon.feed.newest
    for _ in range(CAPACITY + 1):
        box.daemon.evict_model("a")

    async with watching(url, after=before) as one:
        number, kind, _ = await one()

    assert (number, kind) == (box.daemon.feed.newest, "snapshot")


@pytest.mark.parametrize("seen", ["x", "-1", "9" * 20])
async def test_a_strange_id_is_refused(url: str, seen: str) -> None:
    """By the name of the header."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        answer = await client.get(f"{url}/api/events", headers={"last-event-id": seen})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_watcher_that_leaves_is_forgotten(box: Box, url: str) -> None:
    """Nothing of it stays."""
    async with watching(url) as one:
        await one()
        assert len(box.daemon.feed._followers) == 1

    async with asyncio.timeout(PATIENCE_SECONDS):
        while box.daemon.feed._followers:  # noqa: ASYNC110 - nobody is told that it left
            await asyncio.sleep(0.01)


async def test_everything_that_happens_is_reported(box: Box) -> None:
    """What operators do, and what becomes of models, instances and requests."""
    start = box.daemon.feed.newest
    box.daemon.load_model("a")
    box.settle()
    box.daemon.evict_model("a")
    box.daemon.drain_model("b", True)
    await box.daemon.set_policy(PolicyChoice(use=("aegaeon",)))
    box.workers[0].die()
    box.workers[0].greet()
    box.settle()
    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="its files are gone"))
    with pytest.raises(Exception, match="its files are gone"):
        box.ask("r", "a")
    box.settle()
    box.daemon.quarantine_instance(0, "a test")
    box.daemon.release_instance(0)
    spec = box.daemon.machine.models["b"]
    gone = box.daemon.catalogue.remove("b", force=True)
    box.settle()
    assert gone.is_set()
    box.daemon.catalogue.add(box.served(spec), kv_floor_slabs=0)

    assert kinds(box, start) == [
        "model_load_requested",
        "model_loaded",
        "model_evict_requested",
        "model_evicted",
        "model_changed",
        "policies_chosen",
        "instance_lost",
        "instance_up",
        "model_failed",
        "request_arrived",
        "request_rejected",
        "instance_quarantined",
        "instance_released",
        "model_removing",
        "model_removed",
        "model_added",
    ]
    elsewhere = {"request_ended", "model_switched", "config_reloaded", "adapters_changed"}
    elsewhere |= {"autopilot"}
    assert set(kinds(box, start)) | elsewhere == {kind.value for kind in NoticeKind}


async def test_a_drain_ends_the_events(box: Box, url: str) -> None:
    """Who watches hears the end of the daemon, and does not hold it up."""
    async with watching(url) as one:
        await one()
        await box.daemon.drain(1.0)
        with pytest.raises(KeyError):  # no further event
            await one()


async def test_top_shows_everything_once(box: Box, call: Call) -> None:
    """A page for people, the snapshot for programs."""
    for number in range(25):
        box.ask(f"r{number}", "a")
    box.daemon.drain_model("b", True)
    page, whole, wrong = (
        await call("top", "--once"),
        await call("top", "--once", "--json"),
        await call("top", "--json"),
    )

    words = [line.split() for line in page.stdout.splitlines()]
    assert words[0][0] == "appliance"
    assert words[0][-1] == "ready"
    assert ["a", "loading", "1", "24"] in words
    assert ["b", "cold", "0", "0", "draining"] in words
    assert page.stdout.splitlines()[-1] == "and 5 more"
    assert len(json.loads(whole.stdout)["requests"]) == 25
    assert wrong.exit_code == 2
    box.settle()


def test_the_dashboard_needs_a_terminal() -> None:
    """A pipe is none; it is said what works there."""
    result = CliRunner().invoke(cli, ["top"])

    assert (result.exit_code, "appliance top --once" in result.stderr) == (2, True)


def test_the_dashboard_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, `appliance top` says how to get it, also under its other name."""
    for name in ("tui.start", "tui.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)

    result = CliRunner().invoke(cli, ["tui"])

    assert result.exit_code == 1
    assert "needs textual: install appliance[tui]" in result.stderr


def test_the_dashboard_is_started_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the daemon, with the key, and with what is to be recorded; what goes wrong is said."""
    started: list[tuple[str, dict[str, Any]]] = []

    def run(url: str, **options: Any) -> None:
        started.append((url, options))
        if options["replay"] is not None:
            raise NoRecording("that is none")
        if options["record"] is not None:
            raise NotRecorded("File exists")

    monkeypatch.setattr("tui.start.run", run)
    monkeypatch.setattr("appliance.cli.top.on_a_terminal", lambda: True)
    monkeypatch.setenv("APPLIANCE_API_KEY", "secret")
    there = tmp_path / "there"
    there.touch()

    assert CliRunner().invoke(cli, ["top", "--connect", "http://x:1", "--readonly"]).exit_code == 0
    assert started == [
        (
            "http://x:1",
            {"key": "secret", "readonly": True, "record": None, "replay": None, "theme": "dark"},
        )
    ]
    for option, words in [("--replay", "that is none"), ("--record", "File exists")]:
        result = CliRunner().invoke(cli, ["top", option, str(there)])
        assert (result.exit_code, words in result.stderr) == (2, True)


async def test_a_fleet_is_shown_once() -> None:
    """A line for each box, of one that does not answer with the reason; rows for programs."""
    service = FakeService()
    service.waiting = {"small": 2}
    async with served(create_app(service)) as port:
        boxes = ["--box", f"here=http://127.0.0.1:{port}", "--box", "gone=http://127.0.0.1:9"]
        line = ["top", "--fleet", "--once", *boxes]
        page = await asyncio.to_thread(CliRunner().invoke, cli, line)
        whole = await asyncio.to_thread(CliRunner().invoke, cli, [*line, "--json"])
        front = ["top", "--fleet", "--once", "--connect", f"http://127.0.0.1:{port}"]
        none = await asyncio.to_thread(CliRunner().invoke, cli, front)

    words = [row.split() for row in page.stdout.splitlines()]
    assert words[1] == ["here", "ready", "2", "0", "0.0", "s", "600B", "98%", "↓org/small", "small"]
    assert words[2] == ["gone", "unreachable", "connection", "refused"]
    rows = json.loads(whole.stdout)["boxes"]
    assert [row["state"] for row in rows] == ["ready", "unreachable"]
    assert rows[0]["waiting_by_model"] == {"small": 2}
    assert (page.exit_code, whole.exit_code, none.exit_code) == (0, 0, 1)
    assert "not the front of a fleet" in none.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fleet"], "--fleet needs --box"),
        (["--fleet", "--connect", "unix:/x"], "--fleet needs --box"),
        (["--fleet", "--connect", "x"], "is no address"),
        (["--box", "a=http://127.0.0.1:1"], "--box is for --fleet"),
        (["--fleet", "--box", "http://127.0.0.1:1"], "give NAME=URL"),
        (["--fleet", "--box", "a=http://127.0.0.1:1", "--connect", "http://x:1"], "not both"),
        (["--fleet", "--box", "a=http://127.0.0.1:1", "--record", "x"], "goes with none"),
        (["--fleet", "--box", "a=http://127.0.0.1:1", "--web"], "goes with none"),
        (["--fleet", "--box", "a=http://127.0.0.1:1"], "needs a terminal"),
    ],
)
def test_a_fleet_is_named_by_its_boxes_or_its_front(options: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, ["top", *options], env={"APPLIANCE_URL": None})
    assert (result.exit_code, words in " ".join(result.stderr.split())) == (2, True)


def test_the_dashboard_of_a_fleet_is_started_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the boxes or on a front, with the key; the environment may name the front."""
    started: list[tuple[str, dict[str, Any]]] = []

    def run(watch: Any, **options: Any) -> None:
        started.append((f"{type(watch).__name__} {watch.name}", options))

    monkeypatch.setattr("tui.fleet.start.run", run)
    monkeypatch.setattr("appliance.cli.top.on_a_terminal", lambda: True)
    monkeypatch.setenv("APPLIANCE_API_KEY", "secret")
    boxes = ["--box", "a=http://127.0.0.1:1", "--box", "b=http://127.0.0.1:2"]
    monkeypatch.setenv("APPLIANCE_URL", "http://front:8080")
    for options in (boxes, ["--readonly", "--theme", "light"]):
        assert CliRunner().invoke(cli, ["top", "--fleet", *options]).exit_code == 0

    assert started == [
        ("BoxWatch 2 boxes", {"key": "secret", "readonly": False, "theme": "dark"}),
        ("FrontWatch http://front:8080", {"key": "secret", "readonly": True, "theme": "light"}),
    ]


def test_what_breaks_the_dashboard_is_not_taken_for_the_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A terminal that is gone is no reason to advise another file."""
    gone = OSError(5, "Input/output error")

    def run(url: str, **options: Any) -> None:
        raise gone

    monkeypatch.setattr("tui.start.run", run)
    monkeypatch.setattr("appliance.cli.top.on_a_terminal", lambda: True)

    result = CliRunner().invoke(cli, ["top", "--record", str(tmp_path / "new")])

    assert result.exception is gone
    assert "--record" not in result.stderr


async def test_logs_follow_what_happens(box: Box, call: Call) -> None:
    """A line for each event, until the daemon ends."""
    looked = somebody_looks(box)
    following = asyncio.ensure_future(call("logs"))
    await looked.wait()
    box.ask("r", "a")
    box.workers[0].die()
    box.workers[0].greet()
    box.settle()
    box.daemon.feed.close()

    lines = [line.split(maxsplit=1)[1] for line in (await following).stdout.splitlines()]

    assert lines[0].startswith("snapshot requests=0 newest_event=")
    assert lines[1] == "request_arrived id=r model=a request_class=interactive"
    assert f"instance_up instance=0 pid={PID + 1}" in lines
    assert lines[-1].startswith("request_ended id=r model=a outcome=length output_tokens=5")


async def test_logs_for_programs(box: Box, call: Call) -> None:
    """An object for each event, the snapshot first."""
    looked = somebody_looks(box)
    following = asyncio.ensure_future(call("logs", "--json"))
    await looked.wait()
    box.daemon.drain_model("a", True)
    reason = "one\u2028two\x85three"  # new lines of text, and none of server-sent events
    box.daemon.feed.tell(NoticeKind.MODEL_FAILED, model="b", reason=reason)
    box.daemon.feed.close()

    told = [json.loads(line) for line in (await following).stdout.splitlines()]
    snapshot, drained, failed = told

    assert (snapshot["event"], snapshot["requests"]) == ("snapshot", [])
    assert (drained["event"], drained["facts"]["draining"]) == ("model_changed", True)
    assert failed["facts"] == {"model": "b", "reason": reason}


async def test_logs_of_no_daemon(call: Call) -> None:
    """Without a daemon they say so."""
    result = await asyncio.to_thread(
        CliRunner().invoke, cli, ["logs", "--url", "http://127.0.0.1:9"]
    )

    assert result.exit_code == 1
    assert "no daemon answers" in result.stderr
