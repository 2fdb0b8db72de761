"""The chart of README.md: the load that each policy carries where models share GPUs.

The figures are those of `benchmarks/RESULTS.md`, from the committed cells of the capacity tables.
"""

from __future__ import annotations

from typing import Final

from appliance.lab.experiments import scenario
from benchmarks.papers_tables import RESULTS, TABLES, Cells, Figure, PaperTable, knee, read
from tests.pictures.svg import SANS, box, drawing, words

AS_OF: Final = "2026-11-28"
"""When these cells last changed. If a test finds other figures in the chart, set it to that day."""
SHOWN: Final = (
    "capacity_azure",
    "capacity_arena",
    "capacity_aegaeon_0.5",
    "capacity_aegaeon_0.1",
)
OURS: Final = "appliance"

_WIDTH, _MARGIN, _GAP = 880, 20, 24
_PANEL: Final = (_WIDTH - 2 * _MARGIN - _GAP) / 2
_LABEL, _VALUE = 118, 84
"""Room left of a bar for the policy, and right of it for the figure."""
_TOP, _BAR, _PITCH = 64, 16, 22
_STYLE: Final = f"""
text {{ font: 13px {SANS}; fill: #24292f; }}
.title {{ font-size: 17px; font-weight: 600; }}
.head {{ font-weight: 600; }}
.small {{ font-size: 12px; fill: #57606a; }}
.card {{ fill: #fbfbf8; stroke: #d0d7de; }}
.ours {{ fill: #0550ae; }}
.other {{ fill: #9aa4af; }}
"""


def figures(name: str) -> dict[str, Figure]:
    """The largest load with enough tokens in time, by policy: ours first, then the largest."""
    table, cells = read(TABLES / f"{name}.toml"), Cells.read(RESULTS / f"{name}.json")
    metric = table.metrics[0]
    found = {policy: knee(table, cells, policy, metric) for policy in table.policies}
    order = sorted(found, key=lambda policy: (policy != OURS, -found[policy].value))
    return {policy: found[policy] for policy in order}


def lead(name: str) -> float:
    """Our load over that of the best other policy."""
    found = figures(name)
    return found.pop(OURS).value / max(figure.value for figure in found.values())


def capacity() -> str:
    """The whole chart, two panels wide."""
    panel_height = 50 + 4 * _PITCH + 14
    parts = [
        words(_MARGIN, 32, "Load carried with 90 % of the tokens in time", "title"),
        words(_MARGIN, 51, "TTFT 10 s, then 100 ms a token; longer is better", "small"),
    ]
    for number, name in enumerate(SHOWN):
        x = _MARGIN + number % 2 * (_PANEL + _GAP)
        parts += _panel(name, x, _TOP + number // 2 * panel_height)
    height = _TOP + (len(SHOWN) + 1) // 2 * panel_height + 34
    parts.append(words(_MARGIN, height - 16, _origin(), "small"))
    card = box(0.5, 0.5, _WIDTH - 1, height - 1, "card", 8)
    return drawing(_WIDTH, height, "Load carried by policy", _STYLE, [card, *parts])


def _origin() -> str:
    return (
        f"Lab: the daemon's own decisions on modelled GPUs, one seed, as of {AS_OF}."
        " Every line is a scheduling policy of this repository."
    )


def _panel(name: str, x: float, y: float) -> list[str]:
    """A workload: its name, its hardware, and a bar for each policy, from zero."""
    table, found = read(TABLES / f"{name}.toml"), figures(name)
    most = max(figure.value for figure in found.values())
    parts = [
        words(x, y + 20, table.title.removeprefix("Capacity: "), "head"),
        words(x, y + 37, f"{table.axis}; {_hardware(table)}", "small"),
    ]
    for number, (policy, figure) in enumerate(found.items()):
        top = y + 48 + number * _PITCH
        width = (_PANEL - _LABEL - _VALUE) * figure.value / most
        parts += [
            words(x, top + 13, policy, "head" if policy == OURS else ""),
            box(x + _LABEL, top, width, _BAR, "ours" if policy == OURS else "other", 2),
            words(x + _LABEL + round(width) + 6, top + 13, _told(figure), ""),
        ]
    return parts


def _hardware(table: PaperTable) -> str:
    assert table.search is not None, "a capacity is searched for"
    point = table.point(table.search.start)
    hardware = scenario.read(table.path(point), table.changes(point)).hardware
    return f"{hardware.count} {hardware.gpu}"


def _told(figure: Figure) -> str:
    return f"{figure.bound} {figure.value:.3g}".strip()
