"""Files beside their checksums."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from appliance.checkpoints.checksums import read_sums
from appliance.errors import CheckpointError


def write(directory: Path, *lines: str) -> None:
    (directory / "SHA256SUMS").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_what_sha256sum_writes_is_read(tmp_path: Path) -> None:
    """Text and binary mode, files in folders, names with spaces; each is checked, and equal."""
    (tmp_path / "sub").mkdir()
    for name in ("a b.txt", "sub/c.bin"):
        (tmp_path / name).write_bytes(name.encode() * 500_000)
    command = ["sha256sum", "a b.txt", "--binary", "sub/c.bin"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    write(tmp_path, "# made by hand", "", *listed.stdout.splitlines())

    found = read_sums(tmp_path)

    assert [checksum.file for checksum in found] == [tmp_path / "a b.txt", tmp_path / "sub/c.bin"]
    for checksum in found:
        checksum.check()


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    """With what to do about it; one that is missing is the system's error."""
    (tmp_path / "a").write_bytes(b"x")
    write(tmp_path, f"{'0' * 64}  a", f"{'0' * 64}  b")
    changed, missing = read_sums(tmp_path)

    with pytest.raises(CheckpointError, match=r"a is corrupt.*fetch the file again"):
        changed.check()
    with pytest.raises(FileNotFoundError):
        missing.check()


def test_no_list_is_an_empty_one(tmp_path: Path) -> None:
    """Most checkpoints come without."""
    assert read_sums(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        "0123  a",
        f"{'g' * 64}  a",
        "0" * 64,
        f"{'0' * 64}  ",
        f"{'0' * 64}  ../a",
        f"{'0' * 64}  /etc/passwd",
        f"{'0' * 64}  sub/../../a",
    ],
)
def test_a_line_that_is_none_is_refused(tmp_path: Path, line: str) -> None:
    """A checksum too short or of other letters, no name, or a place outside of the directory."""
    write(tmp_path, f"{'0' * 64}  fine", line)

    with pytest.raises(CheckpointError, match=r"SHA256SUMS:2 is not a checksum"):
        read_sums(tmp_path)


def test_bytes_are_no_list(tmp_path: Path) -> None:
    """What is not text is said to be none."""
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(CheckpointError, match="is not a list of checksums"):
        read_sums(tmp_path)
