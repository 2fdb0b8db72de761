"""The most that any policy could carry in the tables that search for it, beside what ours does.

    python -m benchmarks.bounds [--json FILE] [--only TEXT]

For every table of `benchmarks/papers/` with a search: the loads that were found for `appliance` and
for the best of the others, and the first load of its axis that is too much for the box by either
bound. Tables of traces are left out, and with --only those without TEXT in
their names; their rows in FILE stay.

- "bound" has every step as full as any could be (`lab.experiments.lower_bound`). It counts the
  work of all requests, times the share that has to be in time.
- "windows" has batches as large as arrivals allow (`lab.experiments.window_bound`). It counts what
  the table's metric counts: of the requests after the warm-up, what is due by the end of the run.
  What may be late is what takes most.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.lab.experiments import scenario
from appliance.lab.experiments.lower_bound import least_busy_share
from appliance.lab.experiments.run import Setting
from appliance.lab.experiments.window_bound import least_work_seconds
from benchmarks.papers_report import knee
from benchmarks.papers_tables import RESULTS, TABLES, Cells, Figure, PaperTable, names, read
from benchmarks.provenance import made

OURS = "appliance"
WHOLE_REQUESTS = {
    "token_attainment": False,
    "request_attainment": True,
    "vllm_attainment": True,
}
"""Metrics that the bound is known for, and whether all of a request counts or nothing of it."""


Share = Callable[[PaperTable, float], float]
"""Of all instances' time, what a load of the table takes at least."""


def first_too_much(table: PaperTable, share: Share) -> float:
    """The first load, in steps of the search, that takes more time than there is."""
    assert table.search is not None
    step = table.search.step
    low, high = 0, 1
    while share(table, round(high * step, 6)) <= 1:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if share(table, round(middle * step, 6)) <= 1:
            low = middle
        else:
            high = middle
    return round(high * step, 6)


def largest_batches(table: PaperTable, at: float) -> float:
    """With every step of a model as full as any could be."""
    assert table.knee is not None, "a search is for the table's knee"
    _, setting = _setting(table, at)
    return least_busy_share(setting) * table.knee.target


def windows(table: PaperTable, at: float) -> float:
    """With batches as large as arrivals allow."""
    assert table.knee is not None, "a search is for the table's knee"
    since, setting = _setting(table, at)
    metric = table.knee.metric or table.metrics[0]
    seconds = least_work_seconds(
        setting,
        table.knee.target,
        since_seconds=since,
        whole_requests=WHOLE_REQUESTS[metric],
    )
    return seconds / (setting.box.instances * (setting.seconds - since))


def _setting(table: PaperTable, at: float) -> tuple[float, Setting]:
    """Of the table's first seed, with the end of its warm-up."""
    point = table.point(at)
    path = table.path(point)
    chosen = scenario.read(path, table.changes(point))
    return chosen.warmup_seconds, chosen.setting(table.seeds[0], path.parent)


def carried(table: PaperTable, cells: Cells, policy: str) -> Figure | None:
    """What was found for a policy, with its bound if the axis ended before."""
    assert table.knee is not None
    return knee(table, cells, policy, table.knee.metric or table.metrics[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="tables with this in their names")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.json and options.only and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    for name in names():
        table = read(TABLES / f"{name}.toml")
        if options.only not in name or table.search is None or table.search.lasts is not None:
            continue  # a trace that is played faster has an end, after which all could be done
        cells = Cells.read(RESULTS / f"{name}.json")
        found = {policy: carried(table, cells, policy) for policy in table.policies}
        others = {p: one for p, one in found.items() if p != OURS and one is not None}
        best = max(others, key=lambda policy: others[policy].value)
        ours, most = found[OURS], first_too_much(table, largest_batches)
        assert ours is not None
        row = {
            "table": name,
            "axis": table.axis,
            OURS: f"{ours.bound}{ours.value:.3g}",
            "best other": best,
            "it": f"{others[best].bound}{others[best].value:.3g}",
            "bound": most,
            "of it": round(ours.value / most, 3),
            "windows": first_too_much(table, windows),
        }
        rows = sorted([*(r for r in rows if r["table"] != name), row], key=lambda r: r["table"])
        print(" | ".join(str(value) for value in row.values()), flush=True)
        if options.json:
            document = {**made(), "rows": rows}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
