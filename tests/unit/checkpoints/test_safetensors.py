"""Safetensors files: headers, the files of a checkpoint, and files that are no longer the same."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.safetensors import WeightFile, read_header, verify_sums, weight_files
from appliance.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three tensors, one of them empty."""
    file = tmp_path / "model.safetensors"
    tensors = {
        "b": np.arange(12, dtype=np.float32).reshape(3, 4),
        "a": np.arange(5, dtype=np.int16),
        "none": np.zeros((0, 7), np.float32),
    }
    save_file(tensors, file)
    return file


def read(file: WeightFile, fd: int, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    file.read_into(fd, [memoryview(buffer)], offset)
    return bytes(buffer)


def test_a_header_says_where_bytes_lie(path: Path) -> None:
    """Reading the bytes of an entry gives the tensor."""
    file = read_header(path)
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in file.tensors} == {
        "b": ("F32", (3, 4), 48),
        "a": ("I16", (5,), 10),
        "none": ("F32", (0, 7), 0),
    }
    assert [t.offset for t in file.tensors] == sorted(t.offset for t in file.tensors)
    by_name = {t.name: t for t in file.tensors}
    with file.open() as fd:
        b = read(file, fd, by_name["b"].offset, 48)
        a = read(file, fd, by_name["a"].offset, 10)
    assert np.frombuffer(b, np.float32).tolist() == list(range(12))
    assert np.frombuffer(a, np.int16).tolist() == list(range(5))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "w has 4 bytes for F32"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "corrupt|wants"),
        ({"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4, 4]}, "cannot be read"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}, "no dtype or shape"),
    ],
)
def test_entries_that_cannot_be_are_refused(
    tmp_path: Path, entry: dict[str, object], reason: str
) -> None:
    """Shapes and sizes that contradict each other, and what is no shape."""
    raw = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))

    with pytest.raises(CheckpointError, match=reason):
        read_header(file)


def test_names_are_of_bounded_length(tmp_path: Path) -> None:
    """A checkpoint's patterns are matched with them."""
    file = tmp_path / "model.safetensors"
    save_file({"a" * 256: np.zeros(1)}, file)
    assert read_header(file).tensors
    save_file({"a" * 257: np.zeros(1)}, file)

    with pytest.raises(CheckpointError, match=r"aaa\.\.\., a name of 257 characters; at most 256"):
        read_header(file)


def test_an_index_of_another_variant_names_files_that_do_not_count(
    tmp_path: Path, path: Path
) -> None:
    """Whisper large v3 has its weights in 16 and in 32 bits."""
    (tmp_path / "model.fp32-00001-of-00001.safetensors").write_bytes(path.read_bytes())
    other = {"weight_map": {"a": "model.fp32-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.fp32.json").write_text(json.dumps(other))
    assert weight_files(tmp_path) == [path]
    (tmp_path / "model.safetensors.index.fp32.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.fp32\.json is corrupt"):
        weight_files(tmp_path)


def test_an_index_names_the_files(tmp_path: Path, path: Path) -> None:
    """With an index other files do not count, and one that it names must be there."""
    (tmp_path / "consolidated.safetensors").write_bytes(path.read_bytes())
    assert [f.name for f in weight_files(tmp_path)] == [
        "consolidated.safetensors",
        "model.safetensors",
    ]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": path.name, "b": path.name}}))
    assert weight_files(tmp_path) == [path]
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors"):
        weight_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="no weight_map"):
        weight_files(tmp_path)


def test_another_file_in_its_place_is_noticed(path: Path) -> None:
    """A copy, a later write and a longer file are not the file that was described."""
    file = read_header(path)
    content, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)

    def refused() -> None:
        with pytest.raises(CheckpointError, match="replaced while it was served: restart"):
            with file.open():
                pytest.fail("another file was opened")

    original = path.rename(path.with_suffix(".old"))
    path.write_bytes(content)
    os.utime(path, ns=times)
    refused()
    original.rename(path)
    os.utime(path, ns=(times[0], times[1] + 1))
    refused()
    path.write_bytes(content + b"more")
    os.utime(path, ns=times)
    refused()
    # Put back: the very same again.
    path.write_bytes(content)
    os.utime(path, ns=times)
    with file.open() as fd:
        assert read(file, fd, 0, 8) == content[:8]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    """At once: opening a FIFO waits for its writer."""
    file = read_header(path)
    path.unlink()
    make(path)
    with pytest.raises(CheckpointError, match=r"model.safetensors is no regular file"):
        read_header(path)
    with pytest.raises(CheckpointError, match="is no regular file"), file.open():
        pass


def test_a_write_while_it_is_read_is_noticed(path: Path) -> None:
    """What was read before and after a write belongs to two files."""
    file = read_header(path)
    with pytest.raises(CheckpointError, match="replaced while it was served"):
        with file.open():
            os.utime(path, ns=(0, 0))


def test_a_file_that_became_shorter_is_truncated(path: Path) -> None:
    """Before it is opened and in the midst of reading: an error that names it, not a signal."""
    file = read_header(path)

    def cut_and_read() -> None:
        with file.open() as fd:
            os.truncate(path, file.nbytes - 20)
            read(file, fd, file.nbytes - 40, 40)

    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: it ends before"):
        cut_and_read()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        with file.open():
            pytest.fail("a truncated file was opened")


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than asked for, also across buffers."""
    file = read_header(path)
    whole = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", short)
    parts = [bytearray(7), bytearray(1), bytearray(5)]
    with file.open() as fd:
        file.read_into(fd, [memoryview(part) for part in parts], 10)
    assert b"".join(parts) == path.read_bytes()[10:23]


def test_only_what_is_not_in_memory_is_announced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the disk are asked for in advance, bytes in memory are left alone."""
    file = read_header(path)
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *span: announced.append(span[:2]))

    def answer(fd: int, buffers: object, offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if offset < 100:
            return 1
        raise BlockingIOError(errno.EAGAIN, "it would have to wait")

    with file.open() as fd:
        monkeypatch.setattr(os, "preadv", answer)
        file.read_ahead(fd, 50, 20)
        file.read_ahead(fd, 100, 20)
    assert announced == [(100, 20)]


def test_errors_of_the_disk_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the errno are in the message, whatever the system refused."""
    file = read_header(path)

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with file.open() as fd:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", broken)
            with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: EIO"):
                read(file, fd, 0, 8)
    path.unlink()
    with pytest.raises(CheckpointError, match="ENOENT"):
        with file.open():
            pytest.fail("a missing file was opened")
    with pytest.raises(CheckpointError, match="ENOENT"):
        read_header(path)


def test_checksums_are_compared(tmp_path: Path, path: Path) -> None:
    """As sha256sum writes them; without a list there is nothing to compare."""
    verify_sums(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    listing = tmp_path / "SHA256SUMS"
    listing.write_text(f"# made by hand\n{digest}  {path.name}\n\n{digest.upper()} *{path.name}\n")
    verify_sums(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt: its SHA-256"):
        verify_sums(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ""])
def test_checksums_stay_in_the_directory(tmp_path: Path, name: str) -> None:
    """A list can name files beside it and below, and no others."""
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS:1 is not a checksum and a file"):
        verify_sums(tmp_path)


def test_a_listed_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """As with sha256sum, that is a failure."""
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  gone.safetensors\n")
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read: ENOENT"):
        verify_sums(tmp_path)
