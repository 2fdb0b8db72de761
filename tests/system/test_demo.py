"""`appliance demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS
from tui.recording import read_recording
from tui.state import State


def test_demo(tmp_path: Path) -> None:
    """It exits 0 and shows six models, preempted in mid-generation, every output identical. The
    dashboard can show all of it afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", "appliance", "demo", "--json", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            output, told = demo.communicate(timeout=2 * PATIENCE_SECONDS)
        except BaseException:
            os.killpg(demo.pid, signal.SIGKILL)  # its daemon, too
            raise

    assert demo.returncode == 0, told
    report = json.loads(output)
    assert report["complaints"] == []
    models = report["models"]
    assert len(models) == 6
    assert all(model["identical"] == model["requests"] == model["prefills"] for model in models)
    assert sum(model["preemptions"] for model in models) > 0
    assert sum(model["kv_swapped_bytes"] for model in models) > 0
    # The first token is not kept waiting for plain vLLM.
    lines = [line.strip() for line in told.splitlines()]
    assert [line.split()[0] for line in lines if line.startswith(("first token: ", "running"))] == [
        "first", "running",
    ]  # fmt: skip
    # Its last lines serve the same models, and open the dashboard on what happened: all chats come
    # and go in it.
    assert shlex.split(lines[-1])[-2:] == ["serve", str(tmp_path)]
    (line,) = [line for line in lines if " --replay " in line]
    replayed = shlex.split(line)[-1]
    state = State()
    most = 0
    for message in read_recording(Path(replayed)):
        state.hear(message)
        most = max(most, len(state.rows("requests")))
    assert most > 6
    assert state.rows("requests") == {}
    assert len(state.rows("models")) == 6
