"""Starts the dashboard on a daemon or on a recording, in this terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tui.app import Dashboard
from tui.connection import DaemonConnection
from tui.recording import RecordingPlayer, RecordingWriter


def run(
    url: str,
    *,
    key: str | None = None,
    readonly: bool = False,
    record: Path | None = None,
    replay: Path | None = None,
    theme: str = "dark",
) -> None:
    """Returns when it is left. Raises `NoRecording` if `replay` is none, `NotRecorded` if
    `record` cannot be made, or is there already."""
    asyncio.run(_run(url, key, readonly, record, replay, theme))


async def _run(
    url: str,
    key: str | None,
    readonly: bool,
    record: Path | None,
    replay: Path | None,
    theme: str,
) -> None:
    source = DaemonConnection(url, key) if replay is None else RecordingPlayer(replay)
    recorder = None if record is None else RecordingWriter(record)
    try:
        await Dashboard(source, readonly=readonly, recorder=recorder, theme=theme).run_async()
    finally:
        if recorder is not None:
            recorder.close()
        if isinstance(source, DaemonConnection):
            await source.close()
