"""`appliance demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS


def test_demo(checkpoints: Path) -> None:
    """It exits 0 and shows six models, preempted in mid-generation, every output identical."""
    with subprocess.Popen(
        [sys.executable, "-m", "appliance", "demo", "--json", "--dir", str(checkpoints)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            output, _ = demo.communicate(timeout=2 * PATIENCE_SECONDS)
        except BaseException:
            os.killpg(demo.pid, signal.SIGKILL)  # its daemon, too
            raise

    assert demo.returncode == 0
    report = json.loads(output)
    assert report["complaints"] == []
    models = report["models"]
    assert len(models) == 6
    assert all(model["identical"] == model["requests"] == model["prefills"] for model in models)
    assert sum(model["preemptions"] for model in models) > 0
    assert sum(model["kv_swapped_bytes"] for model in models) > 0
