"""What a rehearsal on the pretend driver writes down, and what it says that it did not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_lease, provenance

LEASE = Path(gpu_lease.__file__)
PATIENCE_SECONDS = 60


def test_nothing_that_reads_like_a_figure_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "PRETENDS", True)
    measured = {
        "gpu": "NVIDIA H200",
        "gpu_memory_bytes": 1 << 37,
        "chats": 12,
        "identical": 0,
        "rounds": [{"tokens": 96, "tokens_per_second": 31.5}],
    }

    provenance.write(measured, tmp_path / "told.json")

    assert json.loads((tmp_path / "told.json").read_text()) == {
        "rehearsal": provenance.NO_GPU,
        "gpu": provenance.NO_GPU,
        "gpu_memory_bytes": provenance.NO_GPU,
        "chats": 12,
        "rounds": [{"tokens": 96, "tokens_per_second": None}],
    }


def test_results_of_a_machine_are_written_as_they_are(tmp_path: Path) -> None:
    measured = {"gpu": "any", "seconds": 1.5, "identical": 3}

    provenance.write(measured, tmp_path / "told.json")

    assert json.loads((tmp_path / "told.json").read_text()) == measured


def test_a_section_that_needs_arithmetic_is_not_passed(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(LEASE), "--out", str(tmp_path), "codec"],
        env=os.environ | {"PRETEND": "1"},
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert ended.returncode == 1
    told = json.loads((tmp_path / "summary.json").read_text())["codec"]
    assert told["status"] is None
    assert "decoding needs arithmetic" in told["why"]


@pytest.mark.parametrize("name", gpu_lease.SECTIONS)
def test_a_smaller_section_says_what_it_leaves_out(name: str) -> None:
    section = gpu_lease.SECTIONS[name]

    assert section.pretend is None or section.left_out
