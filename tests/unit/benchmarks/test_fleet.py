"""The benchmark of fleets: how it finds a capacity, and what it writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fleet import GRID, Results, around, capacity


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(2.5, 2.5), (0.5, 0.0), (9.0, 4.0)],
)
def test_a_capacity_is_between_two_loads(limit: float, expected: float) -> None:
    """What is kept falls by a tenth for each load of 1 past the limit less 1: the capacity is where
    nine tenths are left, none if the least load is too much, the greatest if none is."""
    found = capacity([1.0, 2.0, 3.0, 4.0], lambda load: 1.0 - max(0.0, load - limit + 1) / 10)

    assert found == pytest.approx(expected)


def test_larger_fleets_are_searched_next_to_smaller_ones() -> None:
    """Four loads of the grid, with the smaller fleet's capacity between the two in the middle."""
    loads = around(1.1)

    assert len(loads) == 4
    assert loads[1] <= 1.1 <= loads[2]
    assert set(loads) <= set(GRID)
    assert around(0.0)[0] == GRID[0]


def test_results_are_added_to(tmp_path: Path) -> None:
    """A second run keeps what the first one found."""
    path = tmp_path / "fleet.json"
    Results(path).add("compared", {"boxes": 1})
    results = Results(path)
    results.add("compared", {"boxes": 4})
    results.carries(4, "random", 1.25)

    written = json.loads(path.read_text())
    assert written["compared"] == [{"boxes": 1}, {"boxes": 4}]
    assert Results(path).capacities(4) == {"random": 1.25}
    assert written["commit"]
