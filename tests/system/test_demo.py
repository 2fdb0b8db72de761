"""`appliance demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS


def test_demo(checkpoints: Path) -> None:
    """It exits 0 and shows six models, preempted in mid-generation, every output identical."""
    done = subprocess.run(
        [sys.executable, "-m", "appliance", "demo", "--json", "--dir", str(checkpoints)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )

    report = json.loads(done.stdout)
    assert report["complaints"] == []
    models = report["models"]
    assert len(models) == 6
    assert all(model["identical"] == model["requests"] == model["prefills"] for model in models)
    assert sum(model["preemptions"] for model in models) > 0
    assert sum(model["kv_swapped_bytes"] for model in models) > 0
