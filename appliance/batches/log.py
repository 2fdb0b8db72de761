"""The records of one batch on disk: in the database, and what its requests came to in a file.

A record counts once the database has it. The answers of requests (the entries of outcomes) are
appended to the file first. A damaged entry costs its outcome, which is computed again.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from appliance.batches.records import Batch, Created, Ended, LineDone, Record
from appliance.errors import IllegalTransition
from appliance.platform.database import Change, Database, Delete, Put, Row
from appliance.platform.durable import sync

ENTRIES: Final = ".entries"
"""How the name of a batch's file of entries ends."""

_MODE: Final = 0o600
_NO_ENTRY: Final = msgspec.Raw(b"null")
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

log = logging.getLogger(__name__)


class EntryDamaged(Exception):
    """What a request came to cannot be read as it was written."""


class OutcomePlace(NamedTuple):
    """Where the entry of a request's outcome is in the file of a batch."""

    request: int
    ok: bool
    offset: int
    size: int
    crc: int


class BatchLog:
    """A log that is open for more records. Every method may wait for the disk.

    After an `OSError` the log is as it was before; the same may be tried again.
    """

    def __init__(self, store: Database, folder: Path, id: str) -> None:
        """Open the log of a batch, whose file of entries is in `folder`. Raises `OSError`."""
        self._store = store
        self._id = id
        self._path = entries_path(folder, id)
        self._records = len(store.rows("records", id))
        places = [_place(row) for row in store.rows("outcomes", id)]
        self._end = max((place.offset + place.size for place in places), default=0)
        self._descriptor: int | None = None
        self._closed = False
        self._lock = Lock()  # an entry may be read in another thread while it is closed

    def append(self, records: Sequence[Record]) -> None:
        """Write all of them, or none; they are on the disk afterwards. O(bytes)."""
        changes: list[Change] = []
        entries: list[bytes] = []
        end, number = self._end, self._records
        for record in records:
            if isinstance(record, LineDone):
                entry = bytes(record.entry)
                about = _encoder.encode(msgspec.structs.replace(record, entry=_NO_ENTRY))
                values = (self._id, record.request, about, end, len(entry), zlib.crc32(entry))
                changes.append(Put("outcomes", values))
                entries.append(entry)
                end += len(entry)
            else:
                changes.append(Put("records", (self._id, number, _encoder.encode(record))))
                number += 1
        if entries:
            self._append_entries(b"".join(entries))
        self._store.write(changes)
        self._end, self._records = end, number

    @property
    def size_bytes(self) -> int:
        """What its entries take."""
        return self._end

    def outcomes(self) -> list[OutcomePlace]:
        """The outcomes of requests, in the order of the input."""
        return [_place(row) for row in self._store.rows("outcomes", self._id)]

    def entry(self, outcome: OutcomePlace) -> bytes:
        """What the files of a batch say of a request. Raises `EntryDamaged`, and `OSError`."""
        with self._lock:
            data = os.pread(self._file(), outcome.size, outcome.offset)
        if len(data) != outcome.size or zlib.crc32(data) != outcome.crc:
            raise EntryDamaged(f"the outcome of request {outcome.request} is damaged")
        return data

    def finish(self, ended: Ended) -> None:
        """The batch is over: its log says no more than needed from now on, and has no entries."""
        first = self._store.rows("records", self._id, 0)
        changes: list[Change] = [Delete("outcomes", (self._id,)), Delete("records", (self._id,))]
        changes += [Put("records", row) for row in first]
        changes.append(Put("records", (self._id, 1, _encoder.encode(ended))))
        self._store.write(changes)
        self._end, self._records = 0, 2
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None
            self._closed = True

    def _append_entries(self, data: bytes) -> None:
        """Behind what counts; what an earlier attempt left there is written over."""
        with self._lock:
            descriptor = self._file()
            offset, rest = self._end, memoryview(data)
            while rest:
                written = os.pwrite(descriptor, rest, offset)
                offset, rest = offset + written, rest[written:]
            os.fsync(descriptor)

    def _file(self) -> int:
        if self._descriptor is None:
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            if self._closed:
                raise OSError(errno.EBADF, "the log of the batch is closed")
            descriptor = os.open(self._path, flags, _MODE)
            try:
                sync(self._path.parent)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor


def entries_path(folder: Path, id: str) -> Path:
    """Where the entries of a batch are."""
    return folder / f"{id}{ENTRIES}"


def load_all(store: Database, folder: Path) -> list[Batch]:
    """All batches. An outcome whose entry is damaged is taken back, with a line in the log: it is
    computed again. A batch whose records make none, or whose entries cannot be opened, is left
    where it is, with a line in the log. O(bytes of entries). Raises `OSError`."""
    batches = []
    outcomes = _by_batch(store.rows("outcomes"))
    for id, rows in _by_batch(store.rows("records")).items():
        try:
            batches.append(_load(store, folder, id, rows, outcomes[id]))
        except (msgspec.DecodeError, IllegalTransition) as error:
            log.error("%s is ignored, as its records make no batch: %s", id, error)
        except OSError as error:  # it may pass, and is no damage
            log.error("%s is left alone until the next start: %s", id, error)
    return batches


def _load(store: Database, folder: Path, id: str, rows: list[Row], outcomes: list[Row]) -> Batch:
    """One of them. Raises `IllegalTransition`, `msgspec.DecodeError` and `OSError`."""
    records = [_decode(row[2]) for row in rows]
    if not isinstance(records[0], Created):
        raise IllegalTransition("a batch begins with its creation")
    batch = Batch(records[0])
    if isinstance(records[-1], Ended):
        batch.apply(records[-1])
        return batch
    for record in records[1:2]:
        batch.apply(record)
    taken_back: list[Change] = []
    for row, outcome in zip(outcomes, _readable(store, folder, id, outcomes), strict=True):
        if outcome is None:
            taken_back.append(Delete("outcomes", row[:2]))
        else:
            batch.apply(outcome)
    for row, record in zip(rows[2:], records[2:], strict=True):
        if taken_back and not batch.allows(record):  # it was complete, and is not any more
            taken_back.append(Delete("records", row[:2]))
        else:
            batch.apply(record)
    if taken_back:
        store.write(taken_back)
        log.error("%s: %d damaged records are taken back, to be done again", id, len(taken_back))
    return batch


def delete_log(store: Database, folder: Path, id: str) -> None:
    """Nothing is left of a batch that is over. Raises `OSError`."""
    entries_path(folder, id).unlink(missing_ok=True)
    store.write([Delete("outcomes", (id,)), Delete("records", (id,))])


def _readable(
    store: Database, folder: Path, id: str, outcomes: Iterable[Row]
) -> Iterator[Record | None]:
    """The outcomes of a batch, without their entries; None for one with a damaged entry."""
    entries = BatchLog(store, folder, id)
    try:
        for row in outcomes:
            try:
                entries.entry(_place(row))
            except EntryDamaged:
                yield None
            else:
                yield _decode(row[2])
    finally:
        entries.close()


def _by_batch(rows: Iterable[Row]) -> defaultdict[Any, list[Row]]:
    found: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found


def _place(row: Row) -> OutcomePlace:
    _, request, about, offset, size, crc = row
    record = _decode(about)
    assert isinstance(record, LineDone)
    return msgspec.convert((request, record.ok, offset, size, crc), OutcomePlace)


def _decode(record: object) -> Record:
    assert isinstance(record, bytes)
    return _decoder.decode(record)
