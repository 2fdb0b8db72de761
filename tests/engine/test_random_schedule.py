"""A short random schedule of six models on two pools (`benchmarks/endurance/memory`); the long
form takes ten minutes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.vocabulary import Task
from benchmarks.endurance.memory.kinds import ENCODER, Served
from benchmarks.endurance.memory.schedule import RandomSchedule, described
from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken

OPERATIONS = 600


@pytest.mark.thorough
def test_a_random_schedule_changes_no_token(tmp_path: Path) -> None:
    """After turns, swaps, migrations, prefetches, cancelled loads and dropped images in random
    order every token is plain vLLM's, every book balances, and nothing is left."""
    answer = tmp_path / "result.json"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.endurance", "memory"),
            *f"--operations {OPERATIONS} --families 4 --seed 3 --json".split(),
            answer,
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    result = json.loads(answer.read_text())
    assert result["complaints"] == []
    assert result["what"] == "6 models on two pools, a random schedule, tokens compared"
    assert min(result["operations"].values()) > 0, "everything happened"
    assert result["operations"]["operation"] == OPERATIONS
    assert result["tokens_wrong"] == 0
    assert len(set(result["kv_shapes"].values())) == 4
    assert set(result["requests_finished"]) == set(result["kv_shapes"])
    assert result["fragmentation_device"]["overall"]["unused_by_peak_mean"] < 0.1
    assert result["fragmentation_host"]["overall"]["unused_by_peak_mean"] < 0.1


def test_an_encoder_has_no_blocks(tmp_path: Path) -> None:
    """It keeps no KV, and its vectors are compared."""
    encoder = Served(Path(make_shrunken(tmp_path, ENCODER, CONFIGS[ENCODER])), task=Task.EMBED)
    schedule = RandomSchedule([encoder], {}, random.Random(1), 12 << 20, 16 << 10)

    schedule.finish()

    report = schedule.report()
    assert report["kv_shapes"] == {}
    assert report["fragmentation_device"] == {}
    assert described([encoder]) == "1 models on two pools, a random schedule, vectors compared"
    both = "2 models on two pools, a random schedule, tokens and vectors compared"
    assert described([encoder, Served(tmp_path)]) == both
