"""docs/troubleshooting.md has every check of the doctor, and quotes its messages correctly."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from appliance.cli import ceilings, doctor, findings, gpu_checks
from appliance.cli.doctor import installed
from tests.prose import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CHECKS = re.search(r"^## Checks of the doctor$(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
MODULES = (doctor, gpu_checks, ceilings)
LEVELS = {findings.ok.__name__, findings.warn.__name__, findings.fail.__name__}
TREES = [
    ast.parse((ROOT / f"{module.__name__.replace('.', '/')}.py").read_text(encoding="utf-8"))
    for module in MODULES
]


def literal(node: ast.expr) -> str:
    """What a text begins with: all of it, or what comes before its first variable."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.strip()
    if isinstance(node, ast.FormattedValue):
        node = node.value
    return ceilings.WHAT if isinstance(node, ast.Name) and node.id == "WHAT" else ""


def checks() -> set[str]:
    """What findings say that they are about: the first argument, or what `what` is set to."""
    found = set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in LEVELS:
                found.add(literal(node.args[0]))
        elif isinstance(node, ast.Assign):
            (target,) = node.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and name.id == "what":
                    found.add(literal(value))
    return found - {""} | {package.name.removesuffix("-cpu") for package in installed()}


@cache
def texts() -> str:
    """All text of the doctor, as written, with a mark where a variable is."""
    parts = []
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            values = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            parts.append("".join(map(str, values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts.append(node.value)
    return "\n".join(parts)


def quoted() -> Iterator[str]:
    """Messages in the first column of the tables about checks."""
    assert CHECKS is not None
    for row in re.findall(r"^\| (.*?) \|", CHECKS[1], re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row)


@pytest.mark.parametrize("check", sorted(checks()))
def test_every_check_has_a_heading(check: str) -> None:
    names = [name for heading in HEADINGS for name in heading.split(", ")]

    assert any(check == name or check.startswith(f"{name} ") for name in names)


def test_every_heading_is_a_check() -> None:
    known = " ".join(f" {check} " for check in checks())

    assert [h for h in HEADINGS for name in h.split(", ") if f" {name} " not in known] == []


@pytest.mark.parametrize("message", sorted(set(quoted())))
def test_messages_are_those_of_the_doctor(message: str) -> None:
    """Each part between two variables is in the text of the doctor, or of its level."""
    printed = texts()
    for part in message.split("…"):
        assert part.strip(" ,;:()") in printed
