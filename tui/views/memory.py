"""Memory map: the pool of each instance cut in cells, each coloured by who has it; the host below.

The owner of each slab is asked for, of the pools on the screen. Where the answer lacks it, as in a
recording, cells are in the order of their owners, of whom the state says how much they have.
"""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult

from tui.asking import Ask
from tui.drawing.amounts import size
from tui.drawing.canvas import Canvas, Line
from tui.messages import Document
from tui.pools import Pool, PoolPart, counted, mapped
from tui.view import View, ViewContext, details

GLYPHS = {
    "weights": "█", "loading": "▚", "kv": "▓", "moving": "▞", "runtime": "▒", "free": "·",
}  # fmt: skip
MOST_LINES = 6
"""Of cells, of one pool."""
LEGEND = (("weights", "weights"), ("kv", "KV"), ("free", "free"))
ASKED_EVERY_SECONDS = 1.0
HOST = "host cache"


class MemoryView(View):
    """A block for each pool, and one for the host cache."""

    title = "Memory"
    names = ("memory", "mem", "slabs")
    help = (("↑ ↓", "pool"),)

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._view_context: ViewContext | None = None
        self._place = 0
        self._drawn: dict[str, tuple[Document, int, Pool]] = {}
        """Of each answer what was made of it: an answer is looked at several times."""

    def compose(self) -> ComposeResult:
        yield self._canvas

    def show(self, context: ViewContext) -> None:
        self._view_context = context
        width, height = max(1, self._canvas.size.width), self._canvas.size.height
        names = self._names(context)
        self._place = max(0, min(self._place, len(names) - 1))
        legend: Line = []
        for kind, word in LEGEND:
            legend += [(GLYPHS[kind] * 2, context.theme.dim), (f" {word}   ", context.theme.dim)]
        ways = GLYPHS["loading"] + GLYPHS["moving"]
        legend.append((f"{ways} on their way", context.theme.dim))
        room = max(3, height - 1)
        each = max(3, min(MOST_LINES + 3, room // max(1, min(len(names), room // 4))))
        fit = max(1, room // each)
        top = max(0, min(self._place - fit + 1, len(names) - fit))
        seen = names[top : top + fit]
        self.asks = tuple(Ask("GET", _path(name), ASKED_EVERY_SECONDS) for name in seen)
        lines = [legend]
        for place, name in enumerate(seen, top):
            pool = self._pool(name, context, width * max(1, each - 3))
            lines += self._block(pool, context, width, each, here=place == self._place)
        self._canvas.paint(lines)

    def _names(self, context: ViewContext) -> list[str]:
        host = [HOST] if context.state.tree.get("host_bytes") else []
        return [*(f"instance {key}" for key in context.state.rows("instances")), *host]

    def _pool(self, name: str, context: ViewContext, room: int | None = None) -> Pool:
        """With at most `room` cells; with any number of them if it is not drawn."""
        path = _path(name)
        document, refused = context.state.answer(path)
        if document is not None and not refused:
            known = self._drawn.get(path)
            if known is None or known[0] is not document or room not in (None, known[1]):
                pool = mapped(name, document, room or 1, host=name == HOST)
                known = self._drawn[path] = (document, room or 1, pool)
            return known[2]
        if name == HOST:
            return counted(name, context.state.tree.get("host_bytes", {}), set(), room or 1)
        key = name.removeprefix("instance ")
        loading = {
            model
            for model, row in context.state.rows("models").items()
            if row.get("residency", {}).get(key) == "loading"
        }
        row = context.state.rows("instances").get(key, {})
        return counted(name, row.get("pool_bytes", {}), loading, room or 1)

    def _block(
        self, pool: Pool, context: ViewContext, width: int, height: int, *, here: bool
    ) -> list[Line]:
        theme = context.theme
        whole = sum(part.amount for part in pool.parts)
        title: Line = [
            (f" {pool.name} ", theme.cursor if here else theme.strong),
            (f" {size(whole)}, {size(pool.parts[-1].amount)} free", theme.dim),
        ]
        if pool.scale:
            title.append((f", {pool.scale}", theme.dim))
        owned: Line = []
        for part in sorted(pool.parts[:-1], key=lambda part: -part.amount):
            text = f"{GLYPHS[part.kind]} {_label(part)} {size(part.amount)}  "
            owned.append((text, _style(part, context)))
        lines: list[Line] = [title, owned]
        for row in range(max(1, height - 3)):
            lines.append(_line(pool.cells[row * width : (row + 1) * width], context))
        return [*lines, []]

    def current(self) -> tuple[str, Document] | None:
        if self._view_context is None or not (names := self._names(self._view_context)):
            return None
        pool = self._pool(names[min(self._place, len(names) - 1)], self._view_context)
        return pool.name, {f"{part.kind} {part.of}".strip(): part.amount for part in pool.parts}

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        if key not in self._names(context):
            return None
        parts = self._pool(key, context).parts
        return details({f"{p.kind} {p.of}".strip(): size(p.amount) for p in parts}, context.theme)

    def path(self, key: str) -> str | None:
        return _path(key)

    def table(self) -> list[list[str]]:
        """A row for each owner."""
        context = self._view_context
        pools = (
            [] if context is None else [self._pool(name, context) for name in self._names(context)]
        )
        return [
            ["pool", "kind", "model", "bytes"],
            *([pool.name, kind, of, str(n)] for pool in pools for kind, of, n in pool.parts),
        ]

    def on_key(self, event: events.Key) -> None:
        by = {"up": -1, "k": -1, "down": 1, "j": 1}.get(event.key)
        if by is not None and self._view_context is not None:
            event.stop()
            self._place += by
            self.show(self._view_context)

    def on_resize(self) -> None:
        if self._view_context is not None:
            self.show(self._view_context)


def _path(name: str) -> str:
    if name == HOST:
        return "/api/host/slabs"
    return f"/api/instances/{name.removeprefix('instance ')}/slabs"


def _label(part: PoolPart) -> str:
    return part.of or {"kv": "KV"}.get(part.kind, part.kind)


def _style(part: PoolPart, context: ViewContext) -> str:
    theme, number = context.theme, context.state.numbers.get(part.of)
    if number is not None:
        return theme.model(number)
    return {"kv": theme.kv, "runtime": theme.graphs}.get(part.kind, theme.dim)


def _line(cells: list[PoolPart], context: ViewContext) -> Line:
    """Cells alike as one piece."""
    line: Line = []
    styles: dict[PoolPart, str] = {}
    for part in cells:
        if part not in styles:
            styles[part] = _style(part, context)
        glyph, style = GLYPHS[part.kind], styles[part]
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + glyph, style)
        else:
            line.append((glyph, style))
    return line
