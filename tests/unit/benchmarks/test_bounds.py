"""The loads that are published as too much for any policy: beyond all that policies were found to
carry."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import bounds
from benchmarks.papers_tables import RESULTS, TABLES, Cells, names, read

ROWS = Path(bounds.__file__).parent / "results" / "2026-11-27-lab-bounds.json"


def test_no_policy_was_found_to_carry_what_is_too_much() -> None:
    """Of the committed cells, by the bound with windows; the other one is kept beside it."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]

    assert rows
    for row in rows:
        table = read(TABLES / f"{row['table']}.toml")
        cells = Cells.read(RESULTS / f"{row['table']}.json")
        found = [bounds.carried(table, cells, policy) for policy in table.policies]
        assert row["windows"] > max(one.value for one in found if one is not None)


def test_the_bound_with_windows_is_the_first_load_that_takes_more_than_there_is() -> None:
    """By the share of time, on the table that is the quickest to compute."""
    table = read(TABLES / "taichi_16_32b_slo1.toml")
    assert table.search is not None
    at = bounds.first_too_much(table, bounds.windows)

    assert bounds.windows(table, at) > 1 >= bounds.windows(table, at - table.search.step)


def test_every_table_that_is_bounded_has_a_metric_that_the_bound_is_known_for() -> None:
    """TaiChi's count whole requests, as vLLM does."""
    metrics = {}
    for name in names():
        table = read(TABLES / f"{name}.toml")
        if table.search is not None and table.search.lasts is None:
            assert table.knee is not None
            metrics[name] = table.knee.metric or table.metrics[0]

    assert set(metrics.values()) <= bounds.WHOLE_REQUESTS.keys()
    assert all(
        [bounds.WHOLE_REQUESTS[metrics[name]] for name in metrics if name.startswith("taichi")]
    )
