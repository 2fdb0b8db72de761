"""How long to wait until a process that died is started again."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 10.0


def pause_after(pause: float, *, worked: bool) -> float:
    """The next pause, given the one before. It grows while such processes die without having done
    anything."""
    return FIRST_PAUSE_SECONDS if worked else min(pause * 2, LONGEST_PAUSE_SECONDS)
