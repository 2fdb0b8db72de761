"""The lines above and below a view: how the daemon is, which view this is, what keys do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.message import Message

from tui.counts import count
from tui.drawing.amounts import duration
from tui.drawing.canvas import Canvas, Line, plain
from tui.messages import DaemonSource
from tui.view import View, ViewContext

TITLES = ((None, " "), (4, " "), (3, ""), (2, ""), (1, ""))
"""How titles of views are written where there is less and less room: so many letters of them, None
for all, and what follows."""


def spread(left: Line, right: Line, width: int) -> Line:
    """Both on one line; the left one is cut where there is no room."""
    room = width - sum(cell_len(text) for text, _ in right)
    line: Line = []
    for text, style in left:
        text = text[: max(0, room)]
        line.append((text, style))
        room -= cell_len(text)
    return [*line, (" " * max(0, room), ""), *right]


class Header(Canvas):
    """The appliance in a line; in words, why there is nothing to see, if that is so."""

    def show(
        self, context: ViewContext, source: DaemonSource, clock: float, *, readonly: bool
    ) -> None:
        state, theme = context.state, context.theme
        mode = "" if source.live else "replay "
        mode += "read-only " if readonly and source.live else ""
        at = datetime.fromtimestamp(context.now).strftime("%H:%M:%S") if state.tree else ""
        right: Line = [(f" {mode}", theme.warn), (f"{at} ", theme.dim)]
        if state.lost is not None:
            wait = max(0.0, state.retry_at - clock)
            again = f"again in {wait:.0f} s" if wait > 0.5 else "trying again"
            what = "LOST" if state.tree else "NOT CONNECTED"
            left: Line = [(f" {what}: {state.lost}, {again} · {source.name} ", f"bold {theme.bad}")]
            self.paint([spread(left, right, self.size.width)])
            return
        self.paint([spread(self.summary(context, source), right, self.size.width)])

    def summary(self, context: ViewContext, source: DaemonSource) -> Line:
        """All of it in a line, when it is known."""
        state, theme = context.state, context.theme
        tree = state.tree
        ready = tree.get("readiness", {})
        text = (
            ("ready", theme.good)
            if ready.get("ok")
            else ("NOT READY: " + "; ".join(ready.get("reasons", ())), f"bold {theme.bad}")
        )
        instances, counts = state.rows("instances"), count(state)
        up = sum(row.get("state") == "up" for row in instances.values())
        age = duration(max(0.0, context.now - tree.get("started_unix_seconds", context.now)))
        return [
            (f" appliance {tree.get('version', '')} ", theme.strong),
            text,
            (f" · {up}/{len(instances)} up", "" if up == len(instances) else theme.bad),
            (f" · {len(state.rows('models'))} models", ""),
            (f" · {counts.running} running, {counts.waiting} waiting", ""),
            (f" · {age} · {source.name} ", theme.dim),
        ]


class Tabs(Canvas):
    """The views by their digits, the current one with its status."""

    class Chosen(Message):
        """A view was clicked."""

        def __init__(self, view: str) -> None:
            super().__init__()
            self.view = view

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[tuple[int, str]] = []

    def show(self, context: ViewContext, views: Sequence[View], current: View) -> None:
        width = self.size.width
        status = current.status()
        for letters, gap in TITLES:
            line = self._titles(context, views, current, status, letters, gap)
            if (over := cell_len(plain(line)) - width) <= 0:
                break
        else:
            room = max(0, cell_len(status) - over - 1)
            status = f"{set_cell_size(status, room)}…" if status else ""
            line = self._titles(context, views, current, status, letters, gap)
        self._ends, end = [], 0
        for view, (text, _) in zip(views, line, strict=True):
            end += cell_len(text)
            self._ends.append((end, view.names[0]))
        self.paint([line])

    def _titles(
        self,
        context: ViewContext,
        views: Sequence[View],
        current: View,
        status: str,
        letters: int | None,
        gap: str,
    ) -> Line:
        line: Line = []
        for place, view in enumerate(views, start=1):
            digit = f"{place % 10} " if place <= 10 else ""
            if view is current:
                text = f" ({status})" if status else ""
                line.append((f" {digit}{view.title}{text} ", "bold reverse"))
            else:
                line.append((f" {digit}{view.title[:letters]}{gap}", context.theme.dim))
        return line

    def on_click(self, event: events.Click) -> None:
        event.stop()
        for end, name in self._ends:
            if event.x < end:
                self.post_message(self.Chosen(name))
                return


class Hints(Canvas):
    """The keys that matter most here, as many as there is room for; `?` shows all of them."""

    def show(self, context: ViewContext, view: View, *, readonly: bool) -> None:
        keys = [("?", "help"), (":", "command")]
        keys += [(key, text) for key, text in view.help]
        if not readonly:
            keys += [(action.key, action.name) for action in view.actions]
        if view.sorts():
            keys += [("/", "filter"), ("s", "sort")]
            keys += [("Enter", "detail")] if "Enter" not in dict(view.help) else []
        keys.insert(1, ("q", "quit"))
        self.paint([_fitting(keys, self.size.width, context)])


def _fitting(keys: Sequence[tuple[str, str]], width: int, context: ViewContext) -> Line:
    """Whole hints only: a key is never without its word."""
    line: Line = []
    for key, text in keys:
        hint: Line = [(f" {key}", f"bold {context.theme.accent}"), (f" {text} ", context.theme.dim)]
        if cell_len(plain(line)) + cell_len(plain(hint)) > width:
            break
        line += hint
    return line
