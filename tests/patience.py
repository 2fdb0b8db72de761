"""How long a test waits for what has to happen, on a machine with other things to do.

A limit ends what hangs and says where. It is no part of what a test shows: no test waits for it
when all is well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 600


def until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is so, of another process, which reports nothing."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)
