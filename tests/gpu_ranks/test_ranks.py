"""Two ranks of one instance: engines with graphs, turns, and the loss of a rank.

`tests.gpu_ranks.leader` is the instance, as a worker makes it. Tokens mean nothing on the pretend
driver; that the ranks drew the same ones is checked by the ranks themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.demo.checkpoints import make_checkpoints

MODELS = ["llama-a", "qwen3-a"]
COMMUNICATORS = 4
"""Lines: vLLM makes two communicators with its groups, and each has two ranks."""


def test_two_ranks_share_their_communicators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines use those that were made when the ranks joined. The driver has seen no fault. A
    rank that is killed ends its instance."""
    if os.environ.get("PRETEND") != "1":
        pytest.fail("this is for the pretend driver: run `make gpu-dry`")
    make_checkpoints(tmp_path, MODELS)
    audit = tmp_path / "faults"
    environment = os.environ | {
        "PRETEND_DEVICES": "2",
        "PRETEND_AUDIT": str(audit),
        "PRETEND_COMMUNICATORS": str(tmp_path / "communicators"),
    }
    command = [sys.executable, "-m", "tests.gpu_ranks.leader"]
    command += [str(tmp_path / name) for name in MODELS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as leader:
        try:
            assert leader.stdout is not None
            stages = [json.loads(leader.stdout.readline()) for _ in range(1 + 2 * len(MODELS))]
            children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
            (follower,) = [int(pid) for pid in children if is_follower(int(pid))]
            os.kill(follower, signal.SIGKILL)
            ended = leader.wait()
        finally:
            leader.kill()

    assert [one["stage"] for one in stages] == ["joined", *["built", "turned"] * len(MODELS)]
    assert {one["communicators"] for one in stages} == {COMMUNICATORS}
    assert all(one["graphs"] for one in stages if one["stage"] == "built")
    assert [one["tokens"] for one in stages if one["stage"] == "turned"] == [7] * len(MODELS)
    assert ended == 1
    assert not audit.exists(), audit.read_text()


def is_follower(pid: int) -> bool:
    return b"appliance.worker.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
