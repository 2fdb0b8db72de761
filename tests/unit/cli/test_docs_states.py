"""docs/architecture.md: its diagrams are the transition tables, its files and packages exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.cli.docs.states import diagram, with_states
from appliance.scheduling.lifecycle import KV_PLACES, KvPlace

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_diagrams_are_up_to_date() -> None:
    assert with_states(PAGE) == PAGE


def test_every_transition_is_drawn() -> None:
    drawn = diagram(KV_PLACES)
    arrows = set(re.findall(r"(\w+) --> (\w+)", drawn))
    assert arrows == {(str(a), str(b)) for a, targets in KV_PLACES.items() for b in targets}
    assert f"[*] --> {KvPlace.NONE}" in drawn


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        with_states("# Architecture")


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "appliance" / name).is_file()] == []


def test_every_package_has_a_line() -> None:
    packages = {path.parent.name for path in (ROOT / "appliance").glob("*/__init__.py")}
    table = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert table == packages
