"""The records of one batch on disk: a file that grows a line at a time, and ends whole.

A record counts once it is on the disk. What was cut off in the middle of a line, by a kill or a
full disk, is taken away again. Each line begins with the CRC-32 of its record, so that a damaged
one is noticed, and costs no other: what others depend on is there twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from appliance.batches.records import Batch, Created, Ended, LineDone, Record
from appliance.errors import IllegalTransition
from appliance.platform.durable import sync

SET_ASIDE = "set-aside"
"""The folder, below that of the logs, for those that were damaged, as they were."""

_MODE = 0o600
_BEGINNING = re.compile(rb'(?<![0-9a-f])[0-9a-f]{8} \{"record":|^')
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

log = logging.getLogger(__name__)


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
        data = b"".join(map(_lines, records))
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
        before = b""
        with self.path.open("rb") as file:
            while file.tell() < self._size:
                line = file.readline()
                if line != before:
                    yield _record(line)
                before = line

    def outcomes(self) -> list[OutcomePlace]:
        """The outcomes of requests, in the order of the input."""
        found = []
        offset = 0
        with self.path.open("rb") as file:
            while offset < self._size:
                line = file.readline()
                record = _record(line)
                if isinstance(record, LineDone):
                    found.append(OutcomePlace(record.request, record.ok, offset, len(line)))
                offset += len(line)
        return sorted(found)

    def entry(self, outcome: OutcomePlace) -> bytes:
        """What the files of a batch say of a request."""
        record = _record(os.pread(self._descriptor, outcome.size, outcome.offset))
        assert isinstance(record, LineDone)
        return bytes(record.entry)

    def close(self) -> None:
        os.close(self._descriptor)

    def _mend(self) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False


def _lines(record: Record) -> bytes:
    """One line for an outcome, which no other record depends on; two for any other."""
    encoded = _encoder.encode(record)
    line = b"%08x %b\n" % (zlib.crc32(encoded), encoded)
    return line if isinstance(record, LineDone) else 2 * line


def _record(line: bytes) -> Record:
    """What a line says; earlier versions wrote no checksums. Raises `msgspec.DecodeError` if it is
    damaged."""
    checksum, _, encoded = (b"", b"", line) if line.startswith(b"{") else line.partition(b" ")
    encoded = encoded.removesuffix(b"\n")
    if checksum and checksum != b"%08x" % zlib.crc32(encoded):
        raise msgspec.DecodeError("its checksum differs")
    return _decoder.decode(encoded)


def shorten(path: Path, ended: Ended) -> None:
    """Replace the log of a batch that is over by one that says no more than needed."""
    whole = BatchLog(path)
    try:
        first = next(whole.records())
    finally:
        whole.close()
    replace(path, map(_lines, (first, ended)))


def load(path: Path) -> Batch | None:
    """The batch whose log this is; None if it never came to be. A log with damaged records is set
    aside, and replaced by one without them: what they said is done again. Raises `OSError`, and
    `IllegalTransition` for what is no log of a batch, or says too little of one."""
    found = BatchLog(path)
    try:
        return Batch.of(found.records())
    except (ValueError, msgspec.DecodeError, IllegalTransition):
        pass
    finally:
        found.close()
    return _recover(path)


def _recover(path: Path) -> Batch:
    """What the whole records of a damaged log say of its batch. Raises `OSError`, and
    `IllegalTransition` if they do not say whether it is over: it is not begun anew then."""
    batch: Batch | None = None
    kept: list[Record] = []
    lines = [*_split(path.read_bytes())]
    seen: set[bytes] = set()
    damaged: list[bytes] = []
    for line in lines:
        try:
            record = _record(line)
            if line in seen:
                continue
            seen.add(line)
            if batch is not None:
                batch.apply(record)
            elif isinstance(record, Created):
                batch = Batch(record)
            else:
                raise IllegalTransition("a batch begins with its creation")
            kept.append(record)
        except (ValueError, msgspec.DecodeError, IllegalTransition):
            damaged.append(line)
    # The log of a batch that is over has its creation and its end alone.
    remains = all(_is_of(line, copy) for line in damaged for copy in seen)
    unclear = len(kept) == 1 and not remains and not any(b'"begun"' in line for line in lines)
    aside = path.parent / SET_ASIDE / path.name
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    if batch is None or unclear:
        path.rename(aside)
        raise IllegalTransition(f"too little of it can be read; it is set aside in {aside.parent}")
    replace(aside, [path.read_bytes()])
    replace(path, map(_lines, kept))
    log.error(
        "%s had %d damaged lines; what only they said is done again. The log as it was is in %s",
        path.name,
        len(damaged),
        aside.parent,
    )
    return batch


def _split(data: bytes) -> Iterator[bytes]:
    """The lines of a damaged log, also where the end of one was damaged: a line that goes on after
    its record has another one in it."""
    for line in data.removesuffix(b"\n").split(b"\n"):
        starts = [found.start() for found in _BEGINNING.finditer(line)]
        ends = [*(start - 1 for start in starts[1:]), len(line)]
        yield from (line[start:end] for start, end in zip([0, *starts[1:]], ends, strict=True))


def _is_of(damaged: bytes, line: bytes) -> bool:
    """Whether a damaged line was a copy of another one, or a piece of one."""
    if len(damaged) == len(line):
        return sum(one != other for one, other in zip(damaged, line, strict=True)) <= len(line) // 8
    return damaged in line


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
