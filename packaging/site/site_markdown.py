"""Lists and tables as MkDocs' Markdown wants them.

Pages are written in the Markdown of Git hosts: a list may follow a line of text, what belongs to an
item is indented as far as its text, and a bar in a cell is escaped, in code, too. Python-Markdown,
which MkDocs uses, wants an empty line before a list and four spaces for each level, and shows the
escape of a bar in code.
"""

from __future__ import annotations

import re
from typing import Final

_ITEM: Final = re.compile(r" *([-*]|\d+[.)]) +(?=\S)")
_INTERRUPT: Final = ("-", "*", "1.", "1)")
"""What begins a list right after a line of text; another number there is a part of the sentence."""

_FENCE: Final = re.compile(r" *(```+)")
_ROW: Final = re.compile(r"^ *\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]+`")
_LEVEL: Final = 4


def for_mkdocs(text: str) -> str:
    """A page in the dialect of MkDocs."""
    page = _Page()
    for line in text.splitlines():
        page.add(line)
    return _ROW.sub(lambda row: _CODE.sub(_without_escape, row[0]), "\n".join([*page.lines, ""]))


def _without_escape(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


class _Page:
    """The lines of a page so far, and the lists that the last one is in."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._texts: list[int] = []
        """How far the text of each of the lists is indented, from the outermost on."""
        self._fence = ""
        self._begins_with_item = False
        """Whether the lines since the last empty one do."""

    def add(self, line: str) -> None:
        """The next line, in the dialect of MkDocs."""
        if self._fence:
            self._fence = "" if line.strip() == self._fence else self._fence
        elif fence := _FENCE.match(line):
            self._leave(line)
            self._fence = fence[1]
        elif item := self._item(line):
            if self._after_text and not self._begins_with_item:
                self.lines.append("")
            self._begins_with_item = True
            self._leave(line)
            self.lines.append(self._moved(line))
            self._texts.append(item.end())
            return
        elif line.strip() and not self._after_text:
            self._begins_with_item = False
            self._leave(line)
        self.lines.append(self._moved(line))

    @property
    def _after_text(self) -> bool:
        return bool(self.lines and self.lines[-1].strip())

    def _item(self, line: str) -> re.Match[str] | None:
        """The beginning of an item, if the line is one: neither code nor a part of a sentence."""
        found = _ITEM.match(line)
        if found is None or _indent(line) >= (self._texts or [0])[-1] + _LEVEL:
            return None
        in_sentence = self._after_text and not self._texts and found[1] not in _INTERRUPT
        return None if in_sentence else found

    def _leave(self, line: str) -> None:
        """A line ends the items whose text is indented further."""
        while self._texts and _indent(line) < self._texts[-1]:
            self._texts.pop()

    def _moved(self, line: str) -> str:
        """A line of an item with four spaces for each level, also one that is at the margin."""
        if not self._texts or not line.strip():
            return line
        inside = max(0, _indent(line) - self._texts[-1])
        return " " * (_LEVEL * len(self._texts) + inside) + line.lstrip(" ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
