"""The drop-in that operators' changes are written to: whole or not at all, and on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.config.admin_file import AdminFile


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

    assert synced == [(False, False), (False, False), (True, True)]
    assert file.path.read_text() == "[[model]]\n"


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

    assert file.path.read_text() == "[[model]]\n"
    assert f"{file.path}: may be lost in a power cut: Input/output error" in caplog.text
