"""What a kill or a power cut may find of a file that is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.platform.durable import replace


def test_a_file_is_replaced_whole_or_not(tmp_path: Path) -> None:
    """What fails on the way leaves the old one, and nothing else."""
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def failing() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        replace(path, failing())
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"old")]

    assert replace(path, [b"ne", b"w"]) == 3
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
