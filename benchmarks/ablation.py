"""What each rule of the policy `appliance` is worth: rows of the papers' tables played without it.

    python -m benchmarks.ablation [--jobs N] [--only VARIANT …] [--json FILE]

A variant has a decision made by another policy, a parameter changed, or a constant of the
appliance's modules: those are no parameters, as no box needs others. The figures are shares of
tokens, of first tokens, of means between tokens or of requests that were in time, as the row says;
one seed, the same on any machine. About half an hour of CPU.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from appliance.lab.experiments.comparison import Match, played
from benchmarks.papers_tables import TABLES, read
from benchmarks.provenance import made, write

ALWAYS = 1e6
"""A share or a factor that is never reached."""


@dataclass(frozen=True)
class Variant:
    """The policy with one thing changed."""

    decisions: Mapping[str, str] = field(default_factory=dict)
    """Policies that decide instead, by hook."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """By module of `appliance` and name."""


@dataclass(frozen=True)
class Row:
    """A cell of a paper's table, and what of it is shown."""

    table: str
    at: float
    metric: str


ROWS: Mapping[str, Row] = {
    "112 models, 16 GPUs": Row("capacity_aegaeon_0.1", 112, "token_attainment"),
    "Arena x 2": Row("capacity_arena", 2, "token_attainment"),
    "Azure x 4": Row("capacity_azure", 4, "token_attainment"),
    "four A10, 8 models": Row("aegaeon_17_left", 8, "token_attainment"),
    "Prism Fig. 7, 2 GPUs": Row("prism_07_gpus", 2, "ttft_attainment"),
    "Prism Fig. 12, 16 GPUs": Row("prism_12", 16, "tpot_attainment"),
    "KV short, 4 models": Row("kv_short_models", 1, "token_attainment"),
}

SERVERLESS = "serverlessllm"
VARIANTS: Mapping[str, Variant] = {
    "appliance": Variant(),
    "no prefetching": Variant({"prefetch": SERVERLESS}),
    "dispatch to the fewest models": Variant({"prefill": SERVERLESS}),
    "dispatch to the shortest queue": Variant({"prefill": "aegaeon"}),
    "prompts in the order of arrival": Variant({"admit": "aegaeon"}),
    "rounds with quotas": Variant(dict.fromkeys(("round", "preempt", "phase", "admit"), "aegaeon")),
    "one model until it is done": Variant(
        {"round": SERVERLESS, "preempt": SERVERLESS, "phase": SERVERLESS, "admit": "aegaeon"}
    ),
    "turns cut for their own model only": Variant({"preempt": SERVERLESS}),
    "prompts in chunks of 1024": Variant({"batch": "pd_aggregated"}),
    "no homes": Variant(parameters={"home_share": ALWAYS}),
    "homes move for 20 %": Variant(constants={"plugins.homes.THRESHOLD": 0.2}),
    "no second homes": Variant(constants={"plugins.homes.SPARE_SHARE": ALWAYS}),
    "no weights ahead": Variant(constants={"scheduling.prefetcher.AHEAD_FREE_SHARE": ALWAYS}),
    "no short prompts first": Variant(
        constants={"plugins.instance_work.outlook.SHORT_SECONDS": 0.0}
    ),
    "no switch is costly": Variant(
        constants={"plugins.instance_work.outlook.COSTLY_SHARE": ALWAYS}
    ),
    "tokens due by the schedule": Variant(parameters={"pace": 0.0}),
    "late requests due again after 5 s": Variant(parameters={"renewal_seconds": 5.0}),
    "late models wait at most 5 s": Variant(parameters={"max_lateness_seconds": 5.0}),
    "slack of half a TTFT": Variant(parameters={"slack_target": 0.5}),
    "slack of one TTFT": Variant(parameters={"slack_target": 1.0}),
    "slack of three TTFT": Variant(parameters={"slack_target": 3.0}),
    "margin of 0.1 TTFT": Variant(parameters={"margin": 0.1}),
    "margin of 0.4 TTFT": Variant(parameters={"margin": 0.4}),
    "shortest turn of 0.5 s": Variant(parameters={"shortest_turn_seconds": 0.5}),
    "answers of 1000 tokens": Variant(parameters={"output_tokens": 1000}),
}


@contextmanager
def _with(constants: Mapping[str, Any]) -> Iterator[None]:
    """Change constants meanwhile. Raises `AttributeError` for one that is not there."""
    found = []
    for name, value in constants.items():
        module, constant = name.rsplit(".", 1)
        place = importlib.import_module(f"appliance.{module}")
        found.append((place, constant, getattr(place, constant)))
        setattr(place, constant, value)
    try:
        yield
    finally:
        for place, constant, value in found:
            setattr(place, constant, value)


def share(variant: Variant, row: Row) -> float:
    """The row's figure, played with the variant."""
    table = read(TABLES / f"{row.table}.toml")
    point = table.point(float(row.at))
    key = "policies.appliance"
    changes = {
        **table.changes(point),
        f"{key}.use": '["appliance"]',
        **{f"{key}.decisions.{hook}": by for hook, by in variant.decisions.items()},
        **{f"{key}.parameters.appliance.{n}": str(v) for n, v in variant.parameters.items()},
    }
    with _with(variant.constants):
        result = played(
            Match(
                path=str(table.path(point)),
                policy="appliance",
                seed=table.seeds[0],
                changes=changes,
            )
        )
    return float(result.metrics[row.metric])


def _share(asked: tuple[str, str]) -> float:
    return share(VARIANTS[asked[0]], ROWS[asked[1]])


def markdown(found: Mapping[str, Mapping[str, float]]) -> str:
    """A table: a line for each variant, a column for each row."""
    lines = [" | ".join(["| ", *ROWS]) + " |", "|---" * (len(ROWS) + 1) + "|"]
    for variant, figures in found.items():
        shown = [
            "-" if math.isnan(figures[row]) else f"{figures[row]:.3f}".removeprefix("0")
            for row in ROWS
        ]
        lines.append(" | ".join([f"| {variant}", *shown]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="may be repeated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    asked = [(variant, row) for variant in options.only or VARIANTS for row in ROWS]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        shares = pool.map(_share, asked)
        found: dict[str, dict[str, float]] = {}
        for (variant, row), value in zip(asked, shares, strict=True):
            found.setdefault(variant, {})[row] = value
    write({**made(), "shares": found}, options.json)
    print(markdown(found))


if __name__ == "__main__":
    main()
