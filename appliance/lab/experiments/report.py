"""What a contest came to, for people (a table) and for programs (JSON).

The JSON of the same scenario and seeds is the same to the byte, on any number of processes: it has
nothing of the machine or the time it was made on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.table import Table

from appliance.lab.experiments.comparison import MatchResult
from appliance.vocabulary import Word


class ComparisonReport(Word, frozen=True, kw_only=True):
    """All outcomes of a scenario. `title` and the rest are its own."""

    title: str
    duration_seconds: float
    warmup_seconds: float
    changes: Mapping[str, str] = {}
    outcomes: Sequence[MatchResult]

    def json(self) -> bytes:
        """NaN is null; curves are left out."""
        plain = [msgspec.structs.replace(outcome, curves=None) for outcome in self.outcomes]
        document = msgspec.to_builtins(msgspec.structs.replace(self, outcomes=plain))
        for outcome in document["outcomes"]:
            del outcome["curves"]
            if outcome["fleet"] is None:
                del outcome["fleet"]
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    def means(self) -> dict[str, dict[str, float]]:
        """The metrics of each policy, averaged over its seeds."""
        found: dict[str, dict[str, float]] = {}
        for policy in self.policies():
            rows = self.of(policy)
            found[policy] = {name: mean(row[name] for row in rows) for name in rows[0]}
        return found

    def policies(self) -> list[str]:
        return list(dict.fromkeys(outcome.policy for outcome in self.outcomes))

    def fleets(self) -> dict[str, dict[str, float]]:
        """The figures of each fleet, averaged over its seeds; empty for one box."""
        found: dict[str, dict[str, float]] = {}
        for policy in self.policies():
            rows = [one.fleet for one in self.outcomes if one.policy == policy and one.fleet]
            if rows:
                names = rows[0].__struct_fields__
                found[policy] = {n: mean(getattr(row, n) for row in rows) for n in names}
        return found

    def systems(self) -> dict[str, str]:
        """What switches cost in the systems that the policies are of, where that is not what they
        cost in ours."""
        return {outcome.policy: str(outcome.system) for outcome in self.outcomes}

    def of(self, policy: str) -> list[Mapping[str, float]]:
        return [outcome.metrics for outcome in self.outcomes if outcome.policy == policy]


def mean(values: Iterable[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞"
    return f"{value:.2f}s" if value >= 1 else f"{value * 1000:.1f}ms"


def whole(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}"


COLUMNS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("BY TIME", "time_attainment", share),
    ("TTFT", "ttft_attainment", share),
    ("TPOT", "tpot_attainment", share),
    ("BOTH", "request_attainment", share),
    ("GOOD/S", "goodput_per_second", "{:.2f}".format),
    ("TTFT P50", "ttft_p50_seconds", seconds),
    ("P99", "ttft_p99_seconds", seconds),
    ("TBT P50", "tbt_p50_seconds", seconds),
    ("P99", "tbt_p99_seconds", seconds),
    ("BUSY", "busy_share", share),
    ("GPUS", "gpus_with_work", "{:.1f}".format),
    ("SWITCHES", "switches", whole),
    ("INSTANT", "switch_instant_share", share),
    ("PREEMPTED", "preemptions", whole),
    ("REFUSED", "rejected", whole),
    ("UNUSED KV", "fragmentation", share),
]
BATCH_COLUMNS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("INTERACTIVE", "interactive_attainment", share),
    ("BATCH", "batch_in_time", share),
    ("DONE/S", "batch_done_per_second", "{:.2f}".format),
]
"""Where there are requests of that class."""
FLEET_COLUMNS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("SWITCHES/REQUEST", "switches_per_request", "{:.3f}".format),
    ("LOADS/REQUEST", "loads_per_request", "{:.3f}".format),
    ("SAME BOX", "same_box_share", share),
    ("BUSIEST BOX", "busiest_box_ratio", "{:.2f}".format),
    ("WORST BOX", "worst_box_attainment", share),
]
"""Where there are several boxes."""
SAMPLED = ("gpus_with_work", "fragmentation")
"""Metrics of samples, which fleets have none of."""


def table(report: ComparisonReport) -> Table:
    """A row for each policy, means over its seeds; with several seeds, tokens ± half their range.

    Tokens and time are SLO attainment by token deadlines (count, and seconds covered); TTFT, TPOT
    and both are shares of requests.
    """
    made = Table(box=None, pad_edge=False, title=report.title, title_justify="left")
    made.add_column("POLICY", no_wrap=True)
    some_batch = any(means["batch_requests"] > 0 for means in report.means().values())
    fleets = report.fleets()
    columns = [*COLUMNS, *(BATCH_COLUMNS if some_batch else ())]
    if fleets:
        columns = [column for column in columns if column[1] not in SAMPLED]
    of_fleets = FLEET_COLUMNS if fleets else ()
    for name in ["TOKENS", *(title for title, _, _ in [*columns, *of_fleets])]:
        made.add_column(name, no_wrap=True, justify="right")
    systems = report.systems()
    if any(systems.values()):
        made.add_column("OWN SWITCHES", no_wrap=True)
    for policy, means in report.means().items():
        tokens = [metrics["token_attainment"] for metrics in report.of(policy)]
        shown = share(means["token_attainment"])
        if len(tokens) > 1:
            shown += f" ±{(max(tokens) - min(tokens)) / 2:.1%}"
        cells = [write(means[name]) for _, name, write in columns]
        cells += [write(fleets[policy][name]) for _, name, write in of_fleets]
        made.add_row(policy, shown, *cells, *([systems[policy]] if any(systems.values()) else []))
    return made
