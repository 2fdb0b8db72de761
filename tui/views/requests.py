"""Requests: those that are live, where they are on their way, and what they wait for."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tui.drawing.amounts import duration
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonSource, Document
from tui.view import Action, Given, ViewContext, details


def _age(key: str, row: Document, context: ViewContext) -> float:
    return max(0.0, context.now - float(row["arrived_unix_seconds"]))


def waits_for(key: str, row: Document, context: ViewContext) -> str | None:
    """Why it is not computed now, in a few words; None if it is."""
    reason = row.get("reason")
    if reason is None:
        return None
    behind = f" {reason['behind']}" if "behind" in reason else ""
    return str(reason["code"]).replace("_", " ") + behind


def _phase_style(phase: Any, context: ViewContext) -> str:
    theme = context.theme
    return {"running": theme.good, "prefilling": theme.accent, "preempted": theme.warn}.get(
        phase, theme.dim
    )


async def _cancel(source: DaemonSource, key: str, given: Given) -> str:
    done = await source.ask("DELETE", f"/api/requests/{quote(key, safe='')}")
    return f"cancelled {key} after {done['cancelled']['output_tokens']} tokens"


class RequestsView(TableView):
    """The oldest first, unless they are sorted."""

    title = "Requests"
    ended = "finished"
    names = ("requests", "r")
    columns = (
        Column("MODEL", member("model"), style=lambda value, context: context.model_style(value)),
        Column("PHASE", member("phase"), style=_phase_style),
        Column("AGE", _age, duration, right=True),
        Column("TOKENS", member("output_tokens"), right=True),
        Column("AT", member("instance"), right=True),
        Column("WAITS FOR", waits_for, style=lambda value, context: context.theme.warn),
        Column("ID", lambda key, row, context: key),
        Column("CLASS", member("request_class")),
        Column("PROMPT", member("prompt_tokens"), right=True),
        Column("MAX TOKENS", member("max_tokens"), right=True),
        Column("KV", member("kv")),
    )
    actions = (Action("K", "cancel", "cancel requests", _cancel, "Cancel {}? Clients see it."),)

    def rows(self, context: ViewContext) -> dict[str, Document]:
        return context.state.rows("requests")

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        if row is None:
            return None
        shown = {name: value for name, value in row.items() if name != "arrived_unix_seconds"}
        return details({**shown, "age": duration(_age(key, row, context))}, context.theme)

    def path(self, key: str) -> str | None:
        return f"/api/requests/{quote(key, safe='')}"
