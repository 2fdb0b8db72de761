"""Models of a fleet: on which boxes each one is, and how many requests wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import Document
from tui.view import ViewContext, details


def by_model(boxes: Iterable[Document]) -> dict[str, Document]:
    """All models that boxes serve, by name: which boxes serve them, have them on a device, load
    them, or have them in the host cache alone. `waiting` is None if no box says it by model.
    O(names in the boxes' lists)."""
    found: dict[str, Document] = {}
    for box in boxes:
        waiting = box.get("waiting_by_model")
        places = {name: set(box.get(name, ())) for name in ("resident", "coming", "host")}
        for model in box.get("catalogue", ()):
            row = found.setdefault(
                model,
                {"waiting": None, "served": [], "resident": [], "coming": [], "host": []},
            )
            row["served"].append(box["box"])
            for place, models in places.items():  # the nearest one to a device
                if model in models:
                    row[place].append(box["box"])
                    break
            if waiting is not None:
                row["waiting"] = (row["waiting"] or 0) + waiting.get(model, 0)
    return dict(sorted(found.items()))


def _on(key: str, row: Document, context: ViewContext) -> str:
    return " ".join([*(f"↓{box}" for box in row["coming"]), *row["resident"]])


def _count(value: Any) -> str:
    return str(len(value))


class FleetModelsView(TableView):
    """By name, unless they are sorted."""

    title = "Models"
    names = ("models", "m")
    ended = "no box serves it any more"
    columns = (
        Column("MODEL", lambda key, row, context: key,
               style=lambda value, context: context.model_style(value)),
        Column("WAIT", member("waiting"), right=True),
        Column("BOXES", member("served"), _count, right=True),
        Column("ON DEVICES OF", _on),
        Column("IN HOST CACHE OF", lambda key, row, context: " ".join(row["host"])),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        return by_model(context.state.rows("boxes").values())

    def nothing(self, context: ViewContext) -> str:
        return "no box says which models it serves" if context.state.version else "asking …"

    def faded(self, key: str, row: Document, context: ViewContext) -> bool:
        """One that is on no device, and for which no request waits."""
        return not (row["resident"] or row["coming"] or row["waiting"])

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        return None if row is None else details(row, context.theme)
