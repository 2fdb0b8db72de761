"""Models: where each one is, what is asked of it, and how it keeps its promises."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tui.amounts import duration, rate, share, size, sparkline
from tui.canvas import Line
from tui.messages import Document
from tui.table import Column, TableView, member
from tui.view import Sight, told

SPARK_BUCKETS = 12
SPARK_SECONDS = 5.0
RATE_SECONDS = 10.0


def tokens_per_second(key: str, row: Document, sight: Sight) -> float:
    return sight.state.counter("models", key, "output_tokens").rate(sight.now, RATE_SECONDS)


def _spark(key: str, row: Document, sight: Sight) -> list[float]:
    counter = sight.state.counter("models", key, "output_tokens")
    return counter.increases(sight.now, SPARK_BUCKETS, SPARK_SECONDS)


def _lately(name: str) -> Any:
    return lambda key, row, sight: row.get("lately", {}).get(name)


def _marks(key: str, row: Document, sight: Sight) -> str:
    pinned = row.get("terms", {}).get("pinned", False)
    marks = {"pin": pinned, "drain": row.get("draining"), "want": row.get("wanted")}
    return ",".join(mark for mark, holds in marks.items() if holds)


def _places(key: str, row: Document, sight: Sight) -> str:
    """The instances on which it is, or comes."""
    places = {"loaded": "", "loading": "↓"}
    return " ".join(
        f"{instance}{places[stage]}"
        for instance, stage in row.get("residency", {}).items()
        if stage in places
    )


def _state_style(state: Any, sight: Sight) -> str:
    look = sight.look
    known = {"loaded": look.good, "loading": look.accent, "failed": look.bad, "leaving": look.warn}
    return known.get(state, look.dim)


def attainment_style(value: Any, sight: Sight) -> str:
    look = sight.look
    if value is None:
        return look.dim
    return look.good if value >= 0.99 else look.warn if value >= 0.9 else look.bad


class Models(TableView):
    """In the order of the catalogue, unless they are sorted."""

    title = "Models"
    names = ("models", "m")
    columns = (
        Column("MODEL", lambda key, row, sight: key,
               style=lambda value, sight: sight.look.model(sight.state.numbers.get(value, 0))),
        Column("STATE", member("state"), style=_state_style),
        Column("ON", _places),
        Column("RUN", member("running"), right=True),
        Column("WAIT", member("waiting"), right=True),
        Column("TOK/S", tokens_per_second, rate, right=True),
        Column("SLO", _lately("attainment"), share, attainment_style, right=True),
        Column("TTFT50", _lately("ttft_p50_seconds"), duration, right=True),
        Column("TBT50", _lately("tbt_p50_seconds"), duration, right=True),
        Column("MARKS", _marks, style=lambda value, sight: sight.look.warn),
        Column("TTFT99", _lately("ttft_p99_seconds"), duration, right=True),
        Column("TBT99", _lately("tbt_p99_seconds"), duration, right=True),
        Column("LAST MINUTE", _spark, sparkline, lambda value, sight: sight.look.accent),
        Column("WEIGHTS", lambda key, row, sight: row.get("facts", {}).get("weight_bytes"),
               lambda value: "" if value is None else size(value), right=True),
    )  # fmt: skip

    def rows(self, sight: Sight) -> dict[str, Document]:
        return sight.state.rows("models")

    def detail(self, key: str, sight: Sight) -> list[Line] | None:
        row = self.rows(sight).get(key)
        return None if row is None else told(row, sight.look)

    def path(self, key: str) -> str | None:
        return f"/api/models/{quote(key)}"
