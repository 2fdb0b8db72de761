"""KV on disk: what is read is what was written, or an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import KvFolderError
from appliance.memory import kv_files
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_files import MOST_BLOCKS, KvDamaged, KvFiles

PAGE = kv_files.PAGE_BYTES


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier.create(3 * MOST_BLOCKS * PAGE)
    yield tier
    tier.close()


@pytest.fixture
def files(tmp_path: Path, host: HostTier) -> Iterator[KvFiles]:
    opened = KvFiles(tmp_path / "kv", host)
    yield opened
    opened.close()


def fill(host: HostTier, offsets: list[int], block_bytes: int, seed: int = 0) -> list[bytes]:
    """Every block another."""
    contents = []
    for number, offset in enumerate(offsets):
        content = bytes([(number + seed) % 251]) * block_bytes
        host.view(offset, block_bytes)[:] = content
        contents.append(content)
    return contents


def held(host: HostTier, offsets: list[int], block_bytes: int) -> list[bytes]:
    return [bytes(host.view(offset, block_bytes)) for offset in offsets]


def kept(files: KvFiles) -> list[str]:
    return sorted(path.name for path in files.folder.glob("*.kv"))


@pytest.mark.parametrize("block_bytes", [PAGE, 2 * PAGE, 1000])
@pytest.mark.parametrize("direct", [True, False])
def test_kv_comes_back_to_other_places(
    files: KvFiles, host: HostTier, block_bytes: int, direct: bool
) -> None:
    """In more blocks than one call takes, in any order, past the page cache or through it."""
    files.direct = direct
    count = MOST_BLOCKS + 3
    there = [n * block_bytes for n in range(count)]
    contents = fill(host, there, block_bytes)

    assert files.write("r", there, block_bytes) == count * block_bytes
    fill(host, there, block_bytes, seed=7)
    back = there[::-1]

    assert files.read("r", back, block_bytes) == count * block_bytes
    assert held(host, back, block_bytes) == contents
    assert kept(files) == []


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_that_move_less_than_asked(
    files: KvFiles, host: HostTier, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """The rest is moved by further calls."""
    files.direct = False
    block_bytes = 100
    there = [n * block_bytes for n in range(5)]
    contents = fill(host, there, block_bytes)

    def some(move):  # type: ignore[no-untyped-def]
        def partly(fd: int, blocks: list[memoryview], at: int) -> int:
            count = data.draw(st.integers(1, sum(map(len, blocks))))
            left, taken = count, []
            for block in blocks:
                taken.append(block[:left])
                left -= len(taken[-1])
            moved: int = move(fd, [block for block in taken if len(block)], at)
            return moved

        return partly

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", some(os.pwritev))
        patched.setattr(os, "preadv", some(os.preadv))
        files.write("r", there, block_bytes)
        fill(host, there, block_bytes, seed=9)
        files.read("r", there, block_bytes)

    assert held(host, there, block_bytes) == contents


def damage(path: Path, kind: str) -> None:
    match kind:
        case "missing":
            path.unlink()
        case "torn":
            os.truncate(path, path.stat().st_size - PAGE)
        case "longer":
            os.truncate(path, path.stat().st_size + PAGE)
        case "a bit":
            with path.open("r+b") as file:
                byte = file.read(1)
                file.seek(0)
                file.write(bytes([byte[0] ^ 1]))
        case "a link":
            path.rename(path.with_suffix(".elsewhere"))
            path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("kind", ["missing", "torn", "longer", "a bit", "a link"])
def test_a_damaged_file_is_an_error(files: KvFiles, host: HostTier, kind: str) -> None:
    """Nothing of it is left, and others are not concerned."""
    there = [0, PAGE]
    contents = fill(host, there, PAGE)
    files.write("damaged", there, PAGE)
    files.write("whole", there, PAGE)
    damage(files.folder / "0.kv", kind)
    fill(host, there, PAGE, seed=3)

    with pytest.raises((OSError, KvDamaged)):
        files.read("damaged", there, PAGE)
    assert kept(files) == ["1.kv"]
    files.read("whole", there, PAGE)
    assert held(host, there, PAGE) == contents


def test_a_file_that_ends_while_it_is_read(
    files: KvFiles, host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(host, [0], PAGE)
    files.write("r", [0], PAGE)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)

    with pytest.raises(OSError, match="ended too early"):
        files.read("r", [0], PAGE)


def test_a_disk_that_refuses_keeps_nothing(
    files: KvFiles, host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fill(host, [0], PAGE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse)
        with pytest.raises(OSError, match="No space left"):
            files.write("r", [0], PAGE)

    assert kept(files) == []
    assert files.write("r", [0], PAGE) == PAGE


def test_files_of_an_earlier_process_are_deleted(tmp_path: Path, host: HostTier) -> None:
    """And nothing else is; nor are the rights of a folder changed that is there."""
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    for name in ("3.kv", "notes.txt"):
        (folder / name).write_bytes(b"x")
    files = KvFiles(folder, host)

    assert sorted(path.name for path in folder.iterdir()) == ["lock", "notes.txt"]
    assert folder.stat().st_mode & 0o777 == 0o755
    files.close()


def test_others_can_read_nothing(files: KvFiles, host: HostTier) -> None:
    fill(host, [0], PAGE)
    files.write("r", [0], PAGE)

    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert (files.folder / "0.kv").stat().st_mode & 0o777 == 0o600


def test_a_folder_is_of_one_process(files: KvFiles, host: HostTier) -> None:
    """Until that has ended."""
    with pytest.raises(KvFolderError, match="used by another process; give each daemon"):
        KvFiles(files.folder, host)
    files.close()
    KvFiles(files.folder, host).close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, host: HostTier) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KvFolderError, match=r"file/kv cannot be used: Not a directory"):
        KvFiles(tmp_path / "file" / "kv", host)


def test_a_file_system_without_direct_writes(
    tmp_path: Path, host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then files are written through the page cache; another refusal is an error."""
    real = os.open

    def refuse(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        files = KvFiles(tmp_path / "kv", host)
    there = [0, PAGE]
    contents = fill(host, there, PAGE)
    files.write("r", there, PAGE)
    fill(host, there, PAGE, seed=5)
    files.read("r", there, PAGE)
    files.close()

    assert not files.direct
    assert held(host, there, PAGE) == contents


def test_a_full_disk_is_found_at_the_start(
    tmp_path: Path, host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(KvFolderError, match="No space left"):
            KvFiles(tmp_path / "kv", host)

    KvFiles(tmp_path / "kv", host).close()


def test_closing_deletes_all(files: KvFiles, host: HostTier) -> None:
    fill(host, [0], PAGE)
    files.write("r", [0], PAGE)
    files.delete("unknown")
    files.close()

    assert kept(files) == []
