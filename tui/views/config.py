"""Config: what is in force, what the files say otherwise, and what that needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import msgspec

from tui.asking import Ask
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonSource, Document
from tui.view import Action, Given, ViewContext, details

IN_FORCE = "/api/config"
CHECK = "/api/config/check"
CHANGES = (
    "adapters_changed",
    "config_reloaded",
    "model_added",
    "model_changed",
    "model_removed",
    "policies_chosen",
)


def _leaves(table: Document, at: str) -> Iterator[tuple[str, object]]:
    """Keys as the daemon words them, models by name."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}{key}.")
        elif key == "model" and not at:
            for model in value:
                yield from _leaves(model, f"model.{model['name']}.")
        else:
            yield f"{at}{key}", value


def _word(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _style(row_member: Any, context: ViewContext) -> str:
    theme = context.theme
    return {"reload": theme.good, "restart": theme.warn, "correction": theme.bad}.get(
        row_member, ""
    )


async def _reload(source: DaemonSource, key: str, given: Given) -> str:
    done = await source.ask("POST", "/api/config/reload")
    return f"{len(done['applied'])} applied, {len(done['restart'])} wait for a restart"


class ConfigView(TableView):
    """A row for each key: first what is wrong in the files, then what differs, then the rest."""

    title = "Config"
    names = ("config", "c")
    asks = (Ask("GET", IN_FORCE, 10.0, CHANGES), Ask("POST", CHECK, 5.0, CHANGES))
    columns = (
        Column("KEY", member("key")),
        Column("NOW", lambda key, row, context: row["now"], _word),
        Column("NEEDS", member("needs"), style=_style),
        Column("FILES", member("files"), style=lambda value, context: context.theme.warn),
    )
    actions = (
        Action("R", "reload", "apply what the files say", _reload,
               "Apply what the files say? What cannot be applied now waits for a restart.",
               each_row=False),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        in_force = context.state.answer(IN_FORCE).document
        check = context.state.answer(CHECK).document or {}
        rows: dict[str, Document] = {}
        for problem in check.get("problems", ()):
            where = f"{PurePath(problem['file']).name}:{problem['line']}"
            rows[f"{where} {problem['key']}"] = {
                "key": problem["key"], "now": None, "needs": "correction",
                "files": f"{where}: {problem['wrong']}; {problem['remedy']}",
            }  # fmt: skip
        for change in check.get("changes", ()):
            rows[change["key"]] = {
                "key": change["key"], "now": change["old"], "needs": change["applies"],
                "files": _word(change["new"]),
            }  # fmt: skip
        if in_force is not None:
            for key, value in _leaves(in_force["config"], ""):
                rows.setdefault(key, {"key": key, "now": value, "needs": "", "files": ""})
        return rows

    def nothing(self, context: ViewContext) -> str:
        return context.state.answer(IN_FORCE).refused or "asking …"

    def status(self) -> str:
        """How much differs, too."""
        differing = sum(1 for _, row in self._shown if row["needs"])
        return f"{super().status()}, {differing} differ" if differing else super().status()

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        if row is None:
            return None
        in_force = context.state.answer(IN_FORCE).document or {}
        return details({**row, "read from": in_force.get("files", [])}, context.theme)

    def path(self, key: str) -> str | None:
        return IN_FORCE
