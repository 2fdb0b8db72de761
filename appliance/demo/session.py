"""Records the demonstration, so that the dashboard can show it when its daemon is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tui.connection import DaemonConnection
from tui.messages import Kind, Message
from tui.recording import RecordingWriter
from tui.state import State

PATIENCE_SECONDS: Final = 5.0
"""How long the demonstration waits for its recorder, which hears four times a second."""


class RecordedSession:
    """How far a recording has come, and what became of it."""

    def __init__(self) -> None:
        self.broken: str | None = None
        """Why it ended before the demonstration did, once that is over; None: it did not."""
        self._state = State()
        self._newest = -1
        """The number of the newest event received."""
        self._settled = -1
        """That of a state without requests."""
        self._heard = asyncio.Event()

    def hear(self, message: Message) -> None:
        self._state.hear(message)
        if message.kind is Kind.NOTICE:
            self._newest = message.data["number"]
        elif message.kind in (Kind.STATE, Kind.DELTA):
            self._newest = max(self._newest, message.data.get("newest_event", -1))
            if not self._state.rows("requests"):
                self._settled = self._newest
            self._heard.set()

    async def settled(self, event: int) -> None:
        """Until a state without requests, newer than the event of this number."""
        while self._settled < event:
            self._heard.clear()
            await self._heard.wait()


@asynccontextmanager
async def recorded(url: str, path: Path) -> AsyncIterator[RecordedSession]:
    """Writes what the daemon tells meanwhile to a new file, from the state at first to what became
    of the last request. A disk that is full ends the recording and nothing else. Raises
    `tui.recording.NotRecorded` if the file cannot be made."""
    recorder, source, session = RecordingWriter(path), DaemonConnection(url), RecordedSession()

    async def record() -> None:
        async for message in source.follow():
            recorder.write(message)
            session.hear(message)

    async def all_heard() -> None:
        await session.settled(await _newest_event(source))

    recording = asyncio.create_task(record())
    try:
        await _soon(session.settled(0), recording)
        yield session
        await _soon(all_heard(), recording)
    finally:
        recording.cancel()
        await asyncio.wait([recording])
        if not recording.cancelled() and (error := recording.exception()) is not None:
            session.broken = f"{type(error).__name__}: {error}"
        recorder.close()
        await source.close()


async def _newest_event(source: DaemonConnection) -> int:
    """The number of the newest event, as the daemon reports it to a new follower."""
    async with aclosing(source.follow()) as messages:  # type: ignore[type-var]
        async for message in messages:
            if message.kind is Kind.STATE:
                number: int = message.data["newest_event"]
                return number
    raise AssertionError("who follows gives up by being cancelled")


async def _soon(waited: Coroutine[Any, Any, None], recording: asyncio.Task[None]) -> None:
    """Until that is so, but not for ever, nor for a recording that is over."""
    waiting = asyncio.create_task(waited)
    try:
        await asyncio.wait(
            [waiting, recording],
            timeout=PATIENCE_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
