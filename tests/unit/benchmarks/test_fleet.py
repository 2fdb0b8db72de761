"""The benchmark of fleets: how it finds a capacity, and what it writes down."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.fleet import GRID, SEEDS, Results, capacity


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(2.5, 2.5), (0.5, 0.0), (9.0, 4.0)],
)
def test_a_capacity_is_between_two_loads(limit: float, expected: float) -> None:
    """What is kept falls by a tenth for each load of 1 past the limit less 1: the capacity is where
    nine tenths are left, none if the least load is too much, the greatest if none is."""
    found = capacity([1.0, 2.0, 3.0, 4.0], lambda load: 1.0 - max(0.0, load - limit + 1) / 10)

    assert found == pytest.approx(expected)


def test_a_load_that_fails_ends_it() -> None:
    """Though a larger one, by chance, is carried."""
    kept = {1.0: 1.0, 2.0: 0.8, 3.0: 1.0}

    assert capacity([1.0, 2.0, 3.0], kept.__getitem__) == pytest.approx(1.5)


def test_results_are_added_to(tmp_path: Path) -> None:
    """A second program keeps what the first one found, and makes no run again; it ends after as
    many new runs as were asked for."""
    path = tmp_path / "fleet.json"
    cell = {"boxes": 1, "router": "random", "load": 0.5, "poll_seconds": 1.0, "minutes": 3}
    cell |= {"seed": 1}
    Results(path).add("runs", cell)
    results = Results(path, left=0)

    assert results.run(1, "random", 0.5) == cell
    with pytest.raises(SystemExit, match="ask again"):
        results.run(1, "random", 0.6)
    assert json.loads(path.read_text())["runs"] == [cell]


def test_a_capacity_is_kept(tmp_path: Path) -> None:
    """It is found from runs that are there, of all seeds, and written down."""
    path = tmp_path / "fleet.json"
    results = Results(path, left=0)
    for seed, load in itertools.product(SEEDS, GRID):
        cell = {"boxes": 4, "router": "random", "poll_seconds": 1.0, "minutes": 3, "seed": seed}
        cell |= {"load": round(load, 4), "token_attainment": 1.0 - load / 20 + (seed - 3) / 100}
        results.add("runs", cell)

    results.search(4, "random")

    assert Results(path).all["capacity"]["4"] == {"random": 2.0}
