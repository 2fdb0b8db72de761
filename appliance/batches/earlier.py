"""Takes in what earlier versions kept in files: descriptions as JSON, and a log for each batch.

They are written to the database first and go then, so that a stop in between loses nothing. What
is damaged is set aside.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from appliance.batches.files import StoredFile, row_of, set_aside
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, Begun, Created, Ended, LineDone, Record
from appliance.platform.database import Database

_ABOUT: Final = ".json"
_GROUP_BYTES: Final = 16 << 20
"""Of the entries that are written at once."""
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

log = logging.getLogger(__name__)


def take_in(store: Database, files: Path, logs: Path) -> None:
    """Move what is known of the files and batches in these folders into `store`. What cannot be
    read, or written, stays for the next start, with a line in the log. Takes time."""
    for folder, pattern, take in (
        (files, f"*{_ABOUT}", _take_in_file),
        (logs, "*batch_*.jsonl", _take_in_batch),
    ):
        for path in sorted(folder.glob(pattern)):
            try:
                take(store, path)
            except OSError as error:
                log.error("%s is ignored until the next start: %s", path, error)


def _take_in_file(store: Database, path: Path) -> None:
    encoded, _, checksum = path.read_bytes().partition(b"\n")
    try:
        if checksum and checksum != b"%08x\n" % zlib.crc32(encoded):
            raise ValueError("its checksum differs")
        file = msgspec.json.decode(encoded, type=StoredFile)
        if file.id != path.name.removesuffix(_ABOUT):
            raise ValueError("it describes another file")
    except (ValueError, msgspec.DecodeError) as error:
        set_aside(path, f"it cannot be read ({error})")
        return
    store.write([row_of(file)])
    path.unlink()


def _take_in_batch(store: Database, path: Path) -> None:
    """A log with damaged lines loses those, and is kept where it is set aside. Outcomes are written
    in groups, and the other records last: without them there is no batch yet."""
    id = path.name.removesuffix(".jsonl")
    written = BatchLog(store, path.parent, id)
    others: list[Record] = []
    outcomes: list[LineDone] = []
    damaged = nbytes = 0
    try:
        for record in _records(path):
            if record is None:
                damaged += 1
            elif isinstance(record, LineDone):
                outcomes.append(record)
                nbytes += len(record.entry)
                if nbytes > _GROUP_BYTES:
                    written.append(outcomes)
                    outcomes, nbytes = [], 0
            else:
                others.append(record)
        says_enough = any(isinstance(record, Begun | Ended) for record in others)
        if others and (says_enough or not damaged):
            if not store.rows("records", id):
                written.append([*outcomes, *others])
        elif damaged:
            set_aside(path, "too little of it can be read")
            return
    finally:
        written.close()
    if damaged:
        set_aside(path, f"{damaged} damaged lines in it are left out")
    else:
        path.unlink()  # also if no client had its confirmation


def _records(path: Path) -> Iterator[Record | None]:
    """Those that a batch can have had; None for a damaged line. What was cut off at the end is no
    line, and most records were there twice."""
    batch: Batch | None = None
    before = b""
    with path.open("rb") as lines:
        for line in lines:
            if line == before or not line.endswith(b"\n"):
                continue
            before = line
            try:
                record = _record(line)
            except (ValueError, msgspec.DecodeError):
                yield None
                continue
            if batch is None and isinstance(record, Created):
                batch = Batch(record)
            elif batch is not None and batch.allows(record):
                batch.apply(record)
            else:
                yield None
                continue
            yield record


def _record(line: bytes) -> Record:
    checksum, _, encoded = (b"", b"", line) if line.startswith(b"{") else line.partition(b" ")
    encoded = encoded.removesuffix(b"\n")
    if checksum and checksum != b"%08x" % zlib.crc32(encoded):
        raise ValueError("its checksum differs")
    return _decoder.decode(encoded)
