"""Everything at once for a while (`benchmarks/endurance`); the long form takes half an hour."""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.demo.run import Known
from appliance.demo.traffic import ChatRequest
from benchmarks.endurance.asks import EMBEDDER
from benchmarks.endurance.run import Plan, endure, judge
from benchmarks.endurance.watch import Watch
from tests.system.conftest import start

SECONDS = 30.0
BESIDE = f"""
[[model]]
name = "{EMBEDDER}"
path = "qwen3-a"
max_context = 512
dtype = "float32"
task = "embed"
"""


def test_a_busy_while(checkpoints: Path, answered: dict[ChatRequest, Known]) -> None:
    """Forty connections in all dialects, clients that leave or do not read for a while, an operator
    who cancels, workers that are killed and another policy: every answer is what it is undisturbed,
    and the log, the journal and the ledgers agree with what clients saw."""
    plan = Plan(
        seconds=SECONDS,
        connections=40,
        seed=7,
        kill_every=SECONDS / 2.5,
        policy_every=SECONDS / 1.5,
        cancel_every=1.0,
        sample_every=5.0,
        nap_seconds=5.0,
        batches=1,
        policies=["aegaeon"],
    )
    with start(checkpoints, "appliance", more=BESIDE, tool_parser="hermes") as appliance:
        watch = Watch(appliance.pid, appliance.url, appliance.journal)
        log = appliance.journal.with_name("daemon.log")
        life = asyncio.run(endure(plan, watch, truths=answered, checkpoints=checkpoints, log=log))
    result = judge(life, watch, log)

    assert result.complaints[:20] == []
    assert result.kills
    assert result.policies == ["aegaeon"]
    assert result.tokens_compared > 1000
    assert {"whole", "left"} <= result.requests["chat"].keys()
