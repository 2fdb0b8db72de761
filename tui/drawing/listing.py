"""A few rows of a table inside another view: no cursor, no keys; rows without room are counted."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from tui.drawing.canvas import Line
from tui.drawing.table import GAP, LEAST_TEXT, Column
from tui.messages import Document
from tui.view import ViewContext

LEAST_LINES = 2
"""Titles and a row."""


def listing(
    columns: Sequence[Column],
    rows: Sequence[tuple[str, Document]],
    size: tuple[int, int],
    more: str,
    context: ViewContext,
) -> list[Line]:
    """Titles and rows within a size, cells by lines. Columns that do not fit are left out, the last
    ones first. The last line counts the rows that do not fit, with `more` behind the number."""
    width, height = size
    if height < LEAST_LINES:
        return []
    fit = len(rows) if len(rows) < height else height - LEAST_LINES
    values = [[column.value(key, row, context) for column in columns] for key, row in rows[:fit]]
    texts = [
        [column.text(value) for column, value in zip(columns, row, strict=True)] for row in values
    ]
    widths = [
        max([cell_len(column.title), *(cell_len(row[place]) for row in texts)])
        for place, column in enumerate(columns)
    ]
    widths = _within(columns, widths, width)
    titles = [
        _cell(column.title, room, column) for column, room in zip(columns, widths, strict=False)
    ]
    lines: list[Line] = [[(" " + (" " * GAP).join(titles), f"bold {context.theme.accent}")]]
    for row, words in zip(values, texts, strict=True):
        line: Line = [(" ", "")]
        for column, room, value, text in zip(columns, widths, row, words, strict=False):
            line.append((_cell(text, room, column), column.style(value, context)))
            line.append((" " * GAP, ""))
        lines.append(line)
    if fit < len(rows):
        lines.append([(f" {len(rows) - fit} more {more}", context.theme.dim)])
    return lines


def _within(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """The widths of the columns that fit; the last of them may be cut if it is a text."""
    found: list[int] = []
    room = width - 1
    for column, wanted in zip(columns, widths, strict=True):
        if wanted > room:
            if not column.right and room >= LEAST_TEXT:
                found.append(room)
            break
        found.append(wanted)
        room -= wanted + GAP
    return found


def _cell(text: str, width: int, column: Column) -> str:
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, width - 1) + "…"
    return " " * missing + text if column.right else text + " " * missing
