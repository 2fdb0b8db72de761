"""Events: what happened, the newest first."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView
from tui.messages import Document
from tui.view import ViewContext, details

BAD = ("instance_lost", "model_failed", "request_rejected", "missed")
GOOD = ("instance_up", "model_added", "config_reloaded", "policies_chosen")


def _time(value: float) -> str:
    return datetime.fromtimestamp(value).strftime("%H:%M:%S")


def _kind_style(kind: str, context: ViewContext) -> str:
    theme = context.theme
    return theme.bad if kind in BAD else theme.good if kind in GOOD else theme.accent


def _facts(key: str, row: Document, context: ViewContext) -> str:
    facts: dict[str, Any] = row["facts"]
    return " ".join(f"{name}={_fact(value)}" for name, value in facts.items())


def _fact(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class EventsView(TableView):
    """As `appliance logs` prints them; missed ones are marked as missing."""

    title = "Events"
    names = ("events", "logs", "e")
    columns = (
        Column("TIME", lambda key, row, context: row["unix_seconds"], _time,
               lambda value, context: context.theme.dim),
        Column("EVENT", lambda key, row, context: row["kind"], style=_kind_style),
        Column("FACTS", _facts),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        newest_first = reversed(context.state.notices)
        return {str(row.get("number", f"-{row['unix_seconds']}")): row for row in newest_first}

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        return None if row is None else details(row, context.theme)
