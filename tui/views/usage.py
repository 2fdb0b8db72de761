"""Usage: what each key had of each model, from the daemon's ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual import events

from tui.asking import Ask
from tui.drawing.amounts import duration
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import Document
from tui.view import ViewContext, details

EVERY_SECONDS = 10.0
GROUPINGS = (("key", "model"), ("key",), ("model",), ("day",), ("organization",))
"""What is added up by, in the order of `b`."""
PERIODS = (("30d", "30 days"), ("7d", "7 days"), ("0d", "today"), ("", "all days"))
"""The first day as it is asked for, and in words; in the order of `p`."""
NO_KEY, NO_ORGANIZATION = "(no key)", "(none)"


def _name(dimension: str) -> Callable[[str, Document, ViewContext], Any]:
    """A key, an organization, a model or a day; nothing where that is not asked for."""

    def value(key: str, row: Document, context: ViewContext) -> str:
        return "" if row.get(dimension) is None else _shown(row, dimension)

    return value


def _shown(row: Document, dimension: str) -> str:
    return str(row[dimension]) or (NO_ORGANIZATION if dimension == "organization" else NO_KEY)


DIMENSIONS = {
    "key": Column("KEY", _name("key")),
    "model": Column("MODEL", _name("model"),
                    style=lambda value, context: context.model_style(value)),
    "day": Column("DAY", _name("day")),
    "organization": Column("ORGANIZATION", _name("organization")),
}  # fmt: skip
AMOUNTS = (
    Column("REQUESTS", member("requests"), right=True),
    Column("INPUT", member("input_tokens"), right=True),
    Column("OUTPUT", member("output_tokens"), right=True),
    Column("GPU TIME", member("gpu_seconds"), duration, right=True),
    Column("WAITED", member("waiting_seconds"), duration, right=True),
    Column("CACHED", member("cached_tokens"), right=True),
)


class UsageView(TableView):
    """In the order of the daemon, unless it is sorted. `b` and `p` change what is added up."""

    title = "Usage"
    names = ("usage", "u")
    help = (("b", "group by"), ("p", "period"))

    def __init__(self) -> None:
        super().__init__()
        self._by = 0
        self._period = 0
        self._choose()

    def _choose(self) -> None:
        """Show what is added up by now, and ask for it."""
        by = GROUPINGS[self._by]
        self.columns = (*(DIMENSIONS[name] for name in by), *AMOUNTS)
        self.asks = (Ask("GET", self._path, EVERY_SECONDS),)

    @property
    def _path(self) -> str:
        since = PERIODS[self._period][0]
        by = ",".join(GROUPINGS[self._by])
        return f"/api/usage?by={by}" + (f"&since={since}" if since else "")

    def rows(self, context: ViewContext) -> dict[str, Document]:
        listed = context.state.answer(self._path).document or {}
        by = GROUPINGS[self._by]
        return {" ".join(_shown(row, name) for name in by): row for row in listed.get("rows", ())}

    def nothing(self, context: ViewContext) -> str:
        """Of a daemon that keeps no ledger: how to turn it on."""
        answer = context.state.answer(self._path)
        return answer.refused or ("asking …" if answer.document is None else "nothing was used")

    def status(self) -> str:
        return f"{super().status()}, {PERIODS[self._period][1]}"

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        """All amounts, and the budget of the key, or organization, in this month if it has one."""
        row = self.rows(context).get(key)
        if row is None:
            return None
        answer = context.state.answer(self._path).document or {}
        mine = [
            budget
            for name, budgets in (("key", "budgets"), ("organization", "organization_budgets"))
            for budget in answer.get(budgets, ())
            if budget[name] == row.get(name)
        ]
        return details(row | {"budget": mine} if mine else row, context.theme)

    def on_key(self, event: events.Key) -> None:
        if event.character == "b":
            self._by = (self._by + 1) % len(GROUPINGS)
        elif event.character == "p":
            self._period = (self._period + 1) % len(PERIODS)
        else:
            return
        event.stop()
        self._choose()
        self._widths.clear()
        self._again()
