"""Contests: the same figures from any number of processes, as tables and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from appliance.errors import LabError
from appliance.lab.experiments.comparison import Match, MatchPool, MatchResult, played
from appliance.lab.experiments.metrics import QUANTILES
from appliance.lab.experiments.report import ComparisonReport, table

SCENARIOS = Path(__file__).parents[3] / "benchmarks/scenarios"
QUICK = {"duration": "20s", "warmup": "2s"}


def match(policy: str = "aegaeon", seed: int = 1, **changed: object) -> Match:
    path = str(SCENARIOS / "first_look.toml")
    return Match(path=path, policy=policy, seed=seed, **{"changes": QUICK, **changed})


def report(*outcomes: MatchResult) -> ComparisonReport:
    return ComparisonReport(title="T", duration_seconds=20.0, warmup_seconds=2.0, outcomes=outcomes)


def test_any_number_of_processes_makes_the_same_json() -> None:
    """To the byte, in the order of the matches."""
    matches = [match(policy, seed) for policy in ["aegaeon", "serverlessllm"] for seed in [1, 2]]
    made, done = [], []
    for jobs in [1, 2]:
        with MatchPool(jobs) as arena:
            made.append(report(*arena.play(matches, lambda: done.append(None))).json())
    assert made[0] == made[1]
    assert len(done) == 8
    outcomes = json.loads(made[0])["outcomes"]
    assert [(o["policy"], o["seed"]) for o in outcomes] == [(m.policy, m.seed) for m in matches]
    assert outcomes[0]["metrics"] != outcomes[1]["metrics"]
    assert "curves" not in outcomes[0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_match_that_cannot_be_played_is_an_error(jobs: int) -> None:
    """It says which, wherever it was to be played."""
    with MatchPool(jobs) as arena, pytest.raises(LabError, match=r"nobody, seed 1: .*'nobody'"):
        arena.play([match("nobody")], lambda: None)


def test_curves_are_of_the_run() -> None:
    """Quantiles from least to most, attainment of every window, and what instances were at."""
    found = played(match(curves=True)).curves
    assert found is not None
    for quantiles in (found.ttft_quantiles, found.tbt_quantiles):
        assert len(quantiles) == len(QUANTILES)
        assert list(quantiles) == sorted(quantiles)
    assert len(found.attainment) * found.window_seconds == pytest.approx(20.0)
    assert all(math.isnan(share) or 0 <= share <= 1 for share in found.attainment)
    assert {bar.instance for bar in found.bars} == {0, 1}
    assert {bar.turn for bar in found.bars} == {True, False}
    assert all(2.0 < bar.ended <= 20.0 for bar in found.bars)
    assert len(found.looks) == len(found.weights_share) == len(found.gpus_with_work)
    assert {len(shares) for shares in found.kv_share} == {2}
    assert 0 < max(max(shares) for shares in found.kv_share) <= 1


def test_a_system_with_switches_of_its_own_is_kept_apart() -> None:
    """In the table and in the JSON; it switches no faster than ours."""
    changes = QUICK | {"policies.theirs": '{ use = ["aegaeon"], system = { activation = "1s" } }'}
    ours, theirs = played(match(changes=changes)), played(match("theirs", changes=changes))
    waits = [o.metrics["switch_mean_seconds"] for o in (ours, theirs)]
    assert waits[1] > 1.0 > waits[0]
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table(report(ours, theirs)))
        console.print(table(report(ours)))
    lines = capture.get().splitlines()
    assert [line.split()[-1] for line in lines if "SWITCHES" in line] == ["SWITCHES", "KV"]
    assert next(line for line in lines if line.startswith("theirs")).split()[-1] == "1s"
    outcomes = json.loads(report(ours, theirs).json())["outcomes"]
    assert [o["system"]["activation_seconds"] for o in outcomes] == [0.0, 1.0]


def test_batch_work_has_columns_where_there_is_some() -> None:
    """How much of it was done in time, and how fast."""
    found = played(match(changes=QUICK | {"models.0.batch_backlog": "2"}))
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table(report(found)))
    assert capture.get().splitlines()[1].split()[-3:] == ["INTERACTIVE", "BATCH", "DONE/S"]
    assert found.metrics["batch_requests"] == 2 * 8


def test_the_table_has_means_over_seeds() -> None:
    """And half their range; what is unknown is a dash."""
    plain = played(match()).metrics
    nan = dict.fromkeys(plain, math.nan)
    made = report(
        MatchResult(policy="p", seed=1, metrics=plain | {"token_attainment": 0.90, "switches": 10}),
        MatchResult(policy="p", seed=2, metrics=plain | {"token_attainment": 0.96, "switches": 20}),
        MatchResult(policy="q", seed=1, metrics=nan),
    )
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table(made))
    _, header, first, second = capture.get().splitlines()
    assert header.split()[:2] == ["POLICY", "TOKENS"]
    assert first.split()[:3] == ["p", "93.0%", "±3.0%"]
    assert "15" in first.split()
    assert "DONE/S" not in header
    assert second.split()[:3] == ["q", "-", "-"]
    assert json.loads(made.json())["outcomes"][2]["metrics"]["tokens"] is None
