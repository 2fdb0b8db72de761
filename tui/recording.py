"""A session in a file: JSON lines, a message each, as they arrived; and played again.

The first line says what the file is. Each other one has `at` (Unix seconds), `kind` and `data`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tui.messages import AnswerPiece, DaemonRefused, Document, Kind, Message

FIRST_LINE = {"appliance_session": 1}


class NoRecording(Exception):
    """A file that cannot be played; the text names it, the line, and what is wrong."""


class NotRecorded(Exception):
    """A file that cannot be made; the text names it, and what is wrong."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    at: float
    kind: Kind
    data: Document


class RecordingWriter:
    """Writes what it is given to a new file."""

    def __init__(self, path: Path) -> None:
        """Raises `NotRecorded` if the file cannot be made, or is there already."""
        try:
            self._file: BinaryIO = path.open("xb")
        except OSError as error:
            raise NotRecorded(f"{path}: {error.strerror}; --record makes a new file") from error
        self._write(FIRST_LINE)

    def write(self, message: Message) -> None:
        """Reaches the file at once: a session ends when it ends. Raises `OSError`."""
        self._write(_Line(*message))
        self._file.flush()

    def close(self) -> None:
        """What cannot be written any more, `write` raised an error for."""
        with suppress(OSError):
            self._file.close()

    def _write(self, line: object) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_recording(path: Path) -> Iterator[Message]:
    """The messages of a file, one at a time. Raises `NoRecording`."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            try:
                is_one = msgspec.json.decode(first) == FIRST_LINE
            except msgspec.DecodeError:
                is_one = False
            if not is_one:
                raise NoRecording(f"{path}: not a session that `appliance top --record` wrote")
            for number, line in enumerate(file, start=2):
                try:
                    found = msgspec.json.decode(line, type=_Line)
                except msgspec.DecodeError as error:
                    raise NoRecording(f"{path}, line {number}: {error}") from error
                yield Message(found.at, found.kind, found.data)
    except OSError as error:
        raise NoRecording(f"{path}: {error.strerror}") from error


class RecordingPlayer:
    """A recording in place of a daemon, in its own time. Implements `tui.messages.DaemonSource`."""

    live = False

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises `NoRecording` if the file is none."""
        self.name = path.name
        self._path = path
        self._clock = clock
        self._sleep = sleep
        next(read_recording(path), None)

    async def follow(self) -> AsyncIterator[Message]:
        before: float | None = None
        for at, kind, data in read_recording(self._path):
            if before is not None and at > before:
                await self._sleep(at - before)
            before = at
            yield Message(self._clock(), kind, data)

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        raise DaemonRefused("this is a recording: there is no daemon to ask")

    async def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        raise DaemonRefused("this is a recording: there is no daemon to talk to")
        yield
