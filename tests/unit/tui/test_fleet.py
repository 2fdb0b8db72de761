"""The dashboard of a fleet: what it shows of boxes and models, and the way to a box and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from appliance.api.app import create_app
from appliance.fleet.box_addresses import Box
from appliance.fleet.watch import BoxWatch
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served
from tests.unit.tui.bench import (
    NOW,
    click,
    compare,
    dashboard,
    notified,
    press,
    screen,
    seen,
    settle,
)
from tui.app import Dashboard
from tui.fleet import start
from tui.fleet.app import FleetDashboard
from tui.fleet.models import by_model
from tui.fleet.source import FleetSource
from tui.messages import DaemonRefused, Document

SNAPSHOTS = Path(__file__).parent / "snapshots"
SIZES = ((80, 24), (160, 48))
GIB = 1 << 30
MODELS = ["llama-a", "llama-b", "phi-mini", "qwen-a"]


def box(name: str, **members: Any) -> Document:
    return {
        "box": name, "url": f"http://{name}:11500", "state": "ready", "reason": "",
        "version": "1.2.3", "catalogue": MODELS, "resident": [], "coming": [], "host": [],
        "waiting": 0, "waiting_by_model": {}, "running": 0, "queue_age_seconds": 0.0,
        "pool_free_bytes": 0, "attainment": None,
    } | members  # fmt: skip


def silent(name: str, reason: str, state: str = "unreachable") -> Document:
    return {"box": name, "url": f"http://{name}:11500", "state": state, "reason": reason}


BOXES = [
    box("gpu1", resident=["llama-a", "qwen-a"], host=MODELS[:3], waiting=7, running=4,
        waiting_by_model={"llama-a": 5, "qwen-a": 2}, queue_age_seconds=3.2,
        pool_free_bytes=40 * GIB, attainment=0.97),
    box("gpu2", resident=["llama-b"], coming=["llama-a"], host=MODELS, waiting=1, running=9,
        waiting_by_model={"llama-a": 1}, queue_age_seconds=0.4, pool_free_bytes=24 * GIB,
        attainment=0.88),
    box("gpu3", catalogue=["qwen-a"], state="draining", running=1, resident=["qwen-a"],
        pool_free_bytes=8 * GIB),
    box("gpu4", state="not ready", reason="instance 0 is in quarantine", catalogue=[]),
    silent("gpu5", "no answer within 2 s"),
    silent("gpu6", "/api/load is 401: set $APPLIANCE_API_KEY to a key with the scope observe",
           "refused"),
]  # fmt: skip


class ToldWatch:
    """Has the news that a test says."""

    name = "http://192.0.2.1:8080"

    def __init__(self, *news: list[Document] | str) -> None:
        self._queue: asyncio.Queue[list[Document] | str] = asyncio.Queue()
        for one in news:
            self.say(one)

    def say(self, news: list[Document] | str) -> None:
        self._queue.put_nowait(news)

    async def follow(self) -> AsyncIterator[list[Document] | str]:
        while True:
            yield await self._queue.get()


def fleet(watch: ToldWatch, size: tuple[int, int] = (80, 24), **options: Any) -> Any:
    source = FleetSource(watch, lambda: NOW)
    return dashboard(source, size=size, kind=FleetDashboard, **options)


def line_of(app: Dashboard, name: str) -> list[str]:
    """The words of a row."""
    return next(line.split() for line in screen(app) if line.split()[:1] == [name])


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("view", ["boxes", "models"])
async def test_it_looks_like_this(
    view: str, size: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    async with fleet(ToldWatch(BOXES), size) as app:
        app.show_view(view)
        await settle(app)
        name = f"fleet-{view}-{size[0]}x{size[1]}-dark.svg"
        compare(app, SNAPSHOTS / name, update=pytestconfig.getoption("--update-snapshots"))


async def test_each_box_has_a_line_and_all_have_one() -> None:
    """Of requests and memory the sums, of queues the oldest, of attainment the lowest."""
    async with fleet(ToldWatch(BOXES), (160, 30)) as app:
        assert "2 of 6 ready, 1 draining, 1 not ready, 1 unreachable, 1 refused" in screen(app)[0]
        assert "14 running, 8 waiting" in screen(app)[0]
        assert line_of(app, "gpu2") == [
            "gpu2", "ready", "1", "9", "400ms", "24GiB", "88%", "↓llama-a", "llama-b", "1.2.3",
            "http://gpu2:11500",
        ]  # fmt: skip
        assert "no answer within 2 s" in " ".join(line_of(app, "gpu5"))
        assert line_of(app, "TOTAL") == [
            "TOTAL", "2/6", "ready", "8", "14", "3.2s", "72GiB", "88%", "3", "models",
        ]  # fmt: skip


async def test_what_arrives_is_shown() -> None:
    """Also that a box has left, and that the front is away meanwhile."""
    watch = ToldWatch()
    async with fleet(watch) as app:
        assert "asking …" in seen(app)
        watch.say([silent("gpu1", "", "asking"), silent("gpu2", "", "asking")])
        await settle(app)
        assert line_of(app, "gpu1")[:2] == ["gpu1", "asking"]
        watch.say(BOXES)
        await settle(app)
        assert line_of(app, "gpu1")[1] == "ready"
        watch.say("connection refused")
        await settle(app)
        assert "LOST: connection refused, trying again · http://192.0.2.1:8080" in screen(app)[0]
        assert line_of(app, "gpu1")[1] == "ready"
        watch.say([silent("gpu2", "connection refused")])
        await settle(app)
        assert "gpu1" not in seen(app)
        assert line_of(app, "gpu2")[1:4] == ["unreachable", "connection", "refused"]
        watch.say([])
        await settle(app)
        assert "no box is in the fleet" in seen(app)


async def test_the_total_is_of_what_is_shown() -> None:
    """With a filter, of the rows that pass; it is not among them, for the cursor and the mouse."""
    async with fleet(ToldWatch(BOXES), (100, 12)) as app:
        await press(app, "/", *"gpu[12]", "enter")
        assert line_of(app, "TOTAL")[1:5] == ["2/2", "ready", "8", "13"]
        await click(app, 3, 5)
        assert app.view.current()[0] == "gpu1"
        await click(app, 3, 4)
        assert app.view.current()[0] == "gpu2"


async def test_the_total_stays_when_boxes_are_scrolled() -> None:
    many = [box(f"gpu{n}", waiting=1) for n in range(60)]
    async with fleet(ToldWatch(many), (100, 12)) as app:
        assert "TOTAL" in screen(app)[-2]
        await press(app, "end")
        assert screen(app)[-3].split()[0] == "gpu59"
        assert screen(app)[-2].split()[:4] == ["TOTAL", "60/60", "ready", "60"]
        await press(app, "home")
        assert screen(app)[3].split()[0] == "gpu0"


async def test_models_say_on_which_boxes_they_are() -> None:
    """Waiting requests of a model are added up; Enter shows all lists."""
    async with fleet(ToldWatch(BOXES), (100, 24)) as app:
        await press(app, "2")
        assert line_of(app, "llama-a") == ["llama-a", "6", "2", "↓gpu2", "gpu1"]
        assert line_of(app, "qwen-a") == ["qwen-a", "2", "3", "gpu1", "gpu3", "gpu2"]
        assert line_of(app, "phi-mini") == ["phi-mini", "0", "2", "gpu1", "gpu2"]
        await press(app, "enter")
        assert "served    gpu1, gpu2" in seen(app)


def test_a_model_is_where_it_is_nearest() -> None:
    """A box that does not say what waits for which model has no part in that sum."""
    old = box("old", catalogue=["m"], resident=["m"], coming=["m"], host=["m"],
              waiting_by_model=None)  # fmt: skip
    new = box("new", catalogue=["m"], host=["m"], waiting_by_model={"m": 2})
    row = by_model([old])["m"]
    assert (row["resident"], row["coming"], row["host"]) == (["old"], [], [])
    assert row["waiting"] is None
    row = by_model([old, new, silent("gone", "")])["m"]
    assert (row["waiting"], row["served"], row["host"]) == (2, ["old", "new"], ["new"])


async def test_details_and_help() -> None:
    async with fleet(ToldWatch(BOXES), (100, 40)) as app:
        await press(app, "d")
        assert "pool free bytes" in seen(app)
        await press(app, "escape", "?")
        page = seen(app)
        assert "dashboard of the box" in page
        assert "all the daemon says of it" not in page
        assert "detail of the row" not in page


async def test_enter_leaves_for_the_box() -> None:
    """The cursor was where it had been before."""
    async with fleet(ToldWatch(BOXES), at="gpu2") as app:
        await press(app, "enter")
        assert app._exit
        assert app.opened["url"] == "http://gpu2:11500"
    async with fleet(ToldWatch(BOXES)) as app:
        await press(app, "q")
        assert (app._exit, app.opened) == (True, None)


async def test_a_front_does_not_say_where_boxes_are() -> None:
    async with fleet(ToldWatch([box("gpu1", url="")])) as app:
        await press(app, "enter")
        assert not app._exit
        assert "appliance top --connect http://ADDRESS:PORT" in notified(app)[0]


async def test_a_fleet_answers_nothing_itself() -> None:
    source = FleetSource(ToldWatch())
    with pytest.raises(DaemonRefused, match="dashboard of a box"):
        await source.ask("GET", "/api/status")
    with pytest.raises(DaemonRefused, match="dashboard of a box"):
        await anext(source.stream("/v1/chat/completions", {}))


async def test_a_box_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real server: its dashboard opens, and its end leads back, with the colours of it."""
    where: list[tuple[str, str]] = []

    async def in_fleet(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, FleetDashboard)
        async with asyncio.timeout(60):
            while (row := app.view.current()) is None or row[0] != "here":
                await pilot.pause()
        where.append((row[0], app.theme))
        await pilot.press("q" if len(where) > 1 else "enter")

    async def in_box(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, Dashboard)
        where.append((app.source.name, app.theme))
        app.theme = "light"
        await pilot.press("q")

    monkeypatch.setattr(
        FleetDashboard, "run_async",
        partialmethod(Dashboard.run_async, headless=True, auto_pilot=in_fleet),
    )  # fmt: skip
    monkeypatch.setattr(
        Dashboard, "run_async",
        partialmethod(Dashboard.run_async, headless=True, auto_pilot=in_box),
    )  # fmt: skip
    async with served(create_app(FakeService())) as port:
        boxes = [
            Box("gone", "http://127.0.0.1:9", "127.0.0.1", 9),
            Box("here", f"http://127.0.0.1:{port}", "127.0.0.1", port),
        ]
        await start._run(BoxWatch(boxes, None), None, False, "dark", "here")

    url = f"http://127.0.0.1:{port}"
    assert where == [("here", "dark"), (url, "dark"), ("here", "light")]
