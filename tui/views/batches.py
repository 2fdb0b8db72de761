"""Batches: files of requests that no client waits for, with the progress and outcome of each."""

from __future__ import annotations

from typing import Any

from tui.asking import Ask
from tui.drawing.amounts import duration, share
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import Document, Source
from tui.view import Action, Given, Sight, told

MOST = 100
"""The newest; as many as the daemon lists at once."""
PATH = f"/v1/batches?limit={MOST}"
OVER = ("completed", "failed", "expired", "cancelled")
TIMES = ("created_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at",
         "expired_at", "cancelling_at", "cancelled_at")  # fmt: skip


def _count(name: str) -> Any:
    return lambda key, row, sight: row["request_counts"][name]


def _done(key: str, row: Document, sight: Sight) -> float | None:
    """The share of requests that have an outcome."""
    counts = row["request_counts"]
    total: int = counts["total"]
    return (counts["completed"] + counts["failed"]) / total if total else None


def _age(key: str, row: Document, sight: Sight) -> float:
    return max(0.0, sight.now - float(row["created_at"]))


def _left(key: str, row: Document, sight: Sight) -> float | None:
    """Until its window closes."""
    return None if row["status"] in OVER else max(0.0, row["expires_at"] - sight.now)


def _status_style(status: Any, sight: Sight) -> str:
    look = sight.look
    if status in ("failed", "expired"):
        return look.bad
    known = {"completed": look.good, "cancelled": look.dim, "cancelling": look.warn}
    return known.get(status, look.accent)


async def _cancel(source: Source, key: str, given: Given) -> str:
    batch = await source.ask("POST", f"/v1/batches/{key}/cancel")
    return f"{key} is {batch['status']}"


class Batches(TableView):
    """Those that were made with the dashboard's key, or without a key if it has none."""

    title = "Batches"
    names = ("batches", "b")
    asks = (Ask("GET", PATH, 2.0),)
    columns = (
        Column("BATCH", lambda key, row, sight: key),
        Column("STATUS", member("status"), style=_status_style),
        Column("DONE", _done, share, right=True),
        Column("OF", _count("total"), right=True),
        Column("FAILED", _count("failed"), right=True,
               style=lambda value, sight: sight.look.bad if value else sight.look.dim),
        Column("AGE", _age, duration, right=True),
        Column("CLOSES IN", _left, duration, right=True),
        Column("ENDPOINT", member("endpoint")),
        Column("PROMPTS", lambda key, row, sight: row["usage"]["input_tokens"], right=True),
        Column("TOKENS", lambda key, row, sight: row["usage"]["output_tokens"], right=True),
        Column("INPUT", member("input_file_id")),
    )  # fmt: skip
    actions = (
        Action("K", "cancel", "cancel batches", _cancel,
               "Cancel {}? What runs of it is ended, what waits does not run."),
    )  # fmt: skip

    def rows(self, sight: Sight) -> dict[str, Document]:
        listed = sight.state.answer(PATH).document or {}
        return {row["id"]: row for row in listed.get("data", ())}

    def nothing(self, sight: Sight) -> str:
        answer = sight.state.answer(PATH)
        return answer.refused or ("asking …" if answer.document is None else "there are none")

    def status(self) -> str:
        """Whether there are more than are listed, too."""
        more = self._sight is not None and (self._sight.state.answer(PATH).document or {}).get(
            "has_more"
        )
        return f"{super().status()}, the newest" if more else super().status()

    def detail(self, key: str, sight: Sight) -> list[Line] | None:
        row = self.rows(sight).get(key)
        if row is None:
            return None
        ages = {
            name.removesuffix("_at"): f"{duration(max(0.0, sight.now - row[name]))} ago"
            for name in TIMES
            if row.get(name) is not None
        }
        shown = {name: value for name, value in row.items() if not name.endswith("_at")}
        return told({**shown, **ages}, sight.look)

    def path(self, key: str) -> str | None:
        return f"/v1/batches/{key}"
