"""The thread for KV on disk: what it is told is done in order, and reported."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.config.loader import load_config
from appliance.daemon.kv_disk import KvDisk
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.journal import read
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_files import KvFiles
from appliance.serve import make_daemon
from appliance.vocabulary import DropSpilledKv, Event, KvRestored, KvSpilled, RestoreKv, SpillKv
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import WorkerDouble

PAGE = 4096


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier.create(8 * PAGE)
    yield tier
    tier.close()


@pytest.fixture
def reports() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def disk(tmp_path: Path, host: HostTier, reports: queue.SimpleQueue[Event]) -> Iterator[KvDisk]:
    started = KvDisk(KvFiles(tmp_path / "kv", host))
    started.start(reports.put)
    yield started
    started.stop()
    assert list((tmp_path / "kv").glob("*.kv")) == []


def spill(request: str, *pages: int) -> SpillKv:
    offsets = tuple(page * PAGE for page in pages)
    return SpillKv(model="m", request=request, host_offsets=offsets, block_bytes=PAGE)


def restore(request: str, *pages: int) -> RestoreKv:
    offsets = tuple(page * PAGE for page in pages)
    return RestoreKv(model="m", request=request, host_offsets=offsets, block_bytes=PAGE)


def test_there_and_back(disk: KvDisk, host: HostTier, reports: queue.SimpleQueue[Event]) -> None:
    host.view(0, 2 * PAGE)[:] = b"a" * PAGE + b"b" * PAGE
    disk.perform(spill("r", 0, 1))
    written = reports.get(timeout=PATIENCE_SECONDS)
    disk.perform(restore("r", 5, 3))
    read = reports.get(timeout=PATIENCE_SECONDS)

    assert isinstance(written, KvSpilled)
    assert (written.request, written.model, written.ok) == ("r", "m", True)
    assert written.moved_bytes == 2 * PAGE
    assert isinstance(read, KvRestored)
    assert (read.request, read.ok, read.moved_bytes) == ("r", True, 2 * PAGE)
    assert bytes(host.view(5 * PAGE, PAGE)) == b"a" * PAGE
    assert bytes(host.view(3 * PAGE, PAGE)) == b"b" * PAGE


def test_what_the_disk_refuses_is_reported(
    disk: KvDisk, reports: queue.SimpleQueue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    disk.perform(spill("r", 0))
    written = reports.get(timeout=PATIENCE_SECONDS)

    assert isinstance(written, KvSpilled)
    assert (written.ok, written.moved_bytes) == (False, 0)


def test_what_is_damaged_is_reported(
    disk: KvDisk, tmp_path: Path, reports: queue.SimpleQueue[Event]
) -> None:
    disk.perform(spill("r", 0))
    reports.get(timeout=PATIENCE_SECONDS)
    os.truncate(tmp_path / "kv" / "0.kv", 1)
    disk.perform(restore("r", 0))
    read = reports.get(timeout=PATIENCE_SECONDS)

    assert isinstance(read, KvRestored)
    assert (read.ok, read.moved_bytes) == (False, 0)


def test_what_is_dropped_is_deleted(
    disk: KvDisk, tmp_path: Path, reports: queue.SimpleQueue[Event]
) -> None:
    """Also when it was ordered while the KV was being written."""
    disk.perform(spill("r", 0))
    disk.perform(DropSpilledKv(request="r"))
    disk.perform(spill("s", 1))
    for _ in range(2):
        reports.get(timeout=PATIENCE_SECONDS)

    assert [path.name for path in (tmp_path / "kv").glob("*.kv")] == ["1.kv"]


def test_one_that_never_started_stops(tmp_path: Path, host: HostTier) -> None:
    KvDisk(KvFiles(tmp_path / "kv", host)).stop()
    KvFiles(tmp_path / "kv", host).close()


async def test_a_daemon_with_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal begins with how much room there is on disk."""
    make_checkpoints(tmp_path, recipes=[RECIPES[0]])
    file = write_config(tmp_path, [RECIPES[0].name], host_cache="64MiB")
    spill = '[devices.kv_spill]\ndirectory = "kv"\nsize = "1MiB"\n[journal]\npath = "journal"\n'
    file.write_text(f"{file.read_text()}\n{spill}")
    monkeypatch.setattr("appliance.daemon.daemon.WorkerProcess", WorkerDouble)

    await make_daemon(load_config(file)).stop()

    setup, _ = read(tmp_path / "journal")
    assert setup.disk_bytes == 1 << 20
