"""Power cuts at every point of what is written of batches, files, keys and models."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.power_cut import workload
from tests.power_cut.replay import cuts

RECORDER = Path(workload.__file__).with_name("recorder.c")
TRIES = 3
"""Of what a cut leaves of what was not synced, drawn at random."""
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
NOTHING = {"files": {}, "batches": {}, "keys": [], "models": 0}


def recorded(folder: Path) -> tuple[str, Path]:
    """The notes of the workload, and the folder in which it was."""
    library, root, notes = folder / "recorder.so", folder / "root", folder / "notes"
    root.mkdir()
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(RECORDER), "-ldl", "-lpthread"],
        check=True,
    )
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "POWER_CUT_ROOT": str(root),
        "POWER_CUT_LOG": str(notes),
    }
    command = [sys.executable, "-m", workload.__name__, str(root)]
    subprocess.run(command, env=environment, check=True)
    return notes.read_text(), root


@pytest.mark.thorough
def test_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    """Also if everything that was not synced is lost, or any part of it. What was going on is there
    or is not; nothing else is."""
    notes, root = recorded(tmp_path)
    states = [json.loads(bytes.fromhex(line[2:])) for line in notes.splitlines() if line[0] == "A"]
    assert len(states) > 15
    before = None
    draw = random.Random(1)
    for cut in cuts(notes, root):
        allowed = [NOTHING, *states][len(cut.acks) : len(cut.acks) + 2]
        for number in range(1 + TRIES):
            with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
                folder = Path(name) / "found"
                cut.disk.cut(folder, draw if number else None)
                found = workload.look(folder)
            assert found in allowed, (cut.line, notes.splitlines()[cut.line][:200])
        before = found
    assert before == states[-1]
