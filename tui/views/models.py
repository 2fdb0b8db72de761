"""Models: where each one is, what is asked of it, and how it meets its SLO targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from textual import events

from tui.drawing.amounts import duration, rate, share, size, sparkline
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonRefused, DaemonSource, Document
from tui.view import Action, Field, Given, ViewContext, details

SPARK_BUCKETS = 12
SPARK_SECONDS = 5.0
RATE_SECONDS = 10.0


def tokens_per_second(key: str, row: Document, context: ViewContext) -> float:
    return context.state.counter("models", key, "output_tokens").rate(context.now, RATE_SECONDS)


def _spark(key: str, row: Document, context: ViewContext) -> list[float]:
    counter = context.state.counter("models", key, "output_tokens")
    return counter.increases(context.now, SPARK_BUCKETS, SPARK_SECONDS)


def _lately(name: str) -> Any:
    return lambda key, row, context: row.get("window", {}).get(name)


def _marks(key: str, row: Document, context: ViewContext) -> str:
    pinned = row.get("terms", {}).get("pinned", False)
    marks = {"pin": pinned, "drain": row.get("draining"), "load": row.get("load_requested")}
    return ",".join(mark for mark, holds in marks.items() if holds)


def _places(key: str, row: Document, context: ViewContext) -> str:
    """The instances on which it is, or comes; in brackets the groups that can have it."""
    places = {"loaded": "", "loading": "↓"}
    found = [
        f"{instance}{places[stage]}"
        for instance, stage in row.get("residency", {}).items()
        if stage in places
    ]
    if groups := row.get("groups"):
        found.append(f"({', '.join(groups)})")
    return " ".join(found)


def _state_style(state: Any, context: ViewContext) -> str:
    theme = context.theme
    known = {
        "loaded": theme.good,
        "loading": theme.accent,
        "failed": theme.bad,
        "removing": theme.warn,
    }
    return known.get(state, theme.dim)


def attainment_style(value: Any, context: ViewContext) -> str:
    theme = context.theme
    if value is None:
        return theme.dim
    return theme.good if value >= 0.99 else theme.warn if value >= 0.9 else theme.bad


def _post(verb: str, words: str) -> Callable[[DaemonSource, str, Given], Awaitable[str]]:
    """Has a model do something; of its `words`, ``{}`` is the model."""

    async def do(source: DaemonSource, key: str, given: Given) -> str:
        await source.ask("POST", f"/api/models/{quote(key)}/{verb}")
        return words.replace("{}", key)

    return do


async def _limit(source: DaemonSource, key: str, given: Given) -> str:
    body: Document = {}
    if slo := {name: given[name] for name in ("ttft", "tbt", "gap") if name in given}:
        body["slo"] = slo
    if (queue := given.get("queue")) is not None:
        if not queue.isdecimal():
            raise DaemonRefused(f"queue: a whole number, such as 20, not {queue!r}")
        body["max_queue"] = int(queue)
    found = await source.ask("PUT", f"/api/models/{quote(key)}/limits", body)
    terms = found["terms"]
    slo = {name: f"{terms['slo'][f'{name}_seconds']:g} s" for name in ("ttft", "tbt")}
    gap = terms["slo"].get("gap_seconds", 0.0)
    longest = f"at most {gap:g} s apart, " if gap else ""
    return (
        f"{key}: first token {slo['ttft']}, then {slo['tbt']} each, {longest}"
        f"at most {terms['max_queue']} requests"
    )


def _slo_part(name: str) -> Callable[[Document], str]:
    def now(row: Document) -> str:
        seconds = row.get("terms", {}).get("slo", {}).get(f"{name}_seconds")
        return "" if seconds is None else f"{seconds:g}s"

    return now


LIMITS = (
    Field("ttft", "TTFT target, such as 5s", _slo_part("ttft")),
    Field("tbt", "TBT target, such as 100ms", _slo_part("tbt")),
    Field("queue", "live requests at most, such as 20",
          lambda row: str(row.get("terms", {}).get("max_queue", ""))),
    Field("gap", "longest time between two tokens, such as 1s; 0s for none", _slo_part("gap")),
)  # fmt: skip


class ModelsView(TableView):
    """In the order of the catalogue, unless they are sorted."""

    title = "Models"
    ended = "removed"
    names = ("models", "m")
    help = (("c", "chat"),)
    columns = (
        Column("MODEL", lambda key, row, context: key,
               style=lambda value, context: context.model_style(value)),
        Column("STATE", member("state"), style=_state_style),
        Column("ON", _places),
        Column("RUN", member("running"), right=True),
        Column("WAIT", member("waiting"), right=True),
        Column("TOK/S", tokens_per_second, rate, right=True),
        Column("SLO", _lately("attainment"), share, attainment_style, right=True),
        Column("TTFT50", _lately("ttft_p50_seconds"), duration, right=True),
        Column("TBT50", _lately("tbt_p50_seconds"), duration, right=True),
        Column("MARKS", _marks, style=lambda value, context: context.theme.warn),
        Column("TTFT99", _lately("ttft_p99_seconds"), duration, right=True),
        Column("TBT99", _lately("tbt_p99_seconds"), duration, right=True),
        Column("LAST MINUTE", _spark, sparkline, lambda value, context: context.theme.accent),
        Column("WEIGHTS", lambda key, row, context: row.get("facts", {}).get("weight_bytes"),
               lambda value: "" if value is None else size(value), right=True),
    )  # fmt: skip

    actions = (
        Action("L", "load", "load weights to a device", _post("load", "{} is loaded to a device")),
        Action("E", "evict", "give devices back", _post("evict", "{} leaves its devices"),
               "Evict {}? Its turns are ended; its requests go on when their turn comes."),
        Action("D", "drain", "refuse new requests", _post("drain", "{} takes no new requests"),
               "Drain {}? New requests are refused until it is resumed."),
        Action("R", "resume", "take requests again", _post("resume", "{} takes requests")),
        Action("P", "pin", "keep weights in the host cache", _post("pin", "{} is pinned")),
        Action("U", "unpin", "let weights leave the host cache",
               _post("unpin", "{} is not pinned")),
        Action("l", "limit", "SLO targets of new requests, length of the queue", _limit,
               fields=LIMITS),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        return context.state.rows("models")

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        return None if row is None else details(row, context.theme)

    def path(self, key: str) -> str | None:
        return f"/api/models/{quote(key)}"

    def on_key(self, event: events.Key) -> None:
        row = self.current()
        if event.character == "c" and row is not None:
            event.stop()
            self.post_message(self.Wanted("chat", row[0]))
