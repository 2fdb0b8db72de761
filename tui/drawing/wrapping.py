"""Untrusted text in lines of a width: nothing in it is markup, nothing in it moves the cursor."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

TAB = "    "
NO_PICTURE = "\ufffd"
LINE_ENDS = "\n\x85\u2028\u2029"

_PICTURES: dict[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), NO_PICTURE),
    # Directions of writing: text behind them would not stand where it seems to.
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), NO_PICTURE),
    **dict.fromkeys(map(ord, LINE_ENDS), "\n"),
    ord("\r"): None,
    ord("\t"): TAB,
}
_WORDS = re.compile(r" +|[^ ]+")


def harmless(text: str) -> str:
    """The same, with pictures of control characters in their place. Only line feeds stay."""
    return text.translate(_PICTURES)


class Wrapped:
    """A text that grows, in lines. What is added costs what is added, however much there is."""

    def __init__(self, width: int) -> None:
        """`width` is in cells, one at least."""
        self.width = max(1, width)
        self._over: list[str] = []
        """Lines that whatever is added leaves as they are."""
        self._last = ""

    def add(self, text: str) -> None:
        """Go on where it ended."""
        *whole, rest = (self._last + harmless(text)).split("\n")
        for paragraph in whole:
            self._over += self._wrap(paragraph)
        *lines, self._last = self._wrap(rest)
        self._over += lines

    @property
    def lines(self) -> list[str]:
        return [*self._over, self._last]

    def __len__(self) -> int:
        """How many lines."""
        return len(self._over) + 1

    def cut(self, begin: int, end: int) -> list[str]:
        """The lines from the one to before the other, of those that there are. O(these)."""
        lines = self._over[max(0, begin) : max(0, end)]
        return [*lines, self._last] if begin <= len(self._over) < end else lines

    def _wrap(self, paragraph: str) -> list[str]:
        """Cut between words, and within those that are longer than a line."""
        lines: list[str] = []
        line, room = "", self.width
        for word in _WORDS.findall(paragraph):
            cells = cell_len(word)
            if cells <= room:
                line, room = line + word, room - cells
                continue
            if line:
                lines.append(line)
            if word[0] == " ":  # the space at which it is cut is on neither line
                line, room = "", self.width
                continue
            *full, line = chop_cells(word, self.width)
            lines += full
            room = self.width - cell_len(line)
        return [*lines, line]
