"""The database over kills, damage and versions: what was written is there, or is missed by name."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import ApplianceError
from appliance.platform import database as database_module
from appliance.platform.database import SET_ASIDE, Change, Database, Delete, Put, Row
from tests.chaos.flips import flip_bit

FIRST = """
    CREATE TABLE notes (
        owner TEXT NOT NULL, number INTEGER NOT NULL, text BLOB NOT NULL, checksum INTEGER NOT NULL,
        PRIMARY KEY (owner, number)
    ) WITHOUT ROWID
"""
SECOND = "CREATE TABLE names (name TEXT PRIMARY KEY, size REAL, checksum INTEGER) WITHOUT ROWID"
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where folders are made for tests of many starts: they are not about the disk itself."""
COPIES = ("store.sqlite", "store-copy.sqlite")


@contextmanager
def opened(folder: Path, *migrations: str) -> Iterator[Database]:
    database = Database(folder / "store.sqlite", migrations or (FIRST,))
    database.open()
    try:
        yield database
    finally:
        database.close()


def note(owner: str, number: int, text: bytes = b"x" * 50) -> Put:
    return Put("notes", (owner, number, text))


def made(folder: Path, rows: int = 60) -> list[Row]:
    """A database as a kill leaves it, with what was written in its logs; answers its rows."""
    files, found = _made(rows)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert len(found) == rows
    return found


@cache
def _made(rows: int) -> tuple[dict[str, bytes], list[Row]]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        with opened(Path(name)) as database:
            for number in range(rows):
                database.write([note(f"owner {number % 7}", number)])
            files = {path.name: path.read_bytes() for path in Path(name).iterdir()}
            return files, database.rows("notes")


def notes(folder: Path) -> list[Row]:
    """What a process finds that starts now."""
    with opened(folder) as database:
        return database.rows("notes")


changes = st.one_of(
    st.builds(note, st.sampled_from("ab"), st.integers(0, 3), st.binary(max_size=5)),
    st.builds(lambda owner: Delete("notes", (owner,)), st.sampled_from("ab")),
    st.builds(lambda n: Delete("notes", ("a", n)), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(changes, max_size=4), max_size=6))
def test_what_was_written_is_there(transactions: list[list[Change]]) -> None:
    """As in a dictionary, in the order of the keys, also after a start."""
    expected: dict[tuple[object, object], Row] = {}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        with opened(Path(name)) as database:
            for transaction in transactions:
                for change in transaction:
                    if isinstance(change, Put):
                        expected[change.values[0], change.values[1]] = change.values
                    else:
                        size = len(change.key)
                        for key in [key for key in expected if key[:size] == change.key]:
                            del expected[key]
                database.write(transaction)
            assert database.rows("notes") == [expected[key] for key in sorted(expected)]
            assert database.rows("notes", "a") == [
                expected[key] for key in sorted(expected) if key[0] == "a"
            ]
        assert notes(Path(name)) == [expected[key] for key in sorted(expected)]


def test_a_transaction_is_whole_or_not(tmp_path: Path) -> None:
    """What cannot be written changes nothing."""
    with opened(tmp_path) as database:
        database.write([note("a", 1)])
        with pytest.raises(OSError, match="NOT NULL"):
            database.write([note("a", 2), Put("notes", ("a", 3, None))])
        assert [row[1] for row in database.rows("notes")] == [1]
        database.write([note("a", 4)])
    assert [row[1] for row in notes(tmp_path)] == [1, 4]


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    """No one closes it then."""
    assert notes(tmp_path) == []
    expected = made(tmp_path)
    assert notes(tmp_path) == expected
    assert not (tmp_path / SET_ASIDE).exists()


@pytest.mark.thorough
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_flipped_bit_loses_nothing(data: st.DataObject) -> None:
    """Wherever it is: in one of the copies, or in their logs."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name)
        expected = made(folder, 20)
        if data.draw(st.booleans(), "closed"):
            assert notes(folder) == expected
        path = data.draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.stat().st_size)))
        flip_bit(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1), "bit"))
        check_goes_on(folder, expected)


def check_goes_on(folder: Path, expected: list[Row]) -> None:
    """It has these rows, takes more, and both copies have them."""
    with opened(folder) as database:
        assert database.rows("notes") == expected
        database.write([note("z", 99)])
    for name in COPIES:
        assert copy_of(folder, name) == [*expected, note("z", 99).values]


def copy_of(folder: Path, name: str) -> list[Row]:
    """The rows of one copy alone."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as other:
        shutil.copy(folder / name, Path(other) / "store.sqlite")
        return notes(Path(other))


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_a_copy_that_is_lost(name: str, content: bytes | None, tmp_path: Path) -> None:
    """It is made anew from the other one, and what was in its place is set aside."""
    expected = made(tmp_path)
    for part in tmp_path.glob(f"{name}*"):
        part.unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)

    check_goes_on(tmp_path, expected)
    if content:
        assert (tmp_path / SET_ASIDE / f"{name}.1").read_bytes() == content


def test_damage_that_is_no_text(tmp_path: Path) -> None:
    """SQLite's message repeats it, and cannot be decoded."""
    expected = made(tmp_path)
    assert notes(tmp_path) == expected
    path = tmp_path / COPIES[0]
    path.write_bytes(path.read_bytes().replace(b"PRIMARY KEY", b"PRIMARY K\xe3Y"))

    check_goes_on(tmp_path, expected)
    assert (tmp_path / SET_ASIDE / f"{COPIES[0]}.1").exists()


def test_the_newer_copy_counts(tmp_path: Path) -> None:
    """Though both are whole: a log of the other one was lost."""
    expected = made(tmp_path)
    (tmp_path / "store.sqlite-wal").unlink()
    check_goes_on(tmp_path, expected)


def test_what_can_be_read_of_two_damaged_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every row that one of them has whole is kept."""
    expected = made(tmp_path, 200)
    assert notes(tmp_path) == expected
    draw = random.Random(3)
    for name in COPIES:
        path = tmp_path / name
        flip_bit(path, draw.randrange(8 * path.stat().st_size // 2, 8 * path.stat().st_size))
    found = notes(tmp_path)

    assert set(found) <= set(expected)
    assert len(found) > 100
    assert "no copy is whole" in caplog.text
    assert {path.name for path in (tmp_path / SET_ASIDE).iterdir()} >= {f"{n}.1" for n in COPIES}
    assert notes(tmp_path) == found


def test_two_files_that_are_no_databases(tmp_path: Path) -> None:
    """They are set aside, and an empty database is begun."""
    for name in COPIES:
        (tmp_path / name).write_bytes(b"what is this?")
    assert notes(tmp_path) == []


def test_damage_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The copy has the rows."""
    with opened(tmp_path) as database:  # which are more than its cache holds
        database.write(note("a", number, b"x" * 1000) for number in range(4000))
        expected = [note("a", number, b"x" * 1000).values for number in range(4000)]
    with opened(tmp_path) as database:
        pages = (tmp_path / "store.sqlite").stat().st_size // 4096
        with (tmp_path / "store.sqlite").open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4096 * (pages - 1))
        assert database.rows("notes") == expected
    assert "notes cannot be read" in caplog.text


def test_a_copy_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database goes on without it, and says so; it is made once it can be."""
    monkeypatch.setattr(database_module, "RENEWAL_SECONDS", 0.0)
    blocked = tmp_path / f".new-{COPIES[1]}"
    blocked.mkdir()
    with opened(tmp_path) as database:
        database.write([note("a", 1)])
        assert "without it, damage may cost data" in caplog.text
        blocked.rmdir()
        database.write([note("a", 2)])
    assert [row[1] for row in copy_of(tmp_path, COPIES[1])] == [1, 2]


def test_tables_of_an_earlier_version(tmp_path: Path) -> None:
    """They become those of today; their rows stay."""
    expected = made(tmp_path)
    with opened(tmp_path, FIRST, SECOND) as database:
        database.write([Put("names", ("a", 1.5))])
        assert database.rows("notes") == expected
    with opened(tmp_path, FIRST, SECOND) as database:
        assert database.rows("names") == [("a", 1.5)]


def test_tables_of_a_later_version(tmp_path: Path) -> None:
    """Are not touched."""
    with opened(tmp_path, FIRST, SECOND):
        pass
    with pytest.raises(ApplianceError, match="a later version"), opened(tmp_path):
        pass
    with opened(tmp_path, FIRST, SECOND) as database:
        assert database.rows("names") == []


def test_a_migration_that_fails(tmp_path: Path) -> None:
    """It is refused by name, and nothing has changed."""
    expected = made(tmp_path)
    with (
        pytest.raises(ApplianceError, match="cannot be opened"),
        opened(tmp_path, FIRST, f"{SECOND}; CREATE TABLE notes (a)"),
    ):
        pass
    assert notes(tmp_path) == expected


READ = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM notes')"


def read_by_another(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("starts", [1, 2])
def test_one_process_at_a_time(starts: int, tmp_path: Path) -> None:
    """Another one would remove the logs that this one writes to, also after a later start."""
    for _ in range(starts - 1):
        assert notes(tmp_path) == []
    with opened(tmp_path) as database:
        database.write([note("a", 1)])
        for name in COPIES:
            assert "database is locked" in read_by_another(tmp_path / name).stderr
        database.write([note("a", 2)])
    assert [row[1] for row in notes(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", COPIES)
def test_what_another_process_has_open_is_not_damaged(name: str, tmp_path: Path) -> None:
    """The start is refused by name, and both copies stay."""
    expected = made(tmp_path)
    assert notes(tmp_path) == expected
    with closing(sqlite3.connect(tmp_path / name, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ApplianceError, match="locked"), opened(tmp_path):
            pass
        other.execute("ROLLBACK")
    assert not (tmp_path / SET_ASIDE).exists()
    assert notes(tmp_path) == expected


def damage_both(folder: Path) -> None:
    """A row of each."""
    for name in COPIES:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-20] + b"?" * 20)


def test_a_disk_that_is_full_while_rows_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused, and the next one saves them: no empty database takes their place."""
    expected = made(tmp_path, 200)
    assert notes(tmp_path) == expected
    damage_both(tmp_path)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(database_module, "sync", full)
        with pytest.raises(ApplianceError, match="No space left"), opened(tmp_path):
            pass
    found = notes(tmp_path)
    assert len(found) > 100
    assert set(found) <= set(expected)


def test_a_stop_before_saved_rows_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(tmp_path, 200)
    assert notes(tmp_path) == expected
    damage_both(tmp_path)
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if path.name.startswith(".new-"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        with pytest.raises(KeyboardInterrupt), opened(tmp_path):
            pass
    assert len(notes(tmp_path)) > 100


def test_a_log_without_its_database(tmp_path: Path) -> None:
    """It is not taken for the log of a new one."""
    made(tmp_path)
    for name in COPIES:
        (tmp_path / name).unlink()
    assert notes(tmp_path) == []
