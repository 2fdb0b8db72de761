"""The records of one batch on disk: a file that grows a line at a time, and ends whole.

A record counts once it is on the disk. What was cut off in the middle of a line, by a kill or a
full disk, is taken away again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from appliance.batches.records import Batch, Ended, LineDone, Record
from appliance.platform.durable import sync

_MODE = 0o600
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class OutcomePlace(NamedTuple):
    """Where the record of a request's outcome is in a log."""

    request: int
    ok: bool
    offset: int
    size: int


class BatchLog:
    """A log that is open for more records. Every method may wait for the disk.

    After an `OSError` the log is as it was before; the same may be tried again.
    """

    def __init__(self, path: Path) -> None:
        """Open it, or make it; a line that was cut off is taken away."""
        self.path = path
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, _MODE)
        self._size = 0
        with path.open("rb") as file:
            for line in file:
                self._size += len(line) if line.endswith(b"\n") else 0
        self._torn = self._size != os.fstat(self._descriptor).st_size
        self._mend()

    def append(self, records: Sequence[Record]) -> None:
        """Write all of them, or none; they are on the disk afterwards."""
        self._mend()
        data = b"".join(_encoder.encode(record) + b"\n" for record in records)
        self._torn = True
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)
        self._torn = False
        self._size += len(data)

    @property
    def size_bytes(self) -> int:
        """What is whole of it."""
        return self._size

    def records(self) -> Iterator[Record]:
        """All of them, from the first on. Raises `msgspec.DecodeError` for what is none."""
        with self.path.open("rb") as file:
            while file.tell() < self._size:
                yield _decoder.decode(file.readline())

    def outcomes(self) -> list[OutcomePlace]:
        """The outcomes of requests, in the order of the input."""
        found = []
        offset = 0
        with self.path.open("rb") as file:
            while offset < self._size:
                line = file.readline()
                record = _decoder.decode(line)
                if isinstance(record, LineDone):
                    found.append(OutcomePlace(record.request, record.ok, offset, len(line)))
                offset += len(line)
        return sorted(found)

    def entry(self, outcome: OutcomePlace) -> bytes:
        """What the files of a batch say of a request."""
        record = _decoder.decode(os.pread(self._descriptor, outcome.size, outcome.offset))
        assert isinstance(record, LineDone)
        return bytes(record.entry)

    def close(self) -> None:
        os.close(self._descriptor)

    def _mend(self) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False


def shorten(path: Path, ended: Ended) -> None:
    """Replace the log of a batch that is over by one that says no more than needed."""
    log = BatchLog(path)
    try:
        first = next(log.records())
    finally:
        log.close()
    replace(path, (_encoder.encode(record) + b"\n" for record in (first, ended)))


def load(path: Path) -> Batch | None:
    """The batch whose log this is; None if it never came to be. Raises `OSError`,
    `msgspec.DecodeError`, and `IllegalTransition` for what is no log of a batch."""
    log = BatchLog(path)
    try:
        return Batch.of(log.records())
    finally:
        log.close()


def replace(path: Path, chunks: Iterable[bytes]) -> int:
    """Put a file there, whole or not at all, and on the disk. Answers its size."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    sync(path.parent)
    return size
