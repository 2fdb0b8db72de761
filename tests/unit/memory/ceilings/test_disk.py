"""Disks are measured by a bounded part of the weights that lie there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from appliance.memory.ceilings.disk import CHUNK_BYTES, file_systems, measure_disk


def files(folder: Path, sizes: dict[str, int]) -> list[Path]:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
    return [folder / name for name in sizes]


class Ticks:
    """A clock that goes on a second at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_largest_weights_of_each_file_system_come_first(tmp_path: Path) -> None:
    """What is empty, or no weights, is not read."""
    files(tmp_path / "a", {"one.safetensors": 10, "config.json": 99, "no.safetensors": 0})
    files(tmp_path / "b", {"two.safetensors": 20})

    found = file_systems([tmp_path / "a", tmp_path / "b", tmp_path / "none"])

    assert found == {
        tmp_path / "a": [tmp_path / "b" / "two.safetensors", tmp_path / "a" / "one.safetensors"]
    }


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    """Neither bytes nor seconds; the page cache does not keep it."""
    paths = files(tmp_path / "a", {"one": CHUNK_BYTES + 5, "two": 3 * CHUNK_BYTES})

    part = measure_disk(paths, most_bytes=2 * CHUNK_BYTES, seconds=1e9, clock=Ticks())
    assert part.read_bytes == 2 * CHUNK_BYTES
    assert part.read == pytest.approx(part.read_bytes / (2 + 1), rel=0.7)
    assert measure_disk(paths, seconds=0.0, clock=Ticks()).read_bytes == CHUNK_BYTES
    assert measure_disk(paths, seconds=60.0).read_bytes == 4 * CHUNK_BYTES + 5
    assert part.cached is None or 0 <= part.cached <= 1


def test_files_are_closed_after_an_error(tmp_path: Path) -> None:
    """One that is gone is an error."""
    (path,) = files(tmp_path / "a", {"one": 10})
    gc.collect()  # what earlier tests left open
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(FileNotFoundError):
        measure_disk([path, tmp_path / "none"])

    assert len(list(Path("/proc/self/fd").iterdir())) == before
