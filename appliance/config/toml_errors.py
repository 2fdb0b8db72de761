"""What is wrong with a text that is not TOML: the line, the key and the remedy, where the mistake
is one that people make."""

from __future__ import annotations

import re
import tomllib
from typing import Final, NamedTuple

from appliance.config.toml_lines import LineMap, dotted

_LINE: Final = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")
_INLINE_TWICE: Final = re.compile(r"Duplicate inline table key '(.*)'")
_UNQUOTED: Final = re.compile(
    r"""\s*([^=\s]+)\s*=\s*([A-Za-z0-9~./_][^"'#\[\]{},=]*?)\s*(?:#.*)?"""
)
_NO_EQUALS: Final = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*:?\s*([^\s:].*)")
_WORDS: Final = {"true": "true", "yes": "true", "on": "true"} | {
    "false": "false", "no": "false", "off": "false", "none": '""', "null": '""',
}  # fmt: skip


class SyntaxProblem(NamedTuple):
    """One thing wrong with the text."""

    line: int
    key: str
    wrong: str
    remedy: str


def explain(text: str, error: tomllib.TOMLDecodeError) -> SyntaxProblem:
    """The problem that `tomllib` found."""
    found, lines = _LINE.search(str(error)), text.splitlines()
    number = int(found[1]) if found and found[1] else len(lines)
    line, reason = "".join(lines[number - 1 : number]), _LINE.sub("", str(error))
    path, place = LineMap("\n".join(lines[:number])).last
    first = LineMap("\n".join(lines[: number - 1])).find(path)
    key, twice = dotted(path), "leave one of the two"
    if place == number and first is not None:
        shown = f"the table [{key}]" if line.lstrip().startswith("[") else path[-1]
        return SyntaxProblem(number, key, f"{shown} is set twice, first at line {first}", twice)
    if inner := _INLINE_TWICE.match(reason):
        return SyntaxProblem(number, key, f"{inner[1]} is set twice", twice)
    if (bare := _UNQUOTED.fullmatch(line)) and place == number:
        better = _WORDS.get(bare[2].lower(), f'"{bare[2]}"')
        wrong = f"{bare[2]} is not a value of TOML"
        return SyntaxProblem(number, key, wrong, f"write {bare[1]} = {better}")
    if line.count('"') % 2 and "'" not in line:
        return SyntaxProblem(
            number, "(file)", "a quotation mark is missing", "put text between two of them"
        )
    if reason.startswith("Expected '='") and (pair := _NO_EQUALS.fullmatch(line)):
        remedy = f"write {pair[1]} = {pair[2]}"
        return SyntaxProblem(number, "(file)", f"{pair[1]} has no = behind it", remedy)
    return SyntaxProblem(number, "(file)", f"not TOML: {error}", "correct the syntax")
