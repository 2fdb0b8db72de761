"""Stored files over the starts of daemons: no damage to a description deletes a client's file."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from appliance.batches.files import SET_ASIDE, FileStore, StoredFile

CONTENT = b'{"custom_id": "1"}\n' * 50
NOW = 1_764_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


def opened(folder: Path) -> FileStore:
    store = FileStore(folder, max_bytes=1 << 20, keep_seconds=3600.0)
    store.open()
    return store


def stored(folder: Path) -> StoredFile:
    store = opened(folder)
    upload = store.begin("owner")
    store.extend(upload, CONTENT)
    return store.keep(upload, "batch.jsonl", NOW)


def contents(folder: Path) -> list[bytes]:
    """Of all files, those that were set aside included."""
    return [path.read_bytes() for path in folder.rglob("*.jsonl")]


def test_a_file_is_there_after_a_start(folder: Path) -> None:
    file = stored(folder)

    assert opened(folder).find(file.id) == file
    assert contents(folder) == [CONTENT]


def test_every_flipped_bit_of_a_description_is_noticed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is set aside, with a line in the log, and its content is kept. Another file is
    served as before. A digit of a time that changed would delete it as expired."""
    caplog.set_level(logging.ERROR)
    other, file = stored(folder), stored(folder)
    about = folder / f"{file.id}.json"
    aside = folder / SET_ASIDE
    whole = about.read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        about.write_bytes(damaged)
        caplog.clear()

        store = opened(folder)

        assert store.all() == [other], damaged
        assert [file.id in record.getMessage() for record in caplog.records] == [True]
        assert (aside / about.name).read_bytes() == damaged
        assert (aside / f"{file.id}.jsonl").read_bytes() == CONTENT
        (aside / about.name).rename(about)
        (aside / f"{file.id}.jsonl").rename(folder / f"{file.id}.jsonl")


@pytest.mark.parametrize("size", [0, 1, 40, -1, -5])
def test_a_description_that_is_cut_off(folder: Path, size: int) -> None:
    file = stored(folder)
    about = folder / f"{file.id}.json"
    about.write_bytes(about.read_bytes()[:size])

    assert opened(folder).all() == []
    assert contents(folder) == [CONTENT]


def test_a_description_that_is_lost(folder: Path) -> None:
    """Nothing says whose the content is, so it is kept for the operator."""
    file = stored(folder)
    (folder / f"{file.id}.json").unlink()

    assert opened(folder).all() == []
    assert contents(folder) == [CONTENT]


def test_a_description_of_an_earlier_version(folder: Path) -> None:
    """It has no checksum, and is read as it was."""
    file = stored(folder)
    (folder / f"{file.id}.json").write_bytes(msgspec.json.encode(file))

    assert opened(folder).all() == [file]


def test_an_upload_that_was_never_kept_is_deleted(folder: Path) -> None:
    """No client was told that it is stored."""
    store = opened(folder)
    store.extend(store.begin("owner"), CONTENT)

    assert opened(folder).all() == []
    assert [path for path in folder.iterdir() if path.is_file()] == []


def test_a_stop_in_the_middle_of_a_deletion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content that a client wants deleted is not kept as damaged."""
    file = stored(folder)
    store = opened(folder)
    really = Path.unlink

    def stop(path: Path, missing_ok: bool = False) -> None:
        really(path, missing_ok)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", stop)
    with pytest.raises(KeyboardInterrupt):
        store.delete(file.id)
    monkeypatch.undo()

    assert opened(folder).all() == []
    assert contents(folder) == []


def test_what_cannot_be_moved_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon starts nevertheless."""
    file = stored(folder)
    (folder / f"{file.id}.json").write_bytes(b"\xff")
    (folder / SET_ASIDE).write_bytes(b"in the way")

    assert opened(folder).all() == []
    assert contents(folder) == [CONTENT]
    assert "it cannot be moved" in caplog.text
