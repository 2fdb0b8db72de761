"""Takes in what earlier versions kept in files: descriptions as JSON, and a log for each batch.

They are written to the database first and go then, so that a stop in between loses nothing. What
is damaged is set aside.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Final

import msgspec

from appliance.batches.files import StoredFile, row_of, set_aside
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, Begun, Created, Ended, Record
from appliance.platform.database import Database

_ABOUT: Final = ".json"
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

log = logging.getLogger(__name__)


def take_in(store: Database, files: Path, logs: Path) -> None:
    """Move what is known of the files and batches in these folders into `store`. Takes time; raises
    `OSError`."""
    for path in sorted(files.glob(f"*{_ABOUT}")):
        _take_in_file(store, path)
    for path in sorted(logs.glob("*batch_*.jsonl")):
        _take_in_batch(store, path)


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
    """A log with damaged lines loses those, and is kept where it is set aside."""
    records, damaged = _read(path)
    says_enough = any(isinstance(record, Begun | Ended) for record in records)
    if not records or (damaged and not says_enough):
        if damaged:
            set_aside(path, "too little of it can be read")
        else:
            path.unlink()  # no client had its confirmation
        return
    id = path.name.removesuffix(".jsonl")
    if not store.rows("records", id):
        written = BatchLog(store, path.parent, id)
        try:
            written.append(records)
        finally:
            written.close()
    if damaged:
        set_aside(path, f"{damaged} damaged lines in it are left out")
    else:
        path.unlink()


def _read(path: Path) -> tuple[list[Record], int]:
    """The records that a batch can have had, and how many lines are damaged. What was cut off at
    the end is no line."""
    records: list[Record] = []
    batch: Batch | None = None
    damaged, before = 0, b""
    for line in path.read_bytes().splitlines(keepends=True):
        if line == before or not line.endswith(b"\n"):
            continue
        before = line
        try:
            record = _record(line)
        except (ValueError, msgspec.DecodeError):
            damaged += 1
            continue
        if batch is None and isinstance(record, Created):
            batch = Batch(record)
        elif batch is not None and batch.allows(record):
            batch.apply(record)
        else:
            damaged += 1
            continue
        records.append(record)
    return records, damaged


def _record(line: bytes) -> Record:
    checksum, _, encoded = (b"", b"", line) if line.startswith(b"{") else line.partition(b" ")
    encoded = encoded.removesuffix(b"\n")
    if checksum and checksum != b"%08x" % zlib.crc32(encoded):
        raise ValueError("its checksum differs")
    return _decoder.decode(encoded)
