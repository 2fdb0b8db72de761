"""The file of ceilings: what is read of it, on which machine, and what it means for switches."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from appliance.errors import CeilingsError
from appliance.memory.ceilings import stored
from appliance.memory.ceilings.stored import (
    MAX_BYTES,
    Ceilings,
    ChunkRates,
    DiskCeilings,
    GpuCeilings,
    HostCeilings,
    MemoryCeilings,
    ceilings_path,
    check_place,
    load_rate,
    machine_identity,
    own_ceilings,
    read_ceilings,
    who_reads,
    write_ceilings,
)

SLAB = 2 << 20
MEMORY = MemoryCeilings(
    copied_bytes=64 << 20,
    chunks=(
        ChunkRates(chunk_bytes=1 << 20, into_pool=10e9, out_of_pool=9e9),
        ChunkRates(chunk_bytes=4 << 20, into_pool=20e9, out_of_pool=8e9),
    ),
    within_pool=1e12,
    slab_bytes=SLAB,
    map_slab_seconds=SLAB / 20e9,
    unmap_slab_seconds=1e-6,
    lock=5e9,
)
GPU = GpuCeilings(uuid="GPU-0", name="H800", driver="580.1", at=5.0, version="1", memory=MEMORY)
HOST = HostCeilings(at=5.0, version="1", memory=MEMORY)
DISK = DiskCeilings(folder="/models", at=5.0, version="1", read=3e9, read_bytes=1 << 30, cached=0.0)
FULL = Ceilings(machine="this", host=HOST, disks=(DISK,), gpus=(GPU,))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """In a folder that is made, and nothing else lies beside it."""
    path = tmp_path / "state" / "appliance" / "ceilings.json"

    write_ceilings(path, FULL)
    write_ceilings(path, FULL)

    assert own_ceilings(path, "this") == FULL
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(CeilingsError, match="is of another machine; measure with"):
        own_ceilings(path, "another")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "cannot be used"),
        (b"{}", "missing required field `machine`"),
        (msgspec.json.encode(msgspec.structs.replace(FULL, format=2)), "of format 2, not 1"),
        (msgspec.json.encode(FULL).replace(b"20000000000.0", b"0"), "chunks"),
        (msgspec.json.encode(FULL).replace(b'"read":3000000000.0', b'"read":-1'), "disks"),
        (
            msgspec.json.encode(FULL)
            .replace(b"20000000000.0", b"1e-3")
            .replace(b"10000000000.0", b"1e-3"),
            "would load at less than 1 MB/s",
        ),
        (b" " * (MAX_BYTES + 1), "larger than"),
        (msgspec.json.encode(FULL).replace(b'"folder":"', b'"folder":"\xf6'), "cannot be used"),
        (b'{"more":' + b"[" * 5000 + b"]" * 5000 + b"}", "cannot be used"),
        (
            msgspec.json.encode(FULL).replace(b'"slab_bytes":', b'"slab_bytes":' + b"9" * 400),
            "cannot be used",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    """With the remedy; a rate of nothing would divide by zero later."""
    path = tmp_path / "ceilings.json"
    path.write_bytes(data)

    with pytest.raises(CeilingsError, match=words) as raised:
        read_ceilings(path)

    assert str(path) in str(raised.value)
    assert "doctor --ceilings" in str(raised.value)


def test_only_what_trusted_users_wrote_is_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, this user, or the owner of the folder, who could replace it anyway. Others would say
    how this daemon places models. The lab, which asks for any machine's, reads through links."""
    path = tmp_path / "ceilings.json"
    write_ceilings(path, FULL)
    assert own_ceilings(path, "this") == FULL

    path.chmod(0o666)
    with pytest.raises(CeilingsError, match="written by others than its owner; `chmod go-w "):
        own_ceilings(path, "this")
    path.chmod(0o644)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    for refused in (lambda: own_ceilings(link, "this"), lambda: check_place(link)):
        with pytest.raises(CeilingsError, match="is a symbolic link; remove it, or set"):
            refused()
    assert read_ceilings(link) == FULL

    real = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result([*found[:4], 12345, *found[5:10]])

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(CeilingsError, match="belongs to user 12345, who is neither root"):
        own_ceilings(path, "this")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO would be opened when another process writes into it: never."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        for read in (read_ceilings, lambda path: own_ceilings(path, "this"), check_place):
            with pytest.raises(CeilingsError, match="is not a file; remove it, or set"):
                read(path)


def test_a_place_is_tried_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of measuring are not lost for a folder that cannot be written. Folders that are
    not there are made later."""
    check_place(tmp_path / "new" / "folder" / "ceilings.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CeilingsError, match=r"file is no folder; set devices\.ceilings"):
        check_place(tmp_path / "file" / "ceilings.json")
    assert own_ceilings(tmp_path / "file" / "ceilings.json", "this") is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CeilingsError, match=r"this user may not write in .*; measure as one who"):
        check_place(tmp_path / "ceilings.json")


def test_a_folder_that_cannot_be_searched_is_no_error_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's user may not be the one whose home it is."""

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CeilingsError, match=r"cannot be read \(Permission denied\); let this user"):
        own_ceilings(tmp_path / "ceilings.json", "this")


def test_without_a_file_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(CeilingsError, match=r"there is no file .*doctor --ceilings"):
        read_ceilings(tmp_path / "none")
    assert own_ceilings(tmp_path / "none", "this") is None


def test_without_a_folder_there_is_no_file() -> None:
    """As below ``HOME=/dev/null``, which users of services have."""
    assert own_ceilings(Path("/dev/null/.local/ceilings.json"), "this") is None
    with pytest.raises(CeilingsError, match=r"there is no file .*doctor --ceilings"):
        read_ceilings(Path("/dev/null/.local/ceilings.json"))


def test_new_parts_replace_those_of_the_same_device() -> None:
    """What was not measured this time stays."""
    other = msgspec.structs.replace(GPU, uuid="GPU-1")
    again = msgspec.structs.replace(GPU, at=9.0)

    found = FULL.updated(None, [], [other, again])

    assert found.host == HOST
    assert found.disks == (DISK,)
    assert found.gpus == (again, other)
    assert found.gpu("GPU-0", "580.1") == again
    assert found.gpu("GPU-0", "570.1") is None


def test_weights_load_as_slabs_are_mapped_and_copied() -> None:
    """The host does one after the other; a GPU copies while the next are mapped. Mapping of slabs
    of another size is not known."""
    assert MEMORY.load_rate(SLAB, overlapped=False) == pytest.approx(10e9)
    assert MEMORY.load_rate(SLAB, overlapped=True) == pytest.approx(20e9)
    assert MEMORY.load_rate(2 * SLAB, overlapped=False) == pytest.approx(20e9)


def test_the_slowest_gpu_counts_and_all_must_be_known() -> None:
    """Under this driver; ranks have a link each, and the host's memory in common."""
    slow = msgspec.structs.replace(
        MEMORY, chunks=(ChunkRates(chunk_bytes=1 << 20, into_pool=5e9, out_of_pool=5e9),)
    )
    two = FULL.updated(None, [], [msgspec.structs.replace(GPU, uuid="GPU-1", memory=slow)])

    assert load_rate(two, SLAB, [["GPU-0"]], "580.1") == pytest.approx(20e9)
    assert load_rate(two, SLAB, [["GPU-0"], ["GPU-1"]], "580.1") == pytest.approx(5e9)
    assert load_rate(two, SLAB, [["GPU-0", "GPU-1"], ["GPU-0"]], "580.1") == pytest.approx(10e9)
    assert load_rate(two, SLAB, [["GPU-0"], ["GPU-2"]], "580.1") is None
    assert load_rate(two, SLAB, [["GPU-0"]], "570.1") is None
    assert load_rate(two, SLAB, [], "") == pytest.approx(10e9)
    assert load_rate(Ceilings(machine="this"), SLAB, [], "") is None


def test_the_file_has_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that is configured, or that of systemd, of the service, or of the user."""
    monkeypatch.setattr(stored, "SYSTEM_DIRECTORY", tmp_path / "service")
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")

    assert ceilings_path("") is None
    assert ceilings_path("/here/it.json") == Path("/here/it.json")
    assert ceilings_path("auto") == Path("/home/me/.local/state/appliance/ceilings.json")
    monkeypatch.setenv("XDG_STATE_HOME", "/mine")
    assert ceilings_path("auto") == Path("/mine/appliance/ceilings.json")
    (tmp_path / "service").mkdir()
    assert ceilings_path("auto") == tmp_path / "service" / "ceilings.json"
    monkeypatch.setenv("STATE_DIRECTORY", "/state:/more")
    assert ceilings_path("auto") == Path("/state/ceilings.json")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    (tmp_path / "service").rmdir()
    assert ceilings_path("auto") is None


def test_no_test_reads_the_ceilings_of_its_machine() -> None:
    """Wherever they are: of the service that is installed, or of the user."""
    assert ceilings_path("auto") == Path("/nonexistent/appliance/ceilings.json")
    assert not stored.SYSTEM_DIRECTORY.is_relative_to("/var")


def test_who_reads_the_file_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The service does not read what is in the folder of a user."""
    service = tmp_path / "service"
    monkeypatch.setattr(stored, "SYSTEM_DIRECTORY", service)

    assert "with this configuration" in who_reads("/here/it.json")
    assert who_reads("auto").startswith("a daemon that this user starts reads them")
    assert f"service reads those in {service}" in who_reads("auto")
    service.mkdir()
    assert who_reads("auto") == "the service reads them when it starts"
    monkeypatch.setenv("STATE_DIRECTORY", "/state")
    assert who_reads("auto") == "a daemon with this state directory reads them when it starts"


def test_a_machine_is_known_by_what_it_is(tmp_path: Path) -> None:
    """Another number, processor, or amount of memory is another machine; a few MiB are not."""

    def identity(number: str, model: str, kib: int) -> str:
        for folder in ("etc", "proc"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "etc/machine-id").write_text(f"{number}\n")
        (tmp_path / "proc/cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: {model}\n\nprocessor\t: 1\nmodel name\t: {model}\n"
        )
        (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {kib} kB\n")
        return machine_identity(tmp_path)

    first = identity("a", "Xeon", 64 << 20)
    assert first == identity("a", "Xeon", (64 << 20) - 9000)
    assert len({first, identity("b", "Xeon", 64 << 20), identity("a", "EPYC", 64 << 20),
                identity("a", "Xeon", 128 << 20)}) == 4  # fmt: skip
    assert machine_identity(tmp_path / "nothing") != first
    assert machine_identity() == machine_identity()
