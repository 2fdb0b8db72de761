"""A view that is a table: sorted, filtered, with a cursor and marks. Paints what is seen of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.app import ComposeResult

from tui.drawing.canvas import Canvas, Line
from tui.drawing.folding import folded
from tui.messages import Document
from tui.view import View, ViewContext

GAP = 2
TOTAL = "TOTAL"
"""The key of the line of totals."""
LEAST_TEXT = 8
"""Cells that a text column needs to be worth showing."""


class Column(NamedTuple):
    """`value` of a row is what it is sorted by, and what is saved; `text` is how it is shown."""

    title: str
    value: Callable[[str, Document, ViewContext], Any]
    text: Callable[[Any], str] = lambda value: "" if value is None else str(value)
    style: Callable[[Any, ViewContext], str] = lambda value, context: ""
    right: bool = False


def member(name: str) -> Callable[[str, Document, ViewContext], Any]:
    """A member of the row."""
    return lambda key, row, context: row.get(name)


class TableView(View):
    """Rows of the state, by key. Columns that do not fit are left out, the last ones first; a text
    that has some room is cut."""

    columns: tuple[Column, ...]
    first_sort: ClassVar[tuple[str, bool] | None] = None
    """Title of the column that it is sorted by at first, and whether downwards; None for the order
    of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._view_context: ViewContext | None = None
        self._shown: list[tuple[str, Document]] = []
        """All rows that pass the filter, sorted."""
        self._all = 0
        self._total: Document | None = None
        self._cursor: str | None = None
        self._place = 0
        """Of the cursor among those shown."""
        self._top = 0
        self._marks: set[str] = set()
        self._filter = ""
        self._widths: dict[str, int] = {}
        self._sort: str | None = None
        self._down = False
        if self.first_sort is not None:
            self._sort, self._down = self.first_sort

    def rows(self, context: ViewContext) -> dict[str, Document]:
        """What there is, by key."""
        raise NotImplementedError

    def total(self, rows: list[Document]) -> Document | None:
        """These rows in one, which is the last line; None for a table without it."""
        return None

    def nothing(self, context: ViewContext) -> str:
        """What is said where there are no rows."""
        return ""

    def faded(self, key: str, row: Document, context: ViewContext) -> bool:
        """Whether a row matters little: it is painted dim."""
        return False

    def compose(self) -> ComposeResult:
        yield self._canvas

    # --- what is on the screen -------------------------------------------------------------------

    def show(self, context: ViewContext) -> None:
        self._view_context = context
        rows = self.rows(context)
        self._all = len(rows)
        self._marks &= rows.keys()
        shown = [(key, row) for key, row in rows.items() if self._passes(key, row, context)]
        column = next((one for one in self.columns if one.title == self._sort), None)
        if column is not None:
            shown.sort(
                key=lambda one: _order(column.value(one[0], one[1], context)), reverse=self._down
            )
        self._shown = shown
        self._total = self.total([row for _, row in shown]) if shown else None
        self._find_cursor()
        self._paint()

    def _passes(self, key: str, row: Document, context: ViewContext) -> bool:
        if not self._filter:
            return True
        text = " ".join([column.text(column.value(key, row, context)) for column in self.columns])
        inverse = self._filter.startswith("!")
        try:
            found = re.search(self._filter.removeprefix("!"), text, re.IGNORECASE)
        except re.error:  # it is still being typed
            return True
        return (found is None) == inverse

    def _find_cursor(self) -> None:
        """On the row it was on; where that was, if it is gone."""
        places = {key: place for place, (key, _) in enumerate(self._shown)}
        place = places.get(self._cursor or "", self._place)
        self._place = max(0, min(place, len(self._shown) - 1))
        self._cursor = self._shown[self._place][0] if self._shown else None
        height = max(1, self._room_for_rows)
        self._top = min(self._top, max(0, len(self._shown) - height))
        self._top = max(min(self._top, self._place), self._place - height + 1)

    @property
    def _room_for_rows(self) -> int:
        """Lines for them: titles have one, and so has the total."""
        return max(0, self._canvas.size.height - (1 if self._total is None else 2))

    def _paint(self) -> None:
        context = self._view_context
        if context is None:
            return
        width = self._canvas.size.width
        visible = self._shown[self._top : self._top + self._room_for_rows]
        cells = [self._row_cells(key, row, context) for key, row in visible]
        total = None if self._total is None else self._row_cells(TOTAL, self._total, context)
        for place, column in enumerate(self.columns):
            all_cells = cells if total is None else [*cells, total]
            widest = max([cell_len(row[place][0]) for row in all_cells], default=0)
            title = cell_len(column.title) + (column.title == self._sort)
            before = self._widths.get(column.title, 0)
            self._widths[column.title] = max(before, widest, title)
        count, spare = self._fitting(width)
        lines = [self._titles(count, spare, context)]
        for (key, _), row in zip(visible, cells, strict=True):
            line = self._cells(row[:count], spare)
            mark = "*" if key in self._marks else " "
            if key == self._cursor:
                text = mark + "".join([piece for piece, _ in line])
                lines.append([(set_cell_size(text, width), context.theme.cursor)])
            else:
                lines.append([(mark, context.theme.warn), *line])
        if total is not None:
            bold = [(text, f"bold {style}") for text, style in total[:count]]
            lines.append([(" ", ""), *self._cells(bold, spare)])
        if not self._all and (why := self.nothing(context)):
            lines += folded([[(f" {why}", context.theme.dim)]], width)
        self._canvas.paint(lines)

    def _row_cells(self, key: str, row: Document, context: ViewContext) -> list[tuple[str, str]]:
        """Texts and styles of all columns."""
        faded = self.faded(key, row, context)
        values = [column.value(key, row, context) for column in self.columns]
        return [
            (column.text(value), context.theme.dim if faded else column.style(value, context))
            for column, value in zip(self.columns, values, strict=True)
        ]

    def _fitting(self, width: int) -> tuple[int, int]:
        """How many columns are shown, one at least; and how wide the last of them may be."""
        used = 1
        for place, column in enumerate(self.columns):
            spare = width - used - (GAP if place else 0)
            if spare < self._widths[column.title]:
                if place and (column.right or spare < LEAST_TEXT):
                    return place, width
                return place + 1, spare
            used = width - spare + self._widths[column.title]
        return len(self.columns), width

    def _titles(self, count: int, spare: int, context: ViewContext) -> Line:
        line: Line = [(" ", "")]
        for place, column in enumerate(self.columns[:count]):
            arrow = ("▼" if self._down else "▲") if column.title == self._sort else ""
            room = self._room(column, place == count - 1, spare)
            text = _fit(column.title + arrow, room, column.right)
            line.append((" " * (GAP if place else 0) + text, f"bold {context.theme.accent}"))
        return line

    def _room(self, column: Column, last: bool, spare: int) -> int:
        width = self._widths[column.title]
        return min(width, spare) if last else width

    def _cells(self, row: list[tuple[str, str]], spare: int) -> Line:
        line: Line = []
        for place, (column, (text, style)) in enumerate(zip(self.columns, row, strict=False)):
            if place:
                line.append((" " * GAP, ""))
            room = self._room(column, place == len(row) - 1, spare)
            line.append((_fit(text, room, column.right), style))
        return line

    # --- what keys do ----------------------------------------------------------------------------

    def status(self) -> str:
        words = [f"{len(self._shown)} of {self._all}" if self._filter else str(self._all)]
        if self._marks:
            words.append(f"{len(self._marks)} marked")
        if self._filter:
            words.append(f"/{self._filter}")
        return ", ".join(words)

    def current(self) -> tuple[str, Document] | None:
        return self._shown[self._place] if self._shown else None

    def picked(self) -> list[str]:
        marked = [key for key, _ in self._shown if key in self._marks]
        return marked or super().picked()

    def sorts(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)

    def sort_by(self, title: str | None) -> None:
        titles = self.sorts()
        if title is None:
            place = titles.index(self._sort) + 1 if self._sort in titles else 0
            self._sort, self._down = titles[place % len(titles)], False
        elif title == self._sort:
            self._down = not self._down
        else:
            self._sort, self._down = title, False
        self._again()

    def reverse(self) -> None:
        """Sorted the other way round."""
        self._down = not self._down
        self._again()

    def filter_by(self, text: str) -> None:
        self._filter = text
        self._again()

    def mark(self) -> None:
        if self._cursor is not None:
            self._marks ^= {self._cursor}
            self._move(1)

    def table(self) -> list[list[str]]:
        if self._view_context is None:
            return []
        context = self._view_context
        return [
            [column.title for column in self.columns],
            *(
                [_saved(column.value(key, row, context)) for column in self.columns]
                for key, row in self._shown
            ),
        ]

    def _again(self) -> None:
        if self._view_context is not None:
            self.show(self._view_context)

    def _move(self, by: int) -> None:
        self._place = max(0, min(self._place + by, len(self._shown) - 1))
        self._cursor = self._shown[self._place][0] if self._shown else None
        self._find_cursor()
        self._paint()

    def on_key(self, event: events.Key) -> None:
        page = max(1, self._room_for_rows - 1)
        moves = {
            "up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page,
            "home": -len(self._shown), "g": -len(self._shown),
            "end": len(self._shown), "G": len(self._shown),
        }  # fmt: skip
        if (by := moves.get(event.character or "", moves.get(event.key))) is not None:
            event.stop()
            self._move(by)
        elif event.character == "S":
            event.stop()
            self.reverse()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._move(-3)

    def on_click(self, event: events.Click) -> None:
        """A title sorts, a row gets the cursor; twice, it is opened (by who is above)."""
        if event.y > 0:
            row = self._top + event.y - 1
            if event.y <= self._room_for_rows and row < len(self._shown):
                self._move(row - self._place)
            return
        used = 1
        for column in self.columns[: self._fitting(self._canvas.size.width)[0]]:
            used += self._widths[column.title] + GAP
            if event.x < used:
                self.sort_by(column.title)
                return

    def on_resize(self) -> None:
        self._widths.clear()
        self._again()


def _fit(text: str, width: int, right: bool) -> str:
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, max(0, width - 1)) + "…"
    return " " * missing + text if right else text + " " * missing


def _order(value: Any) -> tuple[int, Any]:
    """Nothing before numbers before texts."""
    if value is None or value == "":
        return 0, 0
    if isinstance(value, (int, float)):
        return 1, value
    if isinstance(value, (list, tuple)):
        return 1, sum(value)
    return 2, str(value)


def _saved(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value)
    return "" if value is None else str(value)
