"""The clock of an event loop, which a test moves on: a limit is over when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest


def movable_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What moves the running loop's clock on by so many seconds; the loop is asyncio's own. What is
    due then is done in its next turns."""
    loop = asyncio.get_running_loop()
    time, ahead = loop.time, 0.0

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(loop, "time", lambda: time() + ahead)
    return move
