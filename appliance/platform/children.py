"""Child processes that run our modules: how they are started, and which go when memory runs out."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

WORKER_OOM_SCORE: Final = 500
"""Requests outlive their worker, so it goes first."""
FRONT_END_OOM_SCORE: Final = 300
"""A front end takes its streams along; the daemon would take everything."""

_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """What starts `module` with this interpreter.

    With ``-P``: with ``-m`` alone Python looks for modules in the working directory first, so a
    `msgspec.py` that lies there would run with the daemon's rights.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def go_before_the_daemon(score: int) -> None:
    """Have the kernel end this process rather than the daemon when memory runs out: `score` is its
    `oom_score_adj`, from 0 to 1000. Without effect where the system does not let it be raised, or
    has set a higher one."""
    with contextlib.suppress(OSError, ValueError):
        if int(_OOM_SCORE.read_text()) < score:
            _OOM_SCORE.write_text(str(score))
