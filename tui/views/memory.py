"""Memory map: the pool of each instance cut in cells, each coloured by who has it; the host below.

Cells stand for slabs, several where there is not room for all. They are in the order of their
owners, not of their addresses: mapping makes addresses meaningless.
"""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult

from tui.amounts import divide, size
from tui.canvas import Canvas, Line
from tui.messages import Document
from tui.view import Sight, View, told

GLYPHS = {"weights": "█", "loading": "▚", "kv": "▓", "free": "·"}
MOST_LINES = 6
"""Of cells, of one pool."""
LEGEND = (("weights", "weights"), ("loading", "on their way"), ("kv", "KV"), ("free", "free"))


def owners(row: Document, models: dict[str, Document], key: str) -> list[tuple[str, str, int]]:
    """Who has how many bytes of an instance's pool: kind, model, bytes; the free ones last."""
    found = []
    for owner, nbytes in row.get("pool_bytes", {}).items():
        kind, _, model = owner.partition(":")
        stage = models.get(model, {}).get("residency", {}).get(key)
        if kind == "weights" and stage == "loading":
            kind = "loading"
        if nbytes and kind != "free":
            found.append((kind, model, nbytes))
    found.sort(key=lambda one: (one[1], one[0]))
    return [*found, ("free", "", row.get("pool_bytes", {}).get("free", 0))]


def cells_of(parts: list[tuple[str, str, int]], count: int, sight: Sight) -> list[tuple[str, str]]:
    """`count` cells among owners: a glyph for the kind, the model's colour."""
    look, numbers = sight.look, sight.state.numbers
    cells: list[tuple[str, str]] = []
    shares = divide(count, (nbytes for _, _, nbytes in parts))
    for (kind, model, _), share in zip(parts, shares, strict=True):
        style = look.model(numbers.get(model, 0)) if model else look.dim
        cells += [(GLYPHS[kind], style)] * share
    return cells


class Memory(View):
    """A block for each pool, and one for the host cache."""

    title = "Memory"
    names = ("memory", "mem", "slabs")
    help = (("↑ ↓", "pool"),)

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._sight: Sight | None = None
        self._place = 0

    def compose(self) -> ComposeResult:
        yield self._canvas

    def show(self, sight: Sight) -> None:
        self._sight = sight
        width, height = max(1, self._canvas.size.width), self._canvas.size.height
        pools = self._pools(sight)
        self._place = max(0, min(self._place, len(pools) - 1))
        legend: Line = []
        for kind, word in LEGEND:
            legend += [(GLYPHS[kind] * 2, sight.look.dim), (f" {word}   ", sight.look.dim)]
        room = max(3, height - 1)
        each = max(3, min(MOST_LINES + 3, room // max(1, min(len(pools), room // 4))))
        fit = max(1, room // each)
        top = max(0, min(self._place - fit + 1, len(pools) - fit))
        lines = [legend]
        for place, (name, parts) in enumerate(pools[top : top + fit], top):
            lines += self._block(name, parts, sight, width, each, here=place == self._place)
        self._canvas.paint(lines)

    def _pools(self, sight: Sight) -> list[tuple[str, list[tuple[str, str, int]]]]:
        models = sight.state.rows("models")
        pools = [
            (f"instance {key}", owners(row, models, key))
            for key, row in sight.state.rows("instances").items()
        ]
        if host := sight.state.tree.get("host_bytes"):
            pools.append(("host cache", owners({"pool_bytes": host}, {}, "")))
        return pools

    def _block(
        self,
        name: str,
        parts: list[tuple[str, str, int]],
        sight: Sight,
        width: int,
        height: int,
        *,
        here: bool,
    ) -> list[Line]:
        look, numbers = sight.look, sight.state.numbers
        whole = sum(nbytes for _, _, nbytes in parts)
        rows = max(1, height - 3)
        title: Line = [
            (f" {name} ", look.cursor if here else look.strong),
            (f" {size(whole)}, {size(parts[-1][2])} free", look.dim),
        ]
        if whole:
            title.append((f", a cell is {size(whole / (rows * width))}", look.dim))
        owned: Line = []
        for kind, model, nbytes in sorted(parts[:-1], key=lambda one: -one[2]):
            style = look.model(numbers.get(model, 0)) if model else look.dim
            owned.append((f"{GLYPHS[kind]} {model or 'KV'} {size(nbytes)}  ", style))
        cells = cells_of(parts, rows * width, sight)
        lines: list[Line] = [title, owned]
        for row in range(rows):
            lines.append(_runs(cells[row * width : (row + 1) * width]))
        return [*lines, []]

    def current(self) -> tuple[str, Document] | None:
        if self._sight is None or not (pools := self._pools(self._sight)):
            return None
        name, parts = pools[min(self._place, len(pools) - 1)]
        return name, {f"{kind} {model}".strip(): nbytes for kind, model, nbytes in parts}

    def detail(self, key: str, sight: Sight) -> list[Line] | None:
        parts = dict(self._pools(sight)).get(key)
        if parts is None:
            return None
        sizes = {f"{kind} {model}".strip(): size(nbytes) for kind, model, nbytes in parts}
        return told(sizes, sight.look)

    def table(self) -> list[list[str]]:
        """A row for each owner."""
        pools = [] if self._sight is None else self._pools(self._sight)
        return [
            ["pool", "kind", "model", "bytes"],
            *([name, kind, model, str(n)] for name, parts in pools for kind, model, n in parts),
        ]

    def on_key(self, event: events.Key) -> None:
        by = {"up": -1, "k": -1, "down": 1, "j": 1}.get(event.key)
        if by is not None and self._sight is not None:
            event.stop()
            self._place += by
            self.show(self._sight)

    def on_resize(self) -> None:
        if self._sight is not None:
            self.show(self._sight)


def _runs(cells: list[tuple[str, str]]) -> Line:
    """Cells alike as one piece."""
    line: Line = []
    for glyph, style in cells:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + glyph, style)
        else:
            line.append((glyph, style))
    return line
