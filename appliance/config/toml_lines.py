"""The line of every key of a TOML file: ``tomllib`` gives values only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys from the root; an index selects a table of an array: ``("model", 0, "slo", "ttft")``."""

_PART: Final = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED: Final = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER: Final = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]\]?")
_ASSIGNMENT: Final = re.compile(rf"\s*({_DOTTED})\s*=")
_INLINE_KEY: Final = re.compile(rf"[{{,]\s*({_DOTTED})\s*=(?!=)")


class LineMap:
    """The lines (from 1) of the tables and keys of a TOML text that ``tomllib`` accepts.

    Keys of inline tables are found on the line on which the table begins. What is not found is
    answered with the line of its nearest table that is: near, never elsewhere.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[KeyPath, int] = {(): 1}
        self.last: tuple[KeyPath, int] = ((), 0)
        """The key or the table that was found last, and its line."""
        self._counts: dict[KeyPath, int] = {}
        table: KeyPath = ()
        closing: str | None = None
        for number, line in enumerate(text.splitlines(), start=1):
            if closing is not None:
                closing = None if closing in line else closing
            elif header := _HEADER.match(line):
                table = self._enter(_split(header[2]), header[1] == "[[")
                self._found(table, number)
            elif assignment := _ASSIGNMENT.match(line):
                value = line[assignment.end() :]
                self._assign((*table, *_split(assignment[1])), value, number)
                closing = _left_open(value)

    def find(self, key: KeyPath) -> int | None:
        """The line of this key, if it was found."""
        return self._lines.get(key)

    def line(self, key: KeyPath) -> int:
        """The line of the key, or of the nearest table around it."""
        while key not in self._lines:
            key = key[:-1]
        return self._lines[key]

    def _enter(self, parts: KeyPath, repeated: bool) -> KeyPath:
        """The path of a header; a table below ``[[x]]`` belongs to the last ``x``."""
        path: KeyPath = ()
        for part in parts[:-1]:
            path = (*path, part)
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
        path = (*path, parts[-1])
        if repeated:
            self._counts[path] = self._counts.get(path, 0) + 1
            path = (*path, self._counts[path] - 1)
        return path

    def _found(self, path: KeyPath, number: int) -> None:
        """A key, and the tables around it that nothing mentioned before, begin here."""
        self.last = (path, number)
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], number)

    def _assign(self, path: KeyPath, value: str, number: int) -> None:
        self._found(path, number)
        if value.lstrip().startswith("{"):
            for inner in _INLINE_KEY.finditer(_without_strings(value)):
                self._found((*path, *_split(inner[1])), number)
            self.last = (path, number)


def dotted(key: Sequence[str | int]) -> str:
    """A path as people write it: ``model[0].slo.ttft``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, text))


def _left_open(value: str) -> str | None:
    """The quotes that must come before keys are read again, after a value that opened them."""
    for quotes in ('"""', "'''"):
        if value.count(quotes) % 2:
            return quotes
    return None


def _without_strings(value: str) -> str:
    """The value with its strings emptied, so that what looks like a key in them is none."""
    return re.sub(r"""(?<=[=\s,\[])("(?:[^"\\]|\\.)*"|'[^']*')(?=\s*[,}\]])""", '""', value)
