"""A short random schedule of six models on two pools (`benchmarks/endurance/memory`); the long
form takes ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

OPERATIONS = 600


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
    assert min(result["operations"].values()) > 0, "everything happened"
    assert result["operations"]["operation"] == OPERATIONS
    assert result["tokens_wrong"] == 0
    assert len(set(result["kv_shapes"].values())) == 4
    assert set(result["requests_finished"]) == set(result["kv_shapes"])
    assert result["fragmentation_device"]["overall"]["unused_by_peak_mean"] < 0.1
    assert result["fragmentation_host"]["overall"]["unused_by_peak_mean"] < 0.1
