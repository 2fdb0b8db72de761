"""A short cut of `make chaos` (`tests/chaos`): everything that is quick goes wrong, once each."""

from __future__ import annotations

from pathlib import Path

from appliance.demo.run import Known
from appliance.demo.traffic import ChatRequest
from tests.chaos.run import Plan, chaos
from tests.chaos.schedule import schedule

QUICK = (
    "worker_kill",
    "worker_freeze",
    "front_end_kill",
    "guide_compiler_kill",
    "daemon_kill",
    "clients_drop",
    "hostile: 50,000 stop tokens",
    "hostile: chains of rules",
)
EVERY_SECONDS, SEED = 5.0, 0
ENOUGH_SECONDS = 600.0
"""For each to come."""


def test_a_bad_minute(
    checkpoints: Path, answered: dict[ChatRequest, Known], tmp_path: Path
) -> None:
    """Workers, front ends, the compiler of guides and the daemon are killed or hang, a bit of its
    files flips, and hostile requests come: no answer is wrong, nothing acknowledged is lost, and
    every refusal has a name."""
    due = schedule(SEED, ENOUGH_SECONDS, QUICK, EVERY_SECONDS)
    plan = Plan(
        seconds=due[len(QUICK) - 1].at_seconds + 1.0,
        quiet_seconds=3.0,
        every_seconds=EVERY_SECONDS,
        seed=SEED,
        connections=3,
        kinds=QUICK,
        timed=False,
    )

    result = chaos(plan, tmp_path, checkpoints, answered)

    assert result["complaints"][:20] == []
    assert {*result["hits"], *result["missed"]} == set(QUICK)
    assert set(result["missed"]) <= {"guide_compiler_kill"}
    assert result["tokens_compared"] > 300
    assert result["innocent_ttft"]["disturbed"]["count"] > 10
    assert result["batches"]["acknowledged"]
    assert result["flips"]
