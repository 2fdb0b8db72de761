"""The sizes that the house keeps: short functions and classes, few files in a package, no `_`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES, CLASS_LINES = 60, 450
FILES, ROOT_FILES = 20, 12
"""Of a package, and of `appliance` itself, at most."""

SOURCES = sorted(path for place in ("appliance", "tui") for path in (ROOT / place).rglob("*.py"))


def too_long(source: str) -> Iterator[str]:
    """Functions and classes that are too long, or have no name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if lines > most:
                yield f"{node.name} has {lines} lines, more than {most}"
            if node.name == "_":
                yield f"line {node.lineno}: a function called _"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_and_classes_are_short(path: Path) -> None:
    assert not list(too_long(path.read_text(encoding="utf-8")))


def test_packages_have_few_files() -> None:
    files = Counter(path.parent for path in SOURCES)

    assert {str(place): count for place, count in files.items() if count > FILES} == {}
    assert files[ROOT / "appliance"] <= ROOT_FILES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n" + "    pass\n" * 59, []),
        ("def f():\n" + "    pass\n" * 60, ["f has 61 lines, more than 60"]),
        ("class C:\n" + "    x = 1\n" * 450, ["C has 451 lines, more than 450"]),
        ("class C:\n    def _(self): ...\n", ["line 2: a function called _"]),
    ],
)
def test_what_is_too_long_is_found(source: str, found: list[str]) -> None:
    assert list(too_long(source)) == found
