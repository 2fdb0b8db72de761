"""Everything at once for a while (`benchmarks/endurance`); the long form takes half an hour."""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.demo.traffic import Chat
from benchmarks.endurance.asks import EMBEDDER
from benchmarks.endurance.run import Plan, endure
from tests.system.conftest import start

SECONDS = 45.0
BESIDE = f"""
[[model]]
name = "{EMBEDDER}"
path = "qwen3-a"
max_context = 512
dtype = "float32"
task = "embed"
"""


def test_a_busy_minute(checkpoints: Path, expected: dict[Chat, list[int]]) -> None:
    """Forty connections in all dialects, clients that leave, an operator who cancels, two workers
    killed and another policy: every answer is what it is undisturbed, and the log, the journal and
    the ledgers agree with what clients saw."""
    plan = Plan(
        seconds=SECONDS,
        connections=40,
        seed=7,
        kill_every=SECONDS / 2.5,
        policy_every=SECONDS / 1.5,
        cancel_every=1.0,
        sample_every=5.0,
        batches=1,
        policies=["aegaeon"],
    )
    with start(checkpoints, "appliance", more=BESIDE) as appliance:
        result = asyncio.run(
            endure(
                plan,
                appliance.url,
                appliance.pid,
                truths=expected,
                checkpoints=checkpoints,
                log=appliance.journal.with_name("daemon.log"),
                journal=appliance.journal,
            )
        )

    assert result.complaints == []
    assert result.kills == 2
    assert result.policies == ["aegaeon"]
    assert result.tokens_compared > 1000
    assert {"whole", "left"} <= result.requests["chat"].keys()
    assert not [pid for pid in result.processes if Path(f"/proc/{pid}").exists()]
