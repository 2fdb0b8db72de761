"""Batches: files of requests that no client waits for, with the progress and outcome of each."""

from __future__ import annotations

from typing import Any

from tui.asking import Ask
from tui.drawing.amounts import duration, share
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonSource, Document
from tui.view import Action, Given, ViewContext, details

MOST = 100
"""The newest; as many as the daemon lists at once."""
PATH = f"/v1/batches?limit={MOST}"
OVER = ("completed", "failed", "expired", "cancelled")
TIMES = ("created_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at",
         "expired_at", "cancelling_at", "cancelled_at")  # fmt: skip


def _count(name: str) -> Any:
    return lambda key, row, context: row["request_counts"][name]


def _done(key: str, row: Document, context: ViewContext) -> float | None:
    """The share of requests that have an outcome."""
    counts = row["request_counts"]
    total: int = counts["total"]
    return (counts["completed"] + counts["failed"]) / total if total else None


def _age(key: str, row: Document, context: ViewContext) -> float:
    return max(0.0, context.now - float(row["created_at"]))


def _left(key: str, row: Document, context: ViewContext) -> float | None:
    """Until its window closes."""
    return None if row["status"] in OVER else max(0.0, row["expires_at"] - context.now)


def _status_style(status: Any, context: ViewContext) -> str:
    theme = context.theme
    if status in ("failed", "expired"):
        return theme.bad
    known = {"completed": theme.good, "cancelled": theme.dim, "cancelling": theme.warn}
    return known.get(status, theme.accent)


async def _cancel(source: DaemonSource, key: str, given: Given) -> str:
    batch = await source.ask("POST", f"/v1/batches/{key}/cancel")
    return f"{key} is {batch['status']}"


class BatchesView(TableView):
    """Those that were made with the dashboard's key, or without a key if it has none."""

    title = "Batches"
    names = ("batches", "b")
    asks = (Ask("GET", PATH, 2.0),)
    columns = (
        Column("BATCH", lambda key, row, context: key),
        Column("STATUS", member("status"), style=_status_style),
        Column("DONE", _done, share, right=True),
        Column("OF", _count("total"), right=True),
        Column("FAILED", _count("failed"), right=True,
               style=lambda value, context: context.theme.bad if value else context.theme.dim),
        Column("AGE", _age, duration, right=True),
        Column("CLOSES IN", _left, duration, right=True),
        Column("ENDPOINT", member("endpoint")),
        Column("PROMPTS", lambda key, row, context: row["usage"]["input_tokens"], right=True),
        Column("TOKENS", lambda key, row, context: row["usage"]["output_tokens"], right=True),
        Column("INPUT", member("input_file_id")),
    )  # fmt: skip
    actions = (
        Action("K", "cancel", "cancel batches", _cancel,
               "Cancel {}? What runs of it is ended, what waits does not run."),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        listed = context.state.answer(PATH).document or {}
        return {row["id"]: row for row in listed.get("data", ())}

    def nothing(self, context: ViewContext) -> str:
        answer = context.state.answer(PATH)
        return answer.refused or ("asking …" if answer.document is None else "there are none")

    def status(self) -> str:
        """Whether there are more than are listed, too."""
        more = self._view_context is not None and (
            self._view_context.state.answer(PATH).document or {}
        ).get("has_more")
        return f"{super().status()}, the newest" if more else super().status()

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        if row is None:
            return None
        ages = {
            name.removesuffix("_at"): f"{duration(max(0.0, context.now - row[name]))} ago"
            for name in TIMES
            if row.get(name) is not None
        }
        shown = {name: value for name, value in row.items() if not name.endswith("_at")}
        return details({**shown, **ages}, context.theme)

    def path(self, key: str) -> str | None:
        return f"/v1/batches/{key}"
