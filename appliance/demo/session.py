"""Records the demonstration, so that the dashboard can show it when its daemon is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from tui.connection import Connection
from tui.messages import Kind
from tui.recording import Recorder
from tui.state import State

PATIENCE_SECONDS: Final = 5.0
"""How long the demonstration waits for its recorder, which hears four times a second."""


@asynccontextmanager
async def recorded(url: str, path: Path) -> AsyncIterator[None]:
    """Writes what the daemon tells meanwhile to a new file, from the state at first to what became
    of the last request. A disk that is full ends the recording and nothing else. Raises
    `tui.recording.NotRecorded` if the file cannot be made."""
    recorder, source, state = Recorder(path), Connection(url), State()
    idle = asyncio.Event()
    """It was told that there are no requests."""

    async def record() -> None:
        with suppress(OSError):
            async for message in source.follow():
                recorder.write(message)
                state.hear(message)
                if message.kind in (Kind.STATE, Kind.DELTA) and not state.rows("requests"):
                    idle.set()

    recording = asyncio.create_task(record())
    try:
        await _soon(idle)
        yield
        idle.clear()
        await _soon(idle)
    finally:
        recording.cancel()
        await asyncio.wait([recording])
        recorder.close()
        await source.close()


async def _soon(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), PATIENCE_SECONDS)
