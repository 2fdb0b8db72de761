"""Lines of styled text on the screen; only those that changed are painted again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

Piece: TypeAlias = tuple[str, str]
"""Text, and its style as rich reads it."""
Line: TypeAlias = list[Piece]

parsed = lru_cache(maxsize=1024)(Style.parse)


def plain(line: Line) -> str:
    """The text of a line."""
    return "".join([text for text, _ in line])


class Canvas(Widget):
    """Shows the lines it was given last, from the top; what is too long is cut."""

    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Line] = ()

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these. O(lines), and what is shown of those that differ from before."""
        before, self.lines = self.lines, list(lines)
        width, height = self.size
        if not height:  # it is not on the screen, and what it remembers of that is old
            self.refresh()
        for y in range(height):
            if self._line(before, y) != self._line(self.lines, y):
                self.refresh(Region(0, y, width, 1))

    def render_line(self, y: int) -> Strip:
        segments = [Segment(text, parsed(style)) for text, style in self._line(self.lines, y)]
        strip = Strip(segments).adjust_cell_length(self.size.width)
        return strip.apply_style(self.rich_style)

    def _line(self, lines: Sequence[Line], y: int) -> Line:
        return lines[y] if y < len(lines) else []
