"""A newcomer's tour of the dashboard, as its documentation has it, on the recorded demo."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.tui.bench import NOW, Told, command, dashboard, press, seen
from tests.unit.tui.test_views import DEMO
from tui.dialogs import TextDialog
from tui.recording import read_recording

DOC = Path(__file__).parents[3] / "docs" / "tui.md"
ROW = re.compile(r"^\| (`.*`) \| (.*) \|$", re.MULTILINE)
NAMES = {"Left": "left", "Enter": "enter", "Esc": "escape"}


def steps() -> list[tuple[list[str], str]]:
    """What is to be pressed, and what is said of it."""
    text = DOC.read_text(encoding="utf-8")
    tour = text.partition("## A tour")[2].partition("\n## ")[0]
    return [(re.findall(r"`([^`]+)`", keys), said) for keys, said in ROW.findall(tour)]


async def test_the_tour() -> None:
    """Every key has the effect that is told: the view that is named, a page over it, the end."""
    session = Told(*(one._replace(at=NOW) for one in read_recording(DEMO)), live=False)
    looked_at = set()
    async with dashboard(session, size=(120, 36)) as app:
        *before, (last, _) = steps()
        for keys, said in before:
            shown = seen(app)
            for key in keys:
                if key.startswith(":"):
                    await command(app, key[1:])
                else:
                    await press(app, NAMES.get(key, key))
            assert seen(app) != shown or keys == ["1"], keys
            for title in re.findall(r"\*\*(\w+)\*\*", said):
                assert app.view.title == title
                looked_at.add(title)
            assert isinstance(app.screen, TextDialog) == (keys[-1] in ("Enter", "?")), keys
        await press(app, *(NAMES.get(key, key) for key in last))
        assert not app.is_running
    assert {"Overview", "Timeline", "Memory", "Models", "Requests", "Events"} <= looked_at
