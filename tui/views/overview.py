"""Overview: SLO targets, instances and their memory; where there is room, models and requests."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult

from tui.counts import count, runs
from tui.drawing.amounts import divide, duration, rate, share, size, sparkline
from tui.drawing.canvas import Canvas, Line
from tui.drawing.listing import listing
from tui.messages import Document
from tui.view import View, ViewContext, details
from tui.views.models import ModelsView, attainment_style, tokens_per_second
from tui.views.requests import RequestsView

RATE_SECONDS = 10.0
SPARK_SECONDS = 2.0
SPARK_BUCKETS = 30
LABEL = 9
KINDS = ("weights", "KV", "prefetched", "graphs", "free")
GLYPHS = {"weights": "█", "KV": "▓", "prefetched": "▒", "graphs": "▚", "free": "·"}
"""Different without colours, too."""
MODEL_COLUMNS = ModelsView.columns
REQUEST_COLUMNS = RequestsView.columns


def memory(row: Document) -> dict[str, int]:
    """Bytes of an instance's device by `KINDS`."""
    sizes = dict.fromkeys(KINDS, 0)
    prefetched = set(row.get("prefetched", ()))
    for owner, nbytes in row.get("pool_bytes", {}).items():
        kind, _, model = owner.partition(":")
        if kind == "weights":
            sizes["prefetched" if model in prefetched else "weights"] += nbytes
        elif kind == "kv":
            sizes["KV"] += nbytes
        else:
            sizes["free"] += nbytes
    sizes["graphs"] = row.get("runtime_bytes", 0)
    return sizes


def bar(sizes: dict[str, int], width: int, context: ViewContext) -> Line:
    """The memory of an instance as one bar."""
    theme = context.theme
    styles = dict(zip(KINDS, (theme.weights, theme.kv, theme.prefetched, theme.graphs, theme.dim),
                      strict=True))  # fmt: skip
    cells = divide(width, sizes.values())
    return [
        (GLYPHS[kind] * count, styles[kind])
        for kind, count in zip(KINDS, cells, strict=True)
        if count
    ]


class OverviewView(View):
    """What an admin looks at first. The cursor is on an instance."""

    title = "Overview"
    names = ("overview", "o", "instances", "i")
    help = (("↑ ↓", "instance"),)

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._view_context: ViewContext | None = None
        self._place = 0
        self._top = 0

    def compose(self) -> ComposeResult:
        yield self._canvas

    def show(self, context: ViewContext) -> None:
        self._view_context = context
        width, height = self._canvas.size
        lines = self._slo_lines(context, width)
        shown = self._all(context)
        self._place = max(0, min(self._place, len(shown) - 1))
        blocks = [self._instance(key, row, context, width) for key, row in shown]
        room = max(1, height - len(lines))
        each = len(blocks[0]) if blocks else 1
        fit = max(1, room // each)
        self._top = max(min(self._top, self._place, max(0, len(blocks) - fit)),
                        self._place - fit + 1)  # fmt: skip
        for block in blocks[self._top : self._top + fit]:
            lines.extend(block)
        if (more := len(blocks) - self._top - fit) > 0 and len(lines) < height:
            lines.append([(f"{more} more below", context.theme.dim)])
        lines += self._listings(context, width, height - len(lines))
        self._canvas.paint(lines)

    # --- the appliance ---------------------------------------------------------------------------

    def _slo_lines(self, context: ViewContext, width: int) -> list[Line]:
        """Attainment of all models, tokens, and the queue."""
        state, theme = context.state, context.theme
        models = state.rows("models")
        speeds = {key: tokens_per_second(key, row, context) for key, row in models.items()}
        attained = _attainment(models, speeds)
        counts = count(state)
        first: Line = [
            ("SLO ", theme.dim),
            (share(attained) or "no tokens", attainment_style(attained, context)),
            (" of the last minute", theme.dim),
            (f"  {rate(sum(speeds.values()))}", theme.strong),
            (" tokens/s", theme.dim),
            (f"  {counts.running}", theme.strong if counts.running else ""),
            (" running", theme.dim),
            (f"  {counts.waiting}", theme.strong if counts.waiting else ""),
            (" waiting", theme.dim),
        ]
        if counts.oldest_arrived is not None:
            oldest = max(0.0, context.now - counts.oldest_arrived)
            first.append((f", oldest {duration(oldest)}", theme.warn if oldest > 10 else ""))
        legend: Line = [("memory ", theme.dim)]
        styles = (theme.weights, theme.kv, theme.prefetched, theme.graphs, theme.dim)
        for kind, style in zip(KINDS, styles, strict=True):
            legend += [(GLYPHS[kind] * 2, style), (f" {kind}  ", "")]
        host = state.tree.get("host_bytes", {})
        if host:
            weights = sum(n for owner, n in host.items() if owner.startswith("weights:"))
            whole = sum(host.values())
            cells = divide(max(10, width // 3), (weights, host.get("kv", 0), host.get("free", 0)))
            hosted: Line = [
                (f"{'host':{LABEL}}", theme.dim),
                (GLYPHS["weights"] * cells[0], theme.weights),
                (GLYPHS["KV"] * cells[1], theme.kv),
                (GLYPHS["free"] * cells[2], theme.dim),
                (f"  {size(whole - host.get('free', 0))} of {size(whole)}: ", ""),
                (f"{size(weights)} weights, {size(host.get('kv', 0))} KV", theme.dim),
            ]
            if disk := state.tree.get("disk_bytes"):
                on_disk = f"; disk {size(disk['kv'])} of {size(sum(disk.values()))} KV"
                hosted.append((on_disk, theme.dim))
            return [first, legend, hosted, []]
        return [first, legend, []]

    # --- an instance -----------------------------------------------------------------------------

    def _all(self, context: ViewContext) -> list[tuple[str, Document]]:
        return list(context.state.rows("instances").items())

    def _instance(self, key: str, row: Document, context: ViewContext, width: int) -> list[Line]:
        theme, state = context.theme, context.state
        here = self._all(context)[self._place][0] == key
        name = f" {key} {row.get('role', '')}"
        up = row.get("state") == "up"
        model = row.get("model")
        busy = state.counter("instances", key, "busy_seconds")
        switches = state.counter("instances", key, "switches").rate(context.now, RATE_SECONDS)
        moved = state.counter("instances", key, "moved_bytes").rate(context.now, RATE_SECONDS)
        head: Line = [
            (f"{name:{LABEL}}", theme.cursor if here else theme.strong),
            (f" {row.get('state', '')} ", theme.good if up else f"bold {theme.bad}"),
            (
                f"{model or 'idle'}",
                context.model_style(model) if model else theme.dim,
            ),
            (f"   {share(_busy(key, context))} busy", ""),
            (f"   {rate(switches)} switches/s", ""),
            (f"   {size(moved)}/s moved", ""),
        ]
        if row.get("parked"):
            head.append(("   parked", theme.dim))
        if group := row.get("group"):
            head.append((f"   group {group}", theme.dim))
        for gpu in row.get("gpus", ()):
            head.append((f"   {_sensors(gpu)}", theme.dim))
        sizes = memory(row)
        whole = sum(sizes.values())
        used = f"  {size(whole - sizes['free'])} of {size(whole)}"
        pool = max(10, width - LABEL - 18)
        memory_line: Line = [(" " * LABEL, ""), *bar(sizes, pool, context), (used, "")]
        buckets = min(SPARK_BUCKETS, max(0, width - LABEL - 40))
        counts = busy.increases(context.now, buckets, SPARK_SECONDS)
        history: Line = [
            (" " * LABEL, ""),
            (sparkline(counts), theme.accent),
            ("  ", ""),
            *_residents(row, context),
        ]
        return [head, memory_line, history, []]

    # --- models and requests -------------------------------------------------------------------

    def _listings(self, context: ViewContext, width: int, room: int) -> list[Line]:
        """The busiest models, and the requests that wait longest; half of the room each, or more
        where the other ones need less."""
        models, requests = _busiest(context), _oldest(context)
        for_models = min(len(models) + 1, max(room // 2, room - len(requests) - 2))
        lines = listing(MODEL_COLUMNS, models, (width, for_models), "in Models", context)
        if not lines:
            return []
        size = width, room - len(lines) - 1
        below = listing(REQUEST_COLUMNS, requests, size, "in Requests", context)
        return [*lines, [], *below]

    # --- keys ------------------------------------------------------------------------------------

    def current(self) -> tuple[str, Document] | None:
        shown = [] if self._view_context is None else self._all(self._view_context)
        return shown[min(self._place, len(shown) - 1)] if shown else None

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = context.state.rows("instances").get(key)
        return None if row is None else details(row, context.theme)

    def table(self) -> list[list[str]]:
        """A row for each instance."""
        if self._view_context is None:
            return []
        titles = ["instance", "role", "state", "model", *KINDS]
        return [
            titles,
            *(
                [key, *(str(row.get(name, "")) for name in titles[1:4]),
                 *(str(nbytes) for nbytes in memory(row).values())]
                for key, row in self._all(self._view_context)
            ),
        ]  # fmt: skip

    def on_key(self, event: events.Key) -> None:
        by = {"up": -1, "k": -1, "down": 1, "j": 1}.get(event.key)
        if by is not None and self._view_context is not None:
            event.stop()
            self._place += by
            self.show(self._view_context)

    def on_resize(self) -> None:
        if self._view_context is not None:
            self.show(self._view_context)


def _busiest(context: ViewContext) -> list[tuple[str, Document]]:
    """All models: those with most requests first, then those that are closest to serving."""
    order = {"loaded": 0, "loading": 1}
    return sorted(
        context.state.rows("models").items(),
        key=lambda one: (-one[1]["running"] - one[1]["waiting"], order.get(one[1]["state"], 2)),
    )


def _oldest(context: ViewContext) -> list[tuple[str, Document]]:
    """All live requests: those that wait first, then by their age."""
    return sorted(
        context.state.rows("requests").items(),
        key=lambda one: (runs(one[1]), one[1]["arrived_unix_seconds"]),
    )


def _busy(key: str, context: ViewContext) -> float:
    """The share of the last seconds in which it computed, also what is not over yet."""
    counter = context.state.counter("instances", key, "busy_seconds")
    open_seconds: float = sum(
        min(RATE_SECONDS, max(0.0, context.now - span["began_unix_seconds"]))
        for span in context.state.rows("spans").values()
        if str(span["instance"]) == key
        and span["kind"] in ("turn", "prefill")
        and "ended_unix_seconds" not in span
    )
    return min(1.0, counter.rate(context.now, RATE_SECONDS) + open_seconds / RATE_SECONDS)


def _attainment(models: dict[str, Document], speeds: dict[str, float]) -> float | None:
    """Of all models, each as much as it delivers; None if nothing was delivered."""
    known: list[tuple[float, float]] = [
        (row["window"]["attainment"], speeds[key])
        for key, row in models.items()
        if "attainment" in row.get("window", {})
    ]
    weight = sum(speed for _, speed in known)
    if not known:
        return None
    if not weight:
        return sum(part for part, _ in known) / len(known)
    return sum(part * speed for part, speed in known) / weight


def _sensors(gpu: Document) -> str:
    text = [f"GPU {gpu['gpu']}"]
    for name, unit in (("celsius", "°C"), ("power_watts", " W")):
        if name in gpu:
            text.append(f"{gpu[name]:.0f}{unit}")
    return " ".join(text)


def _residents(row: Document, context: ViewContext) -> Line:
    """The models that hold memory, the largest first."""
    sizes: dict[str, int] = {}
    for owner, nbytes in row.get("pool_bytes", {}).items():
        if (model := owner.partition(":")[2]) and nbytes:
            sizes[model] = sizes.get(model, 0) + nbytes
    largest = sorted(sizes.items(), key=lambda one: -one[1])
    return [(f"{model} {size(nbytes)}  ", context.model_style(model)) for model, nbytes in largest]
