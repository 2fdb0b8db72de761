"""The dashboard of a fleet: the boxes and their models, in the dashboard's own frame."""

from __future__ import annotations

from typing import Any, ClassVar

from tui.app import Dashboard
from tui.drawing.bars import Header
from tui.drawing.canvas import Line
from tui.fleet.boxes import READY, BoxesView, counted, sums
from tui.fleet.models import FleetModelsView
from tui.messages import DaemonSource
from tui.view import View, ViewContext


class FleetHeader(Header):
    """The fleet in a line."""

    def summary(self, context: ViewContext, source: DaemonSource) -> Line:
        theme, rows = context.theme, context.state.rows("boxes").values()
        found, states = sums(rows), counted(rows)
        ready = states.pop(READY)
        others = "".join([f", {count} {state}" for state, count in states.items()])
        return [
            (" fleet ", theme.strong),
            (f"{ready} of {len(rows)} ready", theme.good if rows and not states else theme.warn),
            (others, f"bold {theme.bad}"),
            (f" · {found['running']} running, {found['waiting']} waiting", ""),
            (f" · {len(found['resident'])} models on devices", ""),
        ]


class FleetDashboard(Dashboard):
    """Ends with the box whose dashboard is wanted in `opened`, if that is why it ended."""

    VIEWS: ClassVar[tuple[type[View], ...]] = (BoxesView, FleetModelsView)
    HEADER: ClassVar[type[Header]] = FleetHeader

    def __init__(self, source: Any, *, at: str = "", **options: Any) -> None:
        """The cursor is on the box `at`, if there is one."""
        super().__init__(source, **options)
        self.opened: dict[str, Any] | None = None
        """Its row."""
        self._at = at

    def on_mount(self) -> None:
        """Textual calls the dashboard's own, too."""
        self.view.turn_to(self._at)

    def on_boxes_view_entered(self, message: BoxesView.Entered) -> None:
        row = self.state.rows("boxes").get(message.box)
        if row is None:
            return
        if not row["url"]:
            self.notify(
                "the front of a fleet does not say where its boxes are: "
                "appliance top --connect http://ADDRESS:PORT",
                severity="warning",
            )
            return
        self.opened = row
        self.exit()
