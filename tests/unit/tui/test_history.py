"""What the timeline shows of the time before the dashboard was opened, and of short turns."""

from __future__ import annotations

from typing import Any

from tests.unit.tui.bench import (
    NOW,
    Told,
    command,
    dashboard,
    delta,
    model,
    press,
    screen,
    settle,
    state,
    tree,
)
from tests.unit.tui.scenes import span
from tui.messages import DaemonRefused, Document
from tui.views.timeline import UNKNOWN


class Historic(Told):
    """A daemon that answers what it is asked of its timeline with the next of its `pages`."""

    def __init__(self, *messages: Any, pages: list[Document | DaemonRefused]) -> None:
        super().__init__(*messages)
        self.pages = pages

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        if path.startswith("/api/timeline"):
            self.answers[method, path] = self.pages.pop(0)
        return await super().ask(method, path, body)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked if path.startswith("/api/timeline")]


def page(*spans: Document, before: int | None = None, kept_since: float | None = None) -> Document:
    return {"spans": list(spans), "before": before, "kept_since_unix_seconds": kept_since}


def run_lane(app: Any) -> str:
    return screen(app)[3]


RECENT = {"9": span(9, "turn", "c", -4, -1)}


async def test_what_was_before_is_asked_for() -> None:
    """Once, with some more around the window; the lane shows it with what came since."""
    old = span(2, "turn", "a", -36, -20), span(3, "turn", "b", -19, -6)
    source = Historic(state(tree(spans=RECENT)), pages=[page(*old)])
    async with dashboard(source, size=(110, 24)) as app:
        assert source.paths == []
        await command(app, "timeline")
        await settle(app)
        (path,) = source.paths
        lane = run_lane(app)
        assert lane.index("│a") < lane.index("│b") < lane.index("│c")
        assert UNKNOWN not in lane
        await press(app, "left", "left", "left", "enter")
        assert "turn of a on instance 0" in "\n".join(screen(app))
        await press(app, "escape", "+", "+", "+")
        assert run_lane(app)[11:].startswith("a ")
        assert "paused" in screen(app)[2]
        assert source.paths == [path]
    since, until = (float(part.partition("=")[2]) for part in path.partition("?")[2].split("&"))
    assert since < NOW - 40
    assert until == NOW


async def test_pages_are_put_together() -> None:
    """Until there are no more; what is not kept any more is not shown as idle."""
    source = Historic(
        state(tree(spans=RECENT)),
        pages=[page(span(5, "turn", "b", -12, -6), before=3),
               page(span(2, "turn", "a", -20, -13), kept_since=NOW - 20)],
    )  # fmt: skip
    async with dashboard(source, size=(110, 24)) as app:
        await command(app, "timeline")
        await settle(app)
        assert [path.partition("&before=")[2] for path in source.paths] == ["", "3"]
        lane = run_lane(app)[11:]
        assert lane.index("│a") < lane.index("│b")
        assert lane.startswith(UNKNOWN * 45)
        assert UNKNOWN not in lane[lane.index("│a") :]
        source.pages += [page()] * 9
        await press(app, "<", "<")
        await settle(app)
        assert len(source.paths) == 2, "what is around the window is there already"
        await press(app, *"<<<<<<<<")
        await settle(app)
        assert len(source.paths) > 2


async def test_a_daemon_that_has_no_history() -> None:
    """An older one, say: what is known is shown, and it is not asked again for the same window."""
    source = Historic(state(tree(spans=RECENT)), pages=[DaemonRefused("not found")])
    async with dashboard(source, size=(110, 24)) as app:
        await command(app, "timeline")
        await settle(app)
        lane = run_lane(app)[11:]
        assert lane.startswith(UNKNOWN * 80)
        assert "│c" in lane
        assert len(source.paths) == 1


async def test_a_recording_is_not_asked() -> None:
    source = Historic(state(tree(spans=RECENT)), pages=[])
    source.live = False
    async with dashboard(source, size=(110, 24)) as app:
        await command(app, "timeline")
        assert source.paths == []
        assert run_lane(app)[11:].startswith(UNKNOWN)


async def test_another_daemon_has_another_history() -> None:
    """That of the one before is let go with its spans."""
    source = Historic(
        state(tree(spans=RECENT)), pages=[page(span(2, "turn", "a", -36, -20)), page()]
    )
    async with dashboard(source, size=(110, 24)) as app:
        await command(app, "timeline")
        await settle(app)
        assert "│a" in run_lane(app)
        source.say(state(tree() | {"started_unix_seconds": NOW - 1}))
        await settle(app)
        await settle(app)
        assert "│a" not in run_lane(app)
        assert len(source.paths) == 2


async def test_short_turns_have_letters() -> None:
    """A model runs in each cell, whatever the zoom: never lines alone. The legend names them."""
    turns = {
        str(n): span(n, "turn", "ab"[n % 2], -30 + n * 0.5, -29.5 + n * 0.5) for n in range(58)
    }
    source = Historic(state(tree(spans=turns)), pages=[page()] * 9)
    async with dashboard(source, size=(110, 24)) as app:
        await command(app, "timeline")
        for _ in range(9):
            await settle(app)
            lane = run_lane(app)[11:].replace(UNKNOWN, " ")
            cells = "".join(lane.split())
            assert {"a", "b"} & set(cells), lane
            assert cells.count("│") * 3 <= len(cells), lane
            legend = next(line for line in screen(app) if line.startswith("  a  a"))
            assert " b  b" in legend
            await press(app, "-" if app.view.status() == "" else "f")


async def test_names_that_do_not_fit_are_letters() -> None:
    """Names that begin alike would look the same when they are cut."""
    spans = {"1": span(1, "turn", "llama-a", -8, -5.5), "2": span(2, "load", "llama-b", -8, -5.5)}
    models = {name: model(name) for name in ("llama-a", "llama-b")}
    messages = state(tree(spans=spans)), delta({"models": models})
    async with dashboard(Historic(*messages, pages=[page()]), size=(110, 24)) as app:
        await command(app, "timeline")
        await settle(app)
        run, load = (screen(app)[row] for row in (3, 4))
        assert "│d" in run
        assert "│↓e" in load
