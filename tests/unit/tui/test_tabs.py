"""The line of tabs: twelve views have room at 80 columns, whichever is on the screen."""

from __future__ import annotations

import pytest

from tests.unit.tui.bench import click, dashboard, press, screen
from tests.unit.tui.scenes import loaded
from tui.views import VIEWS

TITLES = [view.title for view in VIEWS]


@pytest.mark.parametrize(("width", "letters"), [(80, 2), (100, 3), (160, 20)])
async def test_all_of_them_are_seen(width: int, letters: int) -> None:
    """In their order, by digits and so many letters or more; the one on the screen by its title."""
    async with dashboard(loaded(), size=(width, 24)) as app:
        for _ in TITLES:
            line = screen(app)[1]
            place = -1
            for number, title in enumerate(TITLES, start=1):
                digit = f"{number % 10} " if number <= 10 else ""
                whole = title if title == app.view.title else title[:letters]
                found = line.find(f" {digit}{whole}", place + 1)
                assert found > place, (line, title)
                place = found
            await press(app, "tab")
        assert app.view.title == TITLES[0]


async def test_each_is_where_it_is_clicked() -> None:
    """Also where titles are cut."""
    async with dashboard(loaded()) as app:
        for title in reversed(TITLES):
            await click(app, screen(app)[1].rindex(f" {title[:2]}") + 2, 1)
            assert app.view.title == title


async def test_a_long_status_is_cut() -> None:
    """Rather than the tabs behind it."""
    async with dashboard(loaded()) as app:
        await press(app, "4", "/", *("llama|qwen" * 8), "enter")
        line = screen(app)[1]
        assert "4 Models (4 of 6, /llama|qwenllama|q…)  5 R" in line
        assert line.endswith(" 9 E 0 K U C")
        assert len(line) == 80
