"""Stored files over the starts of daemons: no damage deletes a client's file."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from appliance.batches.earlier import take_in
from appliance.batches.files import SET_ASIDE, FileStore, StoredFile
from appliance.batches.store import store_in
from appliance.platform.database import Change, Database, Delete

CONTENT = b'{"custom_id": "1"}\n' * 50
NOW = 1_764_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@contextmanager
def opened(folder: Path) -> Iterator[FileStore]:
    """The files that a daemon has that starts now."""
    store = store_in(folder.parent)
    store.open()
    try:
        take_in(store, folder, folder.parent / "batches")
        files = FileStore(store, folder, max_bytes=1 << 20, keep_seconds=3600.0)
        files.open()
        yield files
    finally:
        store.close()


def all_of(folder: Path) -> list[StoredFile]:
    with opened(folder) as store:
        return store.all()


def stored(folder: Path) -> StoredFile:
    with opened(folder) as store:
        upload = store.begin("owner")
        store.extend(upload, CONTENT)
        return store.keep(upload, "batch.jsonl", NOW)


def contents(folder: Path) -> list[bytes]:
    """Of all files, those that were set aside included."""
    return [path.read_bytes() for path in folder.rglob("*.jsonl")]


def test_a_file_is_there_after_a_start(folder: Path) -> None:
    file = stored(folder)

    assert all_of(folder) == [file]
    assert contents(folder) == [CONTENT]


def test_a_content_that_nothing_names(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is kept for the operator: nothing says whose it is."""
    other, file = stored(folder), stored(folder)
    store = store_in(folder.parent)
    store.open()
    store.write([Delete("files", (file.id,))])
    store.close()

    assert all_of(folder) == [other]
    assert (folder / SET_ASIDE / f"{file.id}.jsonl").read_bytes() == CONTENT
    assert f"{file.id}.jsonl is set aside" in caplog.text


def test_a_content_that_is_lost(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is not listed, and is there again once its content is."""
    file = stored(folder)
    content = folder / f"{file.id}.jsonl"
    moved = content.rename(folder.with_name("moved"))

    assert all_of(folder) == []
    assert f"{file.id} is ignored" in caplog.text

    moved.rename(content)
    assert all_of(folder) == [file]


def earlier(folder: Path, *, checksum: bool = True) -> StoredFile:
    """A file as earlier versions stored it."""
    file = StoredFile(
        id="file-1",
        owner="owner",
        filename="batch.jsonl",
        purpose="batch",
        size_bytes=len(CONTENT),
        created_at=NOW,
        expires_at=NOW + 60,
    )
    folder.mkdir()
    encoded = msgspec.json.encode(file)
    ends = b"\n%08x\n" % zlib.crc32(encoded) if checksum else b""
    (folder / "file-1.json").write_bytes(encoded + ends)
    (folder / "file-1.jsonl").write_bytes(CONTENT)
    return file


@pytest.mark.parametrize("checksum", [True, False])
def test_a_description_of_an_earlier_version(folder: Path, checksum: bool) -> None:
    """It is taken in."""
    file = earlier(folder, checksum=checksum)

    for _ in range(2):
        assert all_of(folder) == [file]
        assert [path.name for path in folder.iterdir()] == ["file-1.jsonl"]


def test_a_damaged_description_of_an_earlier_version(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is set aside. A digit of a time that changed would delete it as expired."""
    caplog.set_level(logging.ERROR)
    earlier(folder)
    about = folder / "file-1.json"
    damaged = about.read_bytes().replace(b"1764", b"1264")
    about.write_bytes(damaged)

    assert all_of(folder) == []
    assert (folder / SET_ASIDE / "file-1.json").read_bytes() == damaged
    assert (folder / SET_ASIDE / "file-1.jsonl").read_bytes() == CONTENT
    assert "file-1.json is set aside" in caplog.text


def test_an_upload_that_was_never_kept_is_deleted(folder: Path) -> None:
    """No client has an id of it."""
    with opened(folder) as store:
        store.extend(store.begin("owner"), CONTENT)

    assert all_of(folder) == []
    assert [path for path in folder.iterdir() if path.is_file()] == []


def test_a_stop_in_the_middle_of_a_deletion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content that a client wants deleted is not kept as damaged."""
    file = stored(folder)
    really = Path.unlink

    def stop(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".jsonl":
            raise KeyboardInterrupt
        really(path, missing_ok)

    with opened(folder) as store:
        monkeypatch.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            store.delete(file.id)
        monkeypatch.undo()

    assert all_of(folder) == []
    assert contents(folder) == []


@pytest.mark.parametrize("writes", [0, 1, 9])
def test_a_file_is_deleted_though_the_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """It makes room. Its row goes once it can, at the next start at the latest."""
    file = stored(folder)
    really, refusals = Database.write, iter(range(2))

    def full(store: Database, changes: Iterable[Change]) -> None:
        if next(refusals, writes) < writes:
            raise OSError(28, "No space left on device")
        really(store, changes)

    with opened(folder) as store:
        monkeypatch.setattr(Database, "write", full)
        store.delete(file.id)
        assert store.all() == []
        assert store.stored_bytes() == 0
        monkeypatch.undo()
    assert all_of(folder) == []
    assert contents(folder) == []


def test_nothing_that_was_set_aside_is_replaced(folder: Path) -> None:
    """By another content of the same name."""
    for content in (b"first", b"second"):
        assert all_of(folder) == []
        (folder / "file-1.jsonl").write_bytes(content)
    assert all_of(folder) == []
    assert {path.read_bytes() for path in (folder / SET_ASIDE).iterdir()} == {b"first", b"second"}


def test_a_description_that_cannot_be_opened(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an earlier version: it is taken in at a later start, and its content stays until then."""
    file = earlier(folder)
    moved = (folder / "file-1.json").rename(folder.with_name("moved"))
    (folder / "file-1.json").mkdir()
    assert all_of(folder) == []
    assert "file-1.json is ignored until the next start" in caplog.text

    (folder / "file-1.json").rmdir()
    moved.rename(folder / "file-1.json")
    assert all_of(folder) == [file]


def test_what_cannot_be_moved_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon starts nevertheless."""
    folder.mkdir()
    (folder / "file-1.jsonl").write_bytes(CONTENT)
    (folder / SET_ASIDE).write_bytes(b"in the way")

    assert all_of(folder) == []
    assert contents(folder) == [CONTENT]
    assert "it cannot be moved" in caplog.text
