"""The most that any policy could carry in the tables that search for it, beside what ours does.

    python -m benchmarks.bounds [--json FILE]

For every table of `benchmarks/papers/` with a search: the first load of its axis at which even the
least work that could do (`lab.experiments.lower_bound`) does not fit the box, if what may be late
is not done at all; the loads that were found for `appliance` and for the best of the others.
Tables of traces are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from appliance.lab.experiments import scenario
from appliance.lab.experiments.lower_bound import least_busy_share
from benchmarks.papers_report import knee
from benchmarks.papers_tables import RESULTS, TABLES, Cells, Figure, PaperTable, names, read
from benchmarks.provenance import made

OURS = "appliance"


def bound(table: PaperTable) -> float:
    """The first load, in steps of the search, that is too much for any policy."""
    assert table.search is not None
    assert table.knee is not None, "a search is for the table's knee"
    step, target = table.search.step, table.knee.target
    low, high = 0, 1
    while _share(table, round(high * step, 6)) * target <= 1:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _share(table, round(middle * step, 6)) * target <= 1:
            low = middle
        else:
            high = middle
    return round(high * step, 6)


def _share(table: PaperTable, at: float) -> float:
    point = table.point(at)
    path = table.path(point)
    chosen = scenario.read(path, table.changes(point))
    return least_busy_share(chosen.setting(table.seeds[0], path.parent))


def carried(table: PaperTable, cells: Cells, policy: str) -> Figure | None:
    """What was found for a policy, with its bound if the axis ended before."""
    assert table.knee is not None
    return knee(table, cells, policy, table.knee.metric or table.metrics[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in names():
        table = read(TABLES / f"{name}.toml")
        if table.search is None or table.search.lasts is not None:
            continue  # a trace that is played faster has an end, after which all could be done
        cells = Cells.read(RESULTS / f"{name}.json")
        found = {policy: carried(table, cells, policy) for policy in table.policies}
        others = {p: one for p, one in found.items() if p != OURS and one is not None}
        best = max(others, key=lambda policy: others[policy].value)
        ours, most = found[OURS], bound(table)
        assert ours is not None
        row = {
            "table": name,
            "axis": table.axis,
            OURS: f"{ours.bound}{ours.value:.3g}",
            "best other": best,
            "it": f"{others[best].bound}{others[best].value:.3g}",
            "bound": most,
            "of it": round(ours.value / most, 3),
        }
        rows.append(row)
        print(" | ".join(str(value) for value in row.values()), flush=True)
    if options.json:
        document = {**made(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
