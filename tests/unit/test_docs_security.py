"""docs/security.md names tests that exist, one for each threat, and explains the sandbox."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.prose import ROOT
from tests.unit.platform.test_packaging import HARDENING

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
ROWS = [
    row
    for section in ("Threats", "Published vulnerabilities of similar software")
    for table in re.findall(rf"^## {section}\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)
    for row in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)
    if not row.startswith(("|---", "| asset |", "| CVE |"))
]


@cache
def functions(file: str) -> frozenset[str]:
    """The names of all functions of a file; none if it does not exist."""
    path = ROOT / file
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_test_exists(file: str, name: str) -> None:
    assert name.startswith("test_")
    assert name in functions(file)


def test_each_threat_names_a_test() -> None:
    """In its last column, and nothing but tests."""
    tests = re.compile(r"`tests/[\w/]+\.py::test_\w+`(, `tests/[\w/]+\.py::test_\w+`)*")
    lacking = [row for row in ROWS if not tests.fullmatch(row.split("|")[-2].strip())]

    assert len(ROWS) > 60
    assert lacking == []


def test_no_cve_has_two_rows() -> None:
    """Of one product: the first column names each once."""
    named = [cve for row in ROWS for cve in re.findall(r"CVE-\d{4}-\d{4,}", row.split("|")[1])]
    assert sorted(named) == sorted(set(named))


@pytest.mark.parametrize("directive", HARDENING)
def test_each_directive_is_explained(directive: str) -> None:
    assert f"`{directive}=" in PAGE
