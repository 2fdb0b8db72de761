"""Styled lines that are too long, folded to a width: what follows is indented."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, chop_cells

from tui.drawing.canvas import Line

LEAST_WIDTH = 8
_WORDS = re.compile(r" +|[^ ]+")


def folded(lines: Iterable[Line], width: int) -> list[Line]:
    """Lines of at most `width` cells, cut between words; as they are where that is too narrow."""
    if width < LEAST_WIDTH:
        return list(lines)
    return [part for line in lines for part in _fold(line, width)]


def _fold(line: Line, width: int) -> list[Line]:
    if sum(cell_len(text) for text, _ in line) <= width:
        return [line]
    indent = _indent(line, width)
    parts: list[Line] = [[]]
    room = width
    for text, style in line:
        for word in _WORDS.findall(text):
            cells = cell_len(word)
            if cells <= room:
                parts[-1].append((word, style))
                room -= cells
                continue
            if word[0] == " ":  # the space at which it is cut is on neither line
                parts.append([(" " * indent, "")])
                room = width - indent
                continue
            if room < width - indent:
                parts.append([(" " * indent, "")])
                room = width - indent
            *full, last = chop_cells(word, width - indent)
            for piece in full:
                parts[-1].append((piece, style))
                parts.append([(" " * indent, "")])
            parts[-1].append((last, style))
            room = width - indent - cell_len(last)
    return [part for part in parts if any(text.strip() for text, _ in part)]


def _indent(line: Line, width: int) -> int:
    """Behind the name, for a name and its value; else behind the spaces at the beginning."""
    first = line[0][0]
    name = cell_len(first) if len(line) > 1 else len(first) - len(first.lstrip(" "))
    return name if name <= width // 2 else 2
