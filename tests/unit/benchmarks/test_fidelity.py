"""A day predicted from half of it (`benchmarks/fidelity.py`); here the lab made the day, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.lab.test_journal_workload import write

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "fidelity.py"


def test_a_day_is_predicted_from_half_of_it(tmp_path: Path) -> None:
    """Requests are as late as they were, and as many of them in time; errors are what they say."""
    write(tmp_path / "serverlessllm.jsonl", policy="serverlessllm")
    day = {"warmup_seconds": 5, "seconds": 40, "stood_still_seconds": 0, "told": {}}
    heard = [{"asked": at, "ttft": 0.5, "gaps": [0.1]} for at in range(0, 50, 5)]
    (tmp_path / "serverlessllm.day.json").write_text(json.dumps(day | {"heard": heard}))
    options = ("--policy", "serverlessllm", "--runs", "1", "--json", str(tmp_path / "out.json"))
    subprocess.run([sys.executable, SCRIPT, "--from", tmp_path, *options], check=True)

    result = json.loads((tmp_path / "out.json").read_text())["policies"]["serverlessllm"]

    assert len(result["splits"]) == 2
    for split in result["splits"].values():
        real, predicted, error = split["real"], split["predicted"], split["error"]
        assert 30 < split["requests"] < 80
        assert abs(error["token_attainment"]) < 0.1
        assert 0.1 < real["token_attainment"] < 1.0
        ttft = predicted["ttft_p50_seconds"] / real["ttft_p50_seconds"] - 1
        assert abs(error["ttft_p50_seconds"] - ttft) < 0.001
        assert split["clients"]["ttft_p50_seconds"] == 0.5
