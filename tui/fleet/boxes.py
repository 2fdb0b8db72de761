"""Boxes: what each one does, how busy it is, and which models it has on its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from textual import events
from textual.message import Message

from tui.drawing.amounts import duration, share, size
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import Document
from tui.view import ViewContext, details
from tui.views.models import attainment_style

READY = "ready"
DRAINING = "draining"
ASKING = "asking"
"""A box that has not answered yet, since it is followed."""


def _state_style(state: Any, context: ViewContext) -> str:
    theme = context.theme
    if state in (READY, ASKING):
        return theme.good if state == READY else theme.dim
    return theme.warn if state == DRAINING else theme.bad


def counted(rows: Iterable[Document]) -> dict[str, int]:
    """How many boxes are in each state, those that are ready first."""
    counts = {READY: 0}
    for row in rows:
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    return counts


def sums(rows: Iterable[Document]) -> Document:
    """Of the boxes that say their load: requests and free memory added up, the age of the oldest
    queue, and the lowest attainment."""
    said = [row for row in rows if "waiting" in row]
    met = [row["attainment"] for row in said if row["attainment"] is not None]
    return {
        "waiting": sum([row["waiting"] for row in said]),
        "running": sum([row["running"] for row in said]),
        "queue_age_seconds": max([row["queue_age_seconds"] for row in said], default=0.0),
        "pool_free_bytes": sum([row["pool_free_bytes"] for row in said]),
        "attainment": min(met, default=None),
        "resident": sorted({model for row in said for model in row["resident"]}),
    }


def _on(key: str, row: Document, context: ViewContext) -> str:
    """Models that come, then those on devices; of a box without any, why."""
    if row.get("reason"):
        return str(row["reason"])
    coming = [f"↓{model}" for model in sorted(row.get("coming", ()))]
    return " ".join([*coming, *sorted(row.get("resident", ()))])


def _some(text: Callable[[Any], str]) -> Callable[[Any], str]:
    """Nothing of a box that does not say it."""
    return lambda value: "" if value is None else text(value)


class BoxesView(TableView):
    """In the order in which they were given, unless they are sorted."""

    title = "Boxes"
    names = ("boxes", "b")
    help = (("Enter", "dashboard of the box"), ("d", "detail"))
    ended = "it has left the fleet"
    columns = (
        Column("BOX", lambda key, row, context: key),
        Column("STATE", member("state"), style=_state_style),
        Column("WAIT", member("waiting"), right=True),
        Column("RUN", member("running"), right=True),
        Column("OLDEST", lambda key, row, context: row.get("queue_age_seconds") or None,
               _some(duration), right=True),
        Column("FREE", member("pool_free_bytes"), _some(size), right=True),
        Column("SLO", member("attainment"), share, attainment_style, right=True),
        Column("ON DEVICES", _on),
        Column("VERSION", member("version")),
        Column("ADDRESS", member("url")),
    )  # fmt: skip

    class Entered(Message):
        """The dashboard of a box is wanted."""

        def __init__(self, box: str) -> None:
            super().__init__()
            self.box = box

    def __init__(self) -> None:
        super().__init__()
        self._turned_to = ""
        """The cursor is to go there."""

    def rows(self, context: ViewContext) -> dict[str, Document]:
        return context.state.rows("boxes")

    def nothing(self, context: ViewContext) -> str:
        return "no box is in the fleet" if context.state.version else "asking …"

    def total(self, rows: list[Document]) -> Document | None:
        found = sums(rows)
        models = len(found.pop("resident"))
        words = f"{models} model{'s' if models != 1 else ''}"
        return found | {"state": f"{counted(rows)[READY]}/{len(rows)} {READY}", "reason": words}

    def enter(self, key: str) -> bool:
        self.post_message(self.Entered(key))
        return True

    def turn_to(self, word: str) -> None:
        self._turned_to = word

    def show(self, context: ViewContext) -> None:
        if self._turned_to in self.rows(context):  # at first there are none
            self._cursor, self._turned_to = self._turned_to, ""
        super().show(context)

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        return None if row is None else details(row, context.theme)

    def on_key(self, event: events.Key) -> None:
        row = self.current()
        if event.character == "d" and row is not None:
            event.stop()
            self.open(row[0], partial(self.detail, row[0]))
