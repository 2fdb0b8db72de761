"""How many requests run and how many wait: the same for every view, and as the daemon counts."""

from __future__ import annotations

from typing import Final, NamedTuple

from tui.messages import Document
from tui.state import State

COMPUTED_PHASES: Final = frozenset({"prefilling", "running"})
"""As the daemon has it: a live request in another phase is waiting."""


class Counts(NamedTuple):
    """Of live requests."""

    running: int
    waiting: int
    oldest_arrived: float | None
    """When the oldest waiting one came, Unix seconds; None if none waits."""


def runs(request: Document) -> bool:
    """Whether a live request is computed now; else it waits."""
    return request["phase"] in COMPUTED_PHASES


def count(state: State) -> Counts:
    """O(live requests)."""
    requests = state.rows("requests").values()
    waiting = [row["arrived_unix_seconds"] for row in requests if not runs(row)]
    return Counts(len(requests) - len(waiting), len(waiting), min(waiting, default=None))
