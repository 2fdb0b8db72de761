"""Timeline: what each instance computes, loads and swaps, drawn over time.

one line for each lane of an instance      run    turns and prompts
from the left, which is earlier,           load   weights: loads, prefetches, fills, engines
to the right, which is now                 swap   KV caches, out and in
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import NamedTuple

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult

from tui.drawing.amounts import duration, size
from tui.drawing.canvas import Canvas, Line
from tui.history import PastSpans
from tui.messages import Document
from tui.view import View, ViewContext

LANES = ("run", "load", "swap")
LANE_OF = {
    "turn": "run", "prefill": "run", "build": "load", "fill": "load", "load": "load",
    "prefetch": "load", "swap_in": "swap", "swap_out": "swap",
}  # fmt: skip
MARKS = {
    "turn": "", "prefill": "▸", "build": "+", "fill": "=", "load": "↓", "prefetch": "⇣",
    "swap_in": "↓", "swap_out": "↑",
}  # fmt: skip
ZOOMS = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)
FIRST_ZOOM = 4
LABEL = 10
TICK_CELLS = 14
LEGEND = "▸ prefill  ↓ in  ↑ out  ⇣ prefetch  = from disk  + engine  · not kept"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""Of models, in the order in which they were met: what is too short for a name has its letter."""
LEAST_BAR = 3
"""Cells of a span that is drawn by itself; of shorter ones each cell shows what took most of it."""
UNKNOWN = "·"
CHOSEN_SHARE = 2.0
"""What is chosen is seen, whatever else is in its cells."""
EDGE_SHARE = 0.5
"""Of a cell, for the beginning of a bar: it is seen unless something else took most of the cell."""
LEAST_SHARE = 1e-6
"""Of a cell: what took no time is seen where nothing else is."""
MORE = 4
"""Cells for how many models more there are."""


class Lane(NamedTuple):
    """One line: an instance, and which of `LANES`."""

    instance: str
    name: str


class Bar(NamedTuple):
    """What is drawn in cells: a text from the `first` one on, or one glyph for each."""

    first: int
    text: str
    model: str
    chosen: bool


class TimelineView(View):
    """It follows the time until it is moved; `f` has it follow again."""

    title = "Timeline"
    names = ("timeline", "t")
    help = (("+ -", "zoom"), ("< >", "pan"), ("← →", "turn"), ("↑ ↓", "lane"), ("f", "follow"))

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._view_context: ViewContext | None = None
        self._zoom = FIRST_ZOOM
        self._right: float | None = None
        """The time at the right edge; None follows the time."""
        self._lanes: list[Lane] = []
        self._lane = 0
        self._top = 0
        self._chosen: str | None = None
        """Number of a span."""
        self._past = PastSpans()
        self._fetching = False

    def compose(self) -> ComposeResult:
        yield self._canvas

    # --- what is on the screen -------------------------------------------------------------------

    def show(self, context: ViewContext) -> None:
        self._view_context = context
        width, height = self._canvas.size
        self._lanes = [Lane(key, name) for key in context.state.rows("instances") for name in LANES]
        self._lane = max(0, min(self._lane, len(self._lanes) - 1))
        cells, seconds = max(10, width - LABEL), ZOOMS[self._zoom]
        right = self._edge(context, cells)
        self._look_back(context, right - seconds, right)
        drawn = self._drawn(context, right - seconds, right)
        room = max(1, height - 3)
        self._top = min(self._top, self._lane, max(0, len(self._lanes) - room))
        self._top = max(self._top, self._lane - room + 1)
        lines = [self._axis(context, right, seconds, cells)]
        for place, lane in enumerate(self._lanes[self._top : self._top + room], self._top):
            here = place == self._lane
            spans = drawn[lane]
            lines.append(
                [*self._title(context, lane, here=here),
                 *self._bars(context, spans, right - seconds, seconds / cells, cells)]
            )  # fmt: skip
        while len(lines) < height - 2:
            lines.append([])
        lines.append(_letters(context, drawn, width))
        lines.append([(LEGEND, context.theme.dim)])
        self._canvas.paint(lines)

    def _look_back(self, context: ViewContext, left: float, right: float) -> None:
        """Ask for what went on before the dashboard was opened, with some more around it."""
        if self._fetching or not self.source.live:
            return
        if self._past.lacks(context.state, left, right):
            self._fetching = True
            around = right - left
            until = min(right + around, context.now)
            self.run_worker(self._fetch(max(0.0, left - around), until))

    async def _fetch(self, since: float, until: float) -> None:
        try:
            await self._past.fetch(self.source, since, until)
        finally:
            self._fetching = False
        if self._view_context is not None:
            self.show(self._view_context)

    def _spans(self, context: ViewContext) -> dict[str, Document]:
        """All that are known, by number."""
        past, state = self._past.spans, context.state.spans
        return {**past, **state} if past else state

    def _edge(self, context: ViewContext, cells: int) -> float:
        """The time at the right edge: one at which a cell ends, so that what is over stays as it is
        drawn while it moves to the left."""
        each = ZOOMS[self._zoom] / cells
        right = context.now if self._right is None else self._right
        return -(-right // each) * each

    def _drawn(
        self, context: ViewContext, left: float, right: float
    ) -> defaultdict[Lane, list[Document]]:
        """Spans that are seen, by lane, the earliest first."""
        drawn: defaultdict[Lane, list[Document]] = defaultdict(list)
        for span in self._spans(context).values():
            ended = span.get("ended_unix_seconds", context.now)
            if ended >= left and span["began_unix_seconds"] <= right:
                drawn[_lane(span)].append(span)
        return drawn

    def _axis(self, context: ViewContext, right: float, seconds: float, cells: int) -> Line:
        """Times of day, and how far the window reaches."""
        state = f"{duration(seconds):>6} " if self._right is None else "paused "
        text = ""
        for cell in range(0, cells, TICK_CELLS):
            at = right - seconds + cell / cells * seconds
            shown = datetime.fromtimestamp(at)
            time = shown.strftime("%H:%M:%S") + (f".{shown.microsecond // 100000}" * (seconds < 20))
            text += f"{'│' + time:{TICK_CELLS}}"
        style = context.theme.dim if self._right is None else context.theme.warn
        return [(f"{state:{LABEL}}", style), (text[:cells], context.theme.dim)]

    def _title(self, context: ViewContext, lane: Lane, *, here: bool) -> Line:
        number = lane.instance if lane.name == LANES[0] else ""
        text = f" {number:3} {lane.name:4} "
        return [(f"{text:{LABEL}}", context.theme.cursor if here else context.theme.dim)]

    def _bars(
        self, context: ViewContext, spans: list[Document], left: float, per_cell: float, cells: int
    ) -> Line:
        """A lane. Each cell belongs to what took most of it: a span of some cells, with its model
        on it, or all short spans of a kind and a model together."""
        unknown = int((self._past.known_since(context.state) - left) / per_cell)
        owners: list[Bar | None] = [None] * cells
        shares: defaultdict[int, dict[Bar, float]] = defaultdict(dict)
        for span in spans:
            begin = (span["began_unix_seconds"] - left) / per_cell
            end = (span.get("ended_unix_seconds", context.now) - left) / per_cell
            first, last = max(0, int(begin)), min(int(end), cells - 1)
            if last < first:
                continue
            bar = self._bar(span, first, last, begins=begin >= 0)
            owners[first + 1 : last] = [bar] * (last - first - 1)
            for cell in {first, last}:
                share = max(min(end, cell + 1) - max(begin, cell), LEAST_SHARE)
                share += (
                    EDGE_SHARE * (cell == first and len(bar.text) > 1) + CHOSEN_SHARE * bar.chosen
                )
                shares[cell][bar] = shares[cell].get(bar, 0.0) + share
        for cell, found in shares.items():
            winner = max(found, key=found.__getitem__)
            if owners[cell] is None or winner.chosen:
                owners[cell] = winner
        texts, styles = [" "] * cells, [""] * cells
        for cell, owner in enumerate(owners):
            if owner is not None:
                texts[cell] = owner.text[cell - owner.first] if len(owner.text) > 1 else owner.text
                colour = context.model_style(owner.model)
                styles[cell] = f"{'bold underline' if owner.chosen else 'reverse'} {colour}"
            elif cell < unknown:
                texts[cell], styles[cell] = UNKNOWN, context.theme.dim
        return _merged(texts, styles)

    def _bar(self, span: Document, first: int, last: int, *, begins: bool) -> Bar:
        model, mark = str(span["model"]), MARKS[span["kind"]]
        assert self._view_context is not None
        letter = _letter(model, self._view_context)
        chosen = str(span["number"]) == self._chosen
        length = last - first + 1
        if length < LEAST_BAR:
            return Bar(0, mark or letter, model, chosen)
        edge = "│" if begins else ""
        name = edge + mark + model
        if len(name) > length:
            name = edge + mark + letter
        return Bar(first, name.ljust(length), model, chosen)

    def status(self) -> str:
        return "" if self._right is None else "paused"

    # --- the span that is chosen -----------------------------------------------------------------

    def current(self) -> tuple[str, Document] | None:
        if self._view_context is None or self._chosen is None:
            return None
        span = self._spans(self._view_context).get(self._chosen)
        return None if span is None else (self._chosen, span)

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        span = self._spans(context).get(key)
        return None if span is None else described(span, context)

    def _choose(self, by: int) -> None:
        """The span before or after, on the lane of the cursor; the newest at first."""
        context = self._view_context
        if context is None or not self._lanes:
            return
        lane = self._lanes[self._lane]
        spans = self._spans(context)
        numbers = [number for number, span in spans.items() if _lane(span) == lane]
        numbers.sort(key=int)
        if not numbers:
            return
        place = numbers.index(self._chosen) + by if self._chosen in numbers else len(numbers) - 1
        self._chosen = numbers[max(0, min(place, len(numbers) - 1))]
        self._bring_into_sight(spans[self._chosen], context)

    def _bring_into_sight(self, span: Document, context: ViewContext) -> None:
        right = context.now if self._right is None else self._right
        seconds = ZOOMS[self._zoom]
        began, ended = span["began_unix_seconds"], span.get("ended_unix_seconds", context.now)
        if began < right - seconds or ended > right:
            self._right = min(context.now, max(ended, began) + seconds / 4)

    # --- keys ------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        moves = {
            "+": lambda: self._zoom_by(-1), "=": lambda: self._zoom_by(-1),
            "-": lambda: self._zoom_by(1),
            "<": lambda: self._pan(-0.25), ">": lambda: self._pan(0.25),
            "h": lambda: self._choose(-1), "left": lambda: self._choose(-1),
            "l": lambda: self._choose(1), "right": lambda: self._choose(1),
            "k": lambda: self._go(-1), "up": lambda: self._go(-1),
            "j": lambda: self._go(1), "down": lambda: self._go(1),
            "f": self._follow, "end": self._follow,
        }  # fmt: skip
        do = moves.get(event.character or "", moves.get(event.key))
        if do is not None and self._view_context is not None:
            event.stop()
            do()
            self.show(self._view_context)

    def _zoom_by(self, by: int) -> None:
        """What is chosen stays in sight."""
        self._zoom = max(0, min(self._zoom + by, len(ZOOMS) - 1))
        if self._view_context is not None and (chosen := self.current()) is not None:
            self._bring_into_sight(chosen[1], self._view_context)

    def _pan(self, by: float) -> None:
        if self._view_context is not None:
            right = self._view_context.now if self._right is None else self._right
            right += by * ZOOMS[self._zoom]
            self._right = None if right >= self._view_context.now else right

    def _go(self, by: int) -> None:
        self._lane = max(0, min(self._lane + by, len(self._lanes) - 1))

    def _follow(self) -> None:
        self._right, self._chosen = None, None

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._zoom_by(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._zoom_by(1)

    def on_click(self, event: events.Click) -> None:
        """The span under the mouse is chosen; twice, it is opened (by who is above)."""
        context, place = self._view_context, self._top + event.y - 1
        if context is None or not 0 <= place < len(self._lanes) or event.y < 1:
            return
        self._lane = place
        cells, seconds = max(10, self._canvas.size.width - LABEL), ZOOMS[self._zoom]
        right = self._edge(context, cells)
        left = right - seconds + (event.x - LABEL) * seconds / cells
        under = [
            span
            for span in self._drawn(context, left, left + seconds / cells)[self._lanes[place]]
            if event.x >= LABEL
        ]
        if under:
            self._chosen = str(under[-1]["number"])
        self.show(context)

    def on_resize(self) -> None:
        if self._view_context is not None:
            self.show(self._view_context)


def _letter(model: str, context: ViewContext) -> str:
    return LETTERS[context.state.numbers.get(model, 0) % len(LETTERS)]


def _letters(context: ViewContext, drawn: dict[Lane, list[Document]], width: int) -> Line:
    """The letters and colours of the models that are seen, as many as there is room for."""
    models = {str(span["model"]) for spans in drawn.values() for span in spans}
    order = sorted(models, key=lambda model: context.state.numbers.get(model, 0))
    line: Line = []
    room = width - MORE
    for place, model in enumerate(order):
        room -= cell_len(model) + 5
        if room < 0:
            return [*line, (f"+{len(order) - place}", context.theme.dim)]
        style = context.model_style(model)
        line += [(f" {_letter(model, context)} ", f"reverse {style}"), (f" {model} ", style)]
    return line


def _lane(span: Document) -> Lane:
    return Lane(str(span["instance"]), LANE_OF.get(span["kind"], LANES[0]))


def _merged(texts: list[str], styles: list[str]) -> Line:
    """Cells of one style as one piece."""
    line: Line = []
    start = 0
    for place in range(1, len(texts) + 1):
        if place == len(texts) or styles[place] != styles[start]:
            line.append(("".join(texts[start:place]), styles[start]))
            start = place
    return line


def described(span: Document, context: ViewContext) -> list[Line]:
    """What was computed or moved, with whom, for how long, and why."""
    theme = context.theme
    began, ended = span["began_unix_seconds"], span.get("ended_unix_seconds")
    took = (context.now if ended is None else ended) - began
    kind = str(span["kind"]).replace("_", " ")
    facts: list[tuple[str, str]] = [
        ("what", f"{kind} of {span['model']} on instance {span['instance']}"),
        ("began", f"{duration(max(0.0, context.now - began))} ago"),
        ("took", duration(took) + (" so far" if ended is None else f", ended: {span['outcome']}")),
    ]
    if "quota_seconds" in span:
        facts.append(("quota", duration(span["quota_seconds"])))
    if span.get("steps"):
        facts.append(("steps", f"{span['steps']}, {duration(took / span['steps'])} each"))
    if span.get("kv_slabs"):
        facts.append(("KV", f"at most {span['kv_slabs']} slabs"))
    if span.get("moved_bytes"):
        speed = f", {size(span['moved_bytes'] / took)}/s" if took > 0 else ""
        facts.append(("moved", size(span["moved_bytes"]) + speed))
    if span.get("chunk_tokens"):
        facts.append(("chunks", f"{span['chunk_tokens']} tokens of prompts a step"))
    decision = span.get("decision", {})
    if "hook" in decision:
        facts.append(("decided by", f"{decision.get('policy', '?')}, asked for {decision['hook']}"))
    if decision:
        facts.append(("after", str(decision["after"])))
    if decision.get("plan"):
        turns = ", ".join(f"{model} {duration(quota)}".strip() for model, quota in decision["plan"])
        facts.append(("then", turns))
    lines: list[Line] = [[(f"{name:12}", theme.accent), (text, "")] for name, text in facts]
    for title, members in (("batch", span.get("requests")), ("prompts", span.get("prompts"))):
        if members:
            lines += [[], [(f"{title} ({len(members)})", theme.accent)]]
            lines += [[(f"  {member}", ""), *_request(str(member), context)] for member in members]
    return lines


def _request(name: str, context: ViewContext) -> Line:
    row = context.state.rows("requests").get(name)
    status = "finished" if row is None else f"{row['phase']}, {row['output_tokens']} tokens"
    return [(f"  {status}", context.theme.dim)]
