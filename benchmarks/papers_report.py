"""The section of `benchmarks/RESULTS.md` on the papers' tables, from the committed cells alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.papers_tables import (
    HERE,
    RESULTS,
    TABLES,
    Cells,
    Claim,
    Figure,
    PaperTable,
    claimed,
    difference,
    knee,
    names,
    read,
)

DOCUMENT = HERE / "RESULTS.md"
BEGIN, END = "<!-- papers -->\n", "<!-- /papers -->\n"

CALLED = {
    "token_attainment": "tokens in time",
    "time_attainment": "seconds covered",
    "request_attainment": "requests with both in time",
    "ttft_attainment": "requests with TTFT in time",
    "tpot_attainment": "requests with TPOT in time",
}


def section() -> str:
    """Every table, in the order of the names."""
    return "\n".join(_table(name, read(TABLES / f"{name}.toml")) for name in names())


def write(path: Path = DOCUMENT) -> None:
    """Put the section where its two marks are."""
    path.write_text(placed(path.read_text(encoding="utf-8"), section()), encoding="utf-8")


def placed(document: str, made: str) -> str:
    """The document with `made` between the marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + "\n" + made + "\n" + END + after


def _table(name: str, table: PaperTable) -> str:
    cells = Cells.read(RESULTS / f"{name}.json")
    lines = [f"### {table.title}", "", f"{table.source}: {table.says}", "", _origin(name, table)]
    for metric in table.metrics:
        lines += ["", *_curves(table, cells, metric)] if table.points else []
    if table.search is not None:
        lines += ["", *_found(table, cells)]
    if table.claims:
        lines += ["", "| | ours | the paper | difference | |", "|---|---|---|---|---|"]
        lines += [_claim(table, cells, claim) for claim in table.claims]
    for note in table.notes:
        lines += ["", note.strip()]
    return "\n".join(lines) + "\n"


def _origin(name: str, table: PaperTable) -> str:
    seeds = ", ".join(map(str, table.seeds))
    played = dict.fromkeys(point.scenario or table.scenario for point in table.points)
    scenarios = [file for file in (played or {table.scenario: None}) if file is not None]
    where = ", ".join(f"`benchmarks/scenarios/{file}`" for file in scenarios)
    files = f"`benchmarks/papers/{name}.toml`"
    if table.computed is not None:
        return f"Computed by `{table.computed}` of `benchmarks/papers_computed.py`; {files}."
    plural = "s" if len(table.seeds) > 1 else ""
    return f"{where}, seed{plural} {seeds}; {files}."


def _curves(table: PaperTable, cells: Cells, metric: str) -> Sequence[str]:
    """A row for each policy; a column for each point, and one for the knee."""
    points = [point.at for point in table.points]
    asked = table.knee
    with_knee = asked is not None and asked.metric in (None, metric)
    head = [f"{_called(metric)}; {table.axis}:", *(f"{at:g}" for at in points)]
    if with_knee and asked is not None:
        per = "" if asked.per == 1 else f", per {asked.per:g}"
        head.append(f"{asked.sense} at {asked.target:.0%}{per}")
    rows = [_row(head), "|---|" + "---|" * (len(head) - 1)]
    for policy in table.policies:
        row = [f"`{policy}`", *(_value(metric)(cells.value(at, policy, metric)) for at in points)]
        if with_knee:
            row.append(_figure(knee(table, cells, policy, metric)))
        rows.append(_row(row))
    return rows


def _found(table: PaperTable, cells: Cells) -> Sequence[str]:
    """What a search found for each policy, and what became of the largest load that was enough."""
    asked = table.knee
    assert asked is not None, "a search is for the table's knee"
    metric = asked.metric or table.metrics[0]
    head = ["", f"{table.axis} at {asked.target:.0%}", f"`{table.policies[0]}` over it"]
    at_knee = ["busy_share", "ttft_attainment", "switches"]
    rows = [_row([*head, *(_called(name) for name in at_knee)]), "|---|" + "---|" * 5]
    first = knee(table, cells, table.policies[0], metric)
    for policy in table.policies:
        figure = knee(table, cells, policy, metric)
        good = figure.least * asked.per
        enough = [at for at in cells.points(policy) if at <= good]
        shown = [
            _value(name)(cells.value(enough[-1], policy, name)) if enough else "-"
            for name in at_knee
        ]
        rows.append(_row([f"`{policy}`", _figure(figure), _figure(first.over(figure)), *shown]))
    return rows


def _claim(table: PaperTable, cells: Cells, claim: Claim) -> str:
    ours = claimed(table, cells, claim)
    apart = difference(claim, ours)
    if claim.paper is not None:
        paper = f"{claim.paper:g}"
    else:
        low = "" if claim.least is None else f"≥ {claim.least:g}"
        high = "" if claim.most is None else f"≤ {claim.most:g}"
        paper = ", ".join(part for part in (low, high) if part)
    told = "as said" if apart == 0 else "-" if math.isnan(apart) else f"{apart:+.0%}"
    if ours.bound and not math.isnan(apart) and apart:
        told = f"{ours.bound} {told}"
    return _row([claim.what, _figure(ours), paper, told, " ".join(claim.why.split())])


def _row(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _called(metric: str) -> str:
    return CALLED.get(metric, metric.replace("_", " "))


def _figure(figure: Figure) -> str:
    if math.isnan(figure.value):
        return "-"
    return f"{figure.bound} {figure.value:.3g}".strip()


def _value(metric: str) -> Callable[[float], str]:
    def written(value: float) -> str:
        if math.isnan(value):
            return "-"
        if metric.endswith(("attainment", "share")):
            return f"{value:.3f}"
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"

    return written
