"""`appliance fleet status`: a table of boxes, from what each says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from appliance.fleet.box_addresses import Box
from appliance.fleet.endpoints import Polled, why_not
from appliance.fleet.known_boxes import read_load
from appliance.units import human

COLUMNS = ("box", "state", "resident", "coming", "waiting", "running", "oldest", "free", "in time")


def rows(boxes: Sequence[Box], answers: Mapping[str, Polled | None]) -> list[tuple[str, ...]]:
    """One for each box, in their order. Raises `FleetError` if the key opens none of them."""
    return [_row(box, answers[box.name]) for box in boxes]


def all_take(boxes: Sequence[Box], answers: Mapping[str, Polled | None]) -> bool:
    """Whether every box takes requests."""
    return all([(polled := answers[box.name]) and why_not(polled) is None for box in boxes])


def table(lines: Sequence[tuple[str, ...]]) -> Table:
    """For a terminal."""
    made = Table(*COLUMNS, box=None, pad_edge=False)
    for line in lines:
        made.add_row(*line)
    return made


def _row(box: Box, polled: Polled | None) -> tuple[str, ...]:
    if polled is None:
        return (box.name, "no answer", *[""] * (len(COLUMNS) - 2))
    state = why_not(polled) or "takes requests"
    if polled.load_status != 200:
        return (box.name, state, *[""] * (len(COLUMNS) - 2))
    load = read_load(polled.load)
    return (
        box.name,
        state,
        " ".join(sorted(load.resident)),
        " ".join(sorted(load.coming)),
        str(load.waiting),
        str(load.running),
        f"{load.queue_age_seconds:.1f} s",
        human(load.pool_free_bytes),
        "" if load.attainment is None else f"{load.attainment:.0%}",
    )
