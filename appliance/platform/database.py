"""A small database that survives kills, power cuts and damage on the disk: SQLite, written twice.

Both copies get every transaction, and it counts when both have it (WAL, ``synchronous=FULL``). Each
row has a checksum. At a start, a copy that is damaged, or behind, is replaced by the other one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from appliance.errors import ApplianceError
from appliance.platform.durable import NEW, sync

SET_ASIDE: Final = "set-aside"
"""The folder, in that of the database, for copies that were damaged. Nothing is deleted there."""

Value: TypeAlias = str | bytes | int | float | None
Row: TypeAlias = tuple[Value, ...]

_COMMITS: Final = (
    "CREATE TABLE commits (id INTEGER PRIMARY KEY, number INTEGER NOT NULL, "
    "version INTEGER NOT NULL, checksum INTEGER NOT NULL)"
)
"""One row: how many transactions there were, and the version of the tables."""
RENEWAL_SECONDS: Final = 60.0
"""How long after a copy could not be made it is tried again."""
_HEADER_BYTES: Final = 100
_VERSIONS: Final = frozenset({b"\x01\x01", b"\x02\x02"})
"""In the header: what it takes to write and to read it, without and with a write-ahead log."""
_DAMAGE: Final = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT}
)
"""What SQLite says of a file that is none of its own any more; all else may pass."""

log = logging.getLogger(__name__)


class Put(NamedTuple):
    """A row that is there from now on, in place of one with the same key. `values` are those of
    all columns but the last, which is its checksum."""

    table: str
    values: Row


class Delete(NamedTuple):
    """No row of `table` has these first columns any more."""

    table: str
    key: Row


Change: TypeAlias = Put | Delete


class _Damaged(Exception):
    """A copy cannot be trusted."""


class _Later(Exception):
    """A copy was made by a later version."""


_TROUBLE: Final = (sqlite3.Error, _Damaged, _Later, UnicodeDecodeError)
"""What reading a copy raises. SQLite's messages repeat what is damaged, which may be no text."""


class Database:
    """Tables whose columns end with a `checksum`. Everything may wait for the disk; threads may
    share it. A transaction costs two syncs; a start reads all rows of both copies."""

    def __init__(self, path: Path, migrations: Sequence[str]) -> None:
        """The database at `path`, once it is opened. `migrations` are SQL scripts: the n-th makes
        version n of the tables out of the one before."""
        self._path = path
        self._twin = path.with_name(f"{path.stem}-copy{path.suffix}")
        self._migrations = migrations
        self._lock = threading.Lock()
        self._main: sqlite3.Connection
        """While it is open."""
        self._copy: sqlite3.Connection | None = None
        self._commits: int
        self._renew_at = 0.0
        self._keys: dict[str, list[str]]

    def open(self) -> None:
        """Open it, or make it; only one process may have it open. Raises `ApplianceError` if a
        later version made it, or if it cannot be opened."""
        try:
            self._main, self._copy = self._open()
            self._commits = _state(self._main).commits
            self._keys = _columns(self._main)
            if self._copy is None:
                self._copy = self._renew_copy()
        except (*_TROUBLE, OSError) as error:
            raise ApplianceError(f"{self._path}: cannot be opened: {error}") from error

    def rows(self, table: str, *key: Value) -> list[Row]:
        """The rows whose first columns are `key`, in the order of their keys, without their
        checksums. Raises `OSError` if both copies were damaged since the start."""
        condition = self._condition(table, key)
        with self._lock:
            for connection in filter(None, (self._main, self._copy)):
                try:
                    found = connection.execute(f"SELECT * FROM {table}{condition}", key).fetchall()
                    return [_checked(table, row) for row in found]
                except _TROUBLE as error:
                    log.error("%s: %s cannot be read: %s", self._path, table, error)
        raise OSError(errno.EIO, f"{table} cannot be read from {self._path} or its copy")

    def write(self, changes: Iterable[Change]) -> None:
        """Make all of these changes, or none; they are on the disk afterwards. Raises `OSError`."""
        with self._lock:
            statements = [self._statement(change) for change in changes]
            commits = (0, self._commits + 1, len(self._migrations))
            statements.append(self._statement(Put("commits", commits)))
            self._commit(self._main, statements)
            self._commits += 1
            if self._copy is None:
                if time.monotonic() >= self._renew_at:
                    self._copy = self._renew_copy()
                return
            try:
                self._commit(self._copy, statements)
            except OSError as error:
                # The change counts: one copy has it. This one is made anew with the next change.
                log.error("%s: %s; without a copy, damage may cost data", self._twin, error)
                self._copy.close()
                self._copy = None
                _remove(self._twin)  # it is behind from now on

    def close(self) -> None:
        """Without effect if it is not open."""
        with self._lock:
            for connection in filter(None, (getattr(self, "_main", None), self._copy)):
                connection.close()

    # --- writing ---------------------------------------------------------------------------------

    def _condition(self, table: str, key: Row) -> str:
        names = self._keys[table][: len(key)]
        return " WHERE " + " AND ".join(f"{name} = ?" for name in names) if names else ""

    def _statement(self, change: Change) -> tuple[str, Row]:
        if isinstance(change, Delete):
            condition = self._condition(change.table, change.key)
            return f"DELETE FROM {change.table}{condition}", change.key
        values = (*change.values, _checksum(change.table, change.values))
        places = ", ".join("?" * len(values))
        return f"INSERT OR REPLACE INTO {change.table} VALUES ({places})", values

    def _commit(self, connection: sqlite3.Connection, statements: list[tuple[str, Row]]) -> None:
        try:
            with _transaction(connection):
                for sql, values in statements:
                    connection.execute(sql, values)
        except sqlite3.Error as error:
            code = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
            reason = "No space left on device" if code == errno.ENOSPC else str(error)
            raise OSError(code, reason, str(self._path)) from error

    # --- opening ---------------------------------------------------------------------------------

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection | None]:
        """The database with the tables of today, from the copy that is whole and has the most
        transactions; and the other one, if it is the same."""
        new = _new(self._path)
        if new.exists() and not self._path.exists() and not self._twin.exists():
            new.rename(self._path)  # the daemon stopped just before, with all rows in it
        _remove(new)
        found: dict[Path, sqlite3.Connection] = {}
        damaged: dict[Path, Exception] = {}
        with contextlib.ExitStack() as connections:
            for path in filter(Path.exists, (self._path, self._twin)):
                try:
                    whole = contextlib.closing(self._whole(path))
                    found[path] = connections.enter_context(whole)
                except _TROUBLE as error:
                    if isinstance(error, sqlite3.Error) and _code(error) not in _DAMAGE:
                        raise  # it may be locked: that passes, and is no damage
                    if isinstance(error, _Later):
                        raise
                    damaged[path] = error
                    log.error("%s is damaged (%s); it goes to %s", path, error, SET_ASIDE)
            states = {path: _state(connection) for path, connection in found.items()}
            if not found:
                self._save_rows(list(damaged))
            else:
                for path in damaged:
                    self._set_aside(path)
                self._take_the_newer(found, states)
            if self._path not in found:
                found[self._path] = connections.enter_context(
                    contextlib.closing(_connected(self._path))
                )
            main, twin = found[self._path], found.get(self._twin)
            if self._migrate(main) or states.get(self._path) != states.get(self._twin):
                if twin is not None:
                    twin.close()
                twin = None
            connections.pop_all()
        return main, twin

    def _take_the_newer(
        self, found: dict[Path, sqlite3.Connection], states: dict[Path, _State]
    ) -> None:
        """If the second of the copies that were `found` is ahead, or alone, it is both."""
        commits = sorted(state.commits for state in states.values())
        if (behind := commits[-1] - commits[0]) > 1:  # one, if the daemon was stopped in between
            log.error("%s: one copy is %d transactions behind", self._path, behind)
        if max(states, key=lambda path: states[path]) == self._path:  # also if both are equal
            return
        if self._path in found:
            found.pop(self._path).close()
        _write_whole(found[self._twin], self._path)

    def _whole(self, path: Path) -> sqlite3.Connection:
        """A copy of which every page and every row is as it was written. Raises one of
        `_TROUBLE`."""
        # Before it is connected: closing a file gives up all locks that a process has on it.
        with path.open("rb") as file:
            if file.read(_HEADER_BYTES)[18:20] not in {b"", *_VERSIONS}:
                raise _Damaged("its header does not let it be written")
        connection = _connected(path)
        try:
            version = _state(connection).version
            if version > len(self._migrations):
                raise _Later("a later version of the appliance made it; install that one")
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if said != "ok":
                raise _Damaged(said)
            expected = self._in_memory(version)
            if _schema(connection) != _schema(expected):
                raise _Damaged("its tables are not those of its version")
            for table in _columns(expected):
                for row in connection.execute(f"SELECT * FROM {table}"):
                    _checked(table, row)
        except BaseException:
            connection.close()
            raise
        return connection

    def _in_memory(self, version: int) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute(_COMMITS)
        for script in self._migrations[:version]:
            connection.executescript(script)
        return connection

    def _migrate(self, main: sqlite3.Connection) -> bool:
        """Whether it was of an earlier version."""
        version = _state(main).version
        if version == len(self._migrations):
            return False
        with _transaction(main):
            for script in self._migrations[version:]:
                for statement in filter(str.strip, script.split(";")):
                    main.execute(statement)
            self._keys = _columns(main)
            commits = (0, _state(main).commits, len(self._migrations))
            main.execute(*self._statement(Put("commits", commits)))
        return True

    def _renew_copy(self) -> sqlite3.Connection | None:
        """The copy as the database is now. None, with a line in the log, if it cannot be made."""
        try:
            _write_whole(self._main, self._twin)
            return _connected(self._twin)
        except (OSError, sqlite3.Error) as error:
            log.error("%s cannot be made: %s; without it, damage may cost data", self._twin, error)
            self._renew_at = time.monotonic() + RENEWAL_SECONDS
            return None

    # --- damage ----------------------------------------------------------------------------------

    def _save_rows(self, paths: list[Path]) -> None:
        """No copy is whole, or there is none: every row that can be read in one of them is kept.
        A stop in between leaves the damaged copies, or the new database."""
        made = self._in_memory(len(self._migrations))
        self._keys = tables = _columns(made)
        saved: dict[tuple[str, Row], Put] = {}
        for path in paths:
            for table, names in tables.items():
                size = _key_size(made, table)
                for row in _readable(path, table) if table != "commits" else ():
                    if len(row) == len(names) - 1:
                        saved.setdefault((table, row[:size]), Put(table, row))
        for put in (Put("commits", (0, 0, len(self._migrations))), *saved.values()):
            made.execute(*self._statement(put))
        new = _written(made, self._path)
        for path in paths:
            self._set_aside(path)
        _remove(self._path)  # a log without its database
        new.rename(self._path)
        sync(self._path.parent)
        if paths:
            log.error("%s: no copy is whole; %d rows could be read", self._path, len(saved))

    def _set_aside(self, path: Path) -> None:
        folder = path.parent / SET_ASIDE
        folder.mkdir(mode=0o700, exist_ok=True)
        number = next(n for n in count(1) if not (folder / f"{path.name}.{n}").exists())
        for part in _parts(path):
            if part.exists():
                suffix = part.name.removeprefix(path.name)
                part.rename(folder / f"{path.name}.{number}{suffix}")


def _connected(path: Path) -> sqlite3.Connection:
    """Raises `sqlite3.Error` and `_Damaged`."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = _text
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise _Damaged(f"its journal mode is {mode}")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _Damaged("a text in it is not UTF-8") from error


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _new(path: Path) -> Path:
    return path.with_name(f"{NEW}{path.name}")


def _written(source: sqlite3.Connection, path: Path) -> Path:
    """A database on the disk, whole, which is to get the name `path`."""
    new = _new(path)
    _remove(new)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    with contextlib.closing(sqlite3.connect(new)) as target:
        source.backup(target)
    sync(new)
    return new


def _write_whole(source: sqlite3.Connection, path: Path) -> None:
    """A copy of a database at `path`, in place of what is there."""
    new = _written(source, path)
    _remove(path)
    new.rename(path)
    sync(path.parent)


def _parts(path: Path) -> tuple[Path, ...]:
    return path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")


def _remove(path: Path) -> None:
    """What was written to a log goes with its database: another one must not get it."""
    for part in reversed(_parts(path)):
        part.unlink(missing_ok=True)


def _checksum(table: str, values: Row) -> int:
    return zlib.crc32(msgspec.msgpack.encode((table, *values)))


def _checked(table: str, row: Row) -> Row:
    """A row without its checksum. Raises `_Damaged` if that is another one."""
    if _checksum(table, row[:-1]) != row[-1]:
        raise _Damaged(f"a row of {table} is not as it was written")
    return row[:-1]


class _State(NamedTuple):
    """What tells two whole copies apart: their transactions, and the version of their tables."""

    commits: int
    version: int


def _state(connection: sqlite3.Connection) -> _State:
    """Raises `sqlite3.Error` and `_Damaged`."""
    row = connection.execute("SELECT * FROM commits WHERE id = 0").fetchone()
    if row is None:
        raise _Damaged("it has no count of its transactions")
    _, commits, version = _checked("commits", row)
    assert isinstance(commits, int)
    assert isinstance(version, int)
    return _State(commits, version)


def _columns(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """The names of the columns of each table."""
    tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    return {
        table: [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        for (table,) in tables
        if not table.startswith("sqlite_")
    }


def _key_size(connection: sqlite3.Connection, table: str) -> int:
    return sum(row[5] > 0 for row in connection.execute(f"PRAGMA table_info({table})"))


def _schema(connection: sqlite3.Connection) -> list[Row]:
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
    ).fetchall()


def _readable(path: Path, table: str) -> Iterator[Row]:
    """The rows of a damaged copy that are as they were written, from both ends of the table."""
    for order in ("ASC", "DESC"):
        with contextlib.suppress(*_TROUBLE):
            connection = _connected(path)
            with contextlib.closing(connection):
                cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1 {order}")
                for row in cursor:
                    with contextlib.suppress(_Damaged):
                        yield _checked(table, row)


def _code(error: sqlite3.Error) -> int:
    """The primary code of an error of SQLite's."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
