"""The drop-in that operators' changes are written to: whole or not at all, and on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.config.admin_file import AdminFile
from appliance.config.checked_text import read_text
from appliance.config.layers import read_layers
from appliance.errors import NotSaved
from appliance.platform.checked_file import copy_of


@pytest.fixture
def file(tmp_path: Path) -> AdminFile:
    return AdminFile(tmp_path / "appliance.toml")


def test_what_was_written_survives_a_power_cut(
    file: AdminFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder it is in, if that is new, the file before it has its name, the folder after it."""
    synced: list[tuple[bool, bool]] = []
    really = os.fsync

    def sync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((place == file.path.parent, file.path.exists()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", sync)

    file.write("[[model]]\n")

    assert synced[:3] == [(False, False), (False, False), (True, True)]
    assert read_text(file.path).endswith("[[model]]\n")


def test_a_folder_that_cannot_be_synced(
    file: AdminFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is replaced: the caller is not made to think that it is not."""
    really = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == file.path.parent:
            raise OSError(5, "Input/output error")
        really(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)

    file.write("[[model]]\n")

    assert read_text(file.path).endswith("[[model]]\n")
    assert f"{file.path}: may be lost in a power cut: Input/output error" in caplog.text


def test_a_damaged_file_has_a_copy(file: AdminFile, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever a bit is flipped, the models that operators added are read."""
    file.write('[[model]]\nname = "tiny"\npath = "/models/tiny"\n')
    config = file.path.parent.with_name("appliance.toml")
    config.write_text("")
    whole = file.path.read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.path.write_bytes(damaged)
        caplog.clear()

        document = read_layers(config).document

        assert document["model"] == [{"name": "tiny", "path": "/models/tiny"}], damaged
        assert "its copy 50-admin.toml.copy is used" in caplog.text
        with pytest.raises(NotSaved, match=r"checksum differs|first line is damaged"):
            file.edit()


def test_a_file_that_is_edited_by_hand(file: AdminFile) -> None:
    """Without its first line; a file that is deleted has no copy."""
    file.write('[[model]]\nname = "tiny"\n')
    text = file.path.read_text().partition("\n")[2].replace("tiny", "small")
    file.path.write_text(text)
    assert read_text(file.path) == text
    assert not copy_of(file.path).exists()  # it would bring back what was edited

    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        read_text(file.path)


def test_a_damaged_file_without_a_copy(file: AdminFile, caplog: pytest.LogCaptureFixture) -> None:
    """It is read as it is: its syntax may be right, or the error names its line."""
    file.write('[[model]]\nname = "tiny"\n')
    copy_of(file.path).unlink()
    text = file.path.read_text().replace("tiny", "tinx")
    file.path.write_text(text)
    assert read_text(file.path) == text
    assert "it has no copy" in caplog.text
