"""Batches on the dashboard: how far they are, and their end."""

from __future__ import annotations

from typing import Any

from tests.unit.tui.bench import (
    Told,
    command,
    dashboard,
    notified,
    press,
    screen,
    seen,
    state,
    tree,
)
from tests.unit.tui.scenes import batches
from tui.messages import DaemonRefused

PATH = "/v1/batches?limit=100"


def told(answer: Any) -> Told:
    source = Told(state(tree()))
    source.answers["GET", PATH] = answer
    return source


async def test_how_far_they_are() -> None:
    """The share that has an outcome, what failed, how long it may take; in full in the detail."""
    async with dashboard(told(batches()), size=(120, 30)) as app:
        await command(app, "batches")
        running, done, read = (line.split() for line in screen(app)[3:6])
        assert running[1:8] == [
            "in_progress",
            "43%",
            "1000",
            "7",
            "1h00m",
            "23h00m",
            "/v1/completions",
        ]
        assert done[1:6] == ["completed", "100%", "20", "0", "2h00m"]
        assert read[1:4] == ["validating", "0", "0"]
        assert "(3)" in screen(app)[1]
        await press(app, "enter")
        for words in ("in progress", "50m00s ago", "file-7"):
            assert words in seen(app)


async def test_they_are_cancelled() -> None:
    """After a question; what cannot be is told."""
    source = told(batches())
    source.answers["POST", "/v1/batches/batch_1/cancel"] = {"status": "cancelling"}
    why = "a batch that is completed cannot be cancelled"
    source.answers["POST", "/v1/batches/batch_2/cancel"] = DaemonRefused(why)
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "batches")
        await press(app, "space", "space", "K")
        assert "Cancel batch_1, batch_2?" in seen(app)
        await press(app, "n")
        assert {asked[0] for asked in source.asked} == {"GET"}
        await press(app, "K", "y")
        assert notified(app) == ["batch_1 is cancelling", f"batch_2: {why}"]
        assert source.asked[-1] == ("GET", PATH, None)


async def test_none_more_or_not_at_all() -> None:
    """Each is said."""
    for answer, words in (
        ({"data": [], "has_more": False}, "there are none"),
        (batches() | {"has_more": True}, "3, the newest"),
        (DaemonRefused("batches.directory is not set"), "batches.directory is not set"),
    ):
        async with dashboard(told(answer)) as app:
            await command(app, "batches")
            assert words in seen(app)
