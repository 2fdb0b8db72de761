"""Where batches and files are written down: the tables of their database, and their migrations.

Contents (uploads, outputs, answers) are files; the database has what is known of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from appliance.platform.database import Database

_MIGRATIONS: Final = (
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        about BLOB NOT NULL,      -- StoredFile as JSON
        leaving INTEGER NOT NULL, -- 1 from when its content may be deleted
        checksum INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE records (
        batch TEXT NOT NULL,
        number INTEGER NOT NULL,  -- from 0 on, in the order in which they were written
        record BLOB NOT NULL,     -- a Record as JSON, none of them an outcome
        checksum INTEGER NOT NULL,
        PRIMARY KEY (batch, number)
    ) WITHOUT ROWID;
    CREATE TABLE outcomes (
        batch TEXT NOT NULL,
        request INTEGER NOT NULL,
        record BLOB NOT NULL,     -- LineDone as JSON, without its entry
        offset INTEGER NOT NULL,  -- where the entry is in the batch's file of entries
        size INTEGER NOT NULL,
        crc INTEGER NOT NULL,     -- CRC-32 of the entry
        checksum INTEGER NOT NULL,
        PRIMARY KEY (batch, request)
    ) WITHOUT ROWID
    """,
)


def store_in(folder: Path) -> Database:
    """The database of a folder, still to be opened, with the tables `files`, `records` and
    `outcomes`."""
    return Database(folder / "store.sqlite", _MIGRATIONS)
