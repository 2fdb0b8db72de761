"""The ledger on disk: answers wait until their entry is written, and no longer than they may."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApplianceError
from appliance.platform.database import Change, Database, Put
from appliance.usage import ledger as module
from appliance.usage.books import MIGRATIONS
from appliance.usage.entries import DAY_SECONDS, WHOLE
from appliance.usage.ledger import Ledger
from tests.patience import PATIENCE_SECONDS
from tests.unit.usage.test_books import NOW, entry


class Disk:
    """A database's `write` that can be held, and that can refuse."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.began = threading.Event()
        self.refuses = False
        self.error: Exception = OSError(28, "No space left on device")
        self.writes = 0
        self._write = ledger._database.write
        monkeypatch.setattr(ledger._database, "write", self.write)

    def write(self, changes: Iterable[Change]) -> None:
        self.began.set()
        assert self.free.wait(PATIENCE_SECONDS)
        if self.refuses:
            raise self.error
        self._write(changes)
        self.writes += 1


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[Ledger]:
    ledger = Ledger(folder, **{"keep_months": 13, "max_rows": 1000, "now": lambda: NOW} | settings)
    ledger.open()
    try:
        yield ledger
    finally:
        await ledger.aclose()


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()


async def written(ledger: Ledger) -> None:
    """Returns when nothing waits for the disk."""
    assert ledger._writing is not None
    await asyncio.wait_for(ledger._writing, PATIENCE_SECONDS)


def requests(ledger: Ledger) -> int:
    return sum(sums.requests for _, sums in ledger.books.rows())


async def test_an_answer_goes_on_when_its_entry_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before; what comes meanwhile is written together, and a daemon that is killed then has
    all of it. Tokens count for a budget from the beginning."""
    async with opened(tmp_path / "usage") as ledger:
        disk = Disk(ledger, monkeypatch)
        disk.free.clear()
        told: list[str] = []
        last = asyncio.Event()
        ledger.record(entry("a"), lambda: told.append("a"))
        assert await asyncio.to_thread(disk.began.wait, PATIENCE_SECONDS)
        for name in "bcde":
            ledger.record(entry(name), lambda name=name: told.append(name))  # type: ignore[misc]
        ledger.record(entry("f"), last.set)
        assert told == []
        assert requests(ledger) == 0
        assert ledger.spent_tokens("alice", "2026-11") == 6 * 3

        disk.free.set()
        await until(last)

        assert told == list("abcde")
        assert disk.writes == 2
        assert requests(ledger) == 6
        assert ledger.spent_tokens("alice", "2026-11") == 6 * 3
    async with opened(tmp_path / "usage") as ledger:
        assert requests(ledger) == 6


async def test_no_answer_hangs_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its wait it goes on, those behind it at once, and the log says so once. When the disk
    is back, nothing is missing."""
    async with opened(tmp_path / "usage", wait_seconds=0.01) as ledger:
        disk = Disk(ledger, monkeypatch)
        disk.free.clear()
        first, second = asyncio.Event(), asyncio.Event()
        with caplog.at_level(logging.WARNING, "appliance.usage"):
            ledger.record(entry("a"), first.set)
            await until(first)
            ledger.record(entry("b"), second.set)
            assert second.is_set()
            assert "more than 0.01 s" in ledger.trouble
            disk.free.set()
            await written(ledger)
        assert requests(ledger) == 2
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        assert "answers do not wait" in said[0]
        assert "is written again" in said[1]


async def test_no_answer_hangs_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries stay in memory, up to a bound, and are written once there is room."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    async with opened(tmp_path / "usage") as ledger:
        disk = Disk(ledger, monkeypatch)
        disk.refuses = True
        for name in "abc":
            assert not ledger.full
            told = asyncio.Event()
            ledger.record(entry(name), told.set)
            await until(told)
        assert ledger.full
        assert "No space left" in ledger.trouble
        disk.refuses = False
        await written(ledger)
        assert requests(ledger) == 3
        assert not ledger.full


async def test_what_waits_is_written_when_the_appliance_ends(tmp_path: Path) -> None:
    """And told."""
    told = asyncio.Event()
    async with opened(tmp_path / "usage") as ledger:
        ledger.record(entry("a"), told.set)
    assert told.is_set()
    async with opened(tmp_path / "usage") as ledger:
        assert requests(ledger) == 1


async def test_what_is_lost_at_the_end_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end does not wait for a disk that takes nothing."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    async with opened(tmp_path / "usage") as ledger:
        Disk(ledger, monkeypatch).refuses = True
        ledger.record(entry("a"), lambda: None)
    assert "1 entries of the ledger are lost" in caplog.text


async def test_an_unexpected_error_is_logged_and_the_next_entries_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: answers go on, its trace is in the log once, and nothing is lost."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    async with opened(tmp_path / "usage") as ledger:
        disk = Disk(ledger, monkeypatch)
        disk.refuses, disk.error = True, ValueError("no such row")
        told = asyncio.Event()
        ledger.record(entry("a"), told.set)
        await until(told)
        assert ledger.trouble == ("the ledger of usage cannot be written: ValueError: no such row")
        ledger.record(entry("b"), lambda: None)
        disk.refuses = False
        await written(ledger)
        assert requests(ledger) == 2
        assert ledger.trouble == ""
        (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert record.exc_info is not None


async def test_an_answer_that_fails_to_go_on_holds_no_other_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("its client is gone")

    async with opened(tmp_path / "usage") as ledger:
        told = asyncio.Event()
        ledger.record(entry("a"), fails)
        ledger.record(entry("b"), told.set)
        await until(told)
        assert requests(ledger) == 2
        assert ledger.trouble == ""
    assert "cannot go on" in caplog.text


async def test_the_end_leaves_a_disk_that_hangs_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the ledger nor the interpreter waits for its thread, and answers go on."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    before = set(threading.enumerate())
    told = asyncio.Event()
    ledger = Ledger(tmp_path / "usage", keep_months=13, max_rows=1000, now=lambda: NOW)
    ledger.open()
    disk = Disk(ledger, monkeypatch)
    disk.free.clear()
    ledger.record(entry("a"), told.set)
    assert await asyncio.to_thread(disk.began.wait, PATIENCE_SECONDS)
    hanging = {thread for thread in set(threading.enumerate()) - before if thread.name == "usage"}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await ledger.aclose()
        assert told.is_set()
        assert [thread.daemon for thread in hanging] == [True]
        assert "still writes" in caplog.text
    finally:
        disk.free.set()
        for thread in hanging:
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
        await ledger.aclose()


async def test_one_daemon_writes(tmp_path: Path) -> None:
    """Another one is refused, and may have it afterwards."""
    async with opened(tmp_path / "usage"):
        with pytest.raises(ApplianceError, match="another daemon has its ledger there"):
            async with opened(tmp_path / "usage"):
                pass
    async with opened(tmp_path / "usage") as ledger:
        assert requests(ledger) == 0


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file")
    with pytest.raises(ApplianceError, match=r"^usage\.directory: "):
        async with opened(tmp_path / "usage"):
            pass


async def test_a_ledger_of_an_earlier_version(tmp_path: Path) -> None:
    """Its rows stay, of keys without an organization; those of organizations come to them."""
    folder = tmp_path / "usage"
    folder.mkdir(mode=0o700)
    earlier = Database(folder / "usage.sqlite", MIGRATIONS[:1])
    earlier.open()
    day = int(NOW // DAY_SECONDS)
    earlier.write([Put("usage", (day, "alice", "small", WHOLE, 1, 2, 0, 4, 0, 0))])
    earlier.close()

    async with opened(folder) as ledger:
        ledger.record(entry("a", organization="acme"), lambda: None)
        assert ledger.spent_tokens_of("acme", "2026-11") == 3
        await written(ledger)
    async with opened(folder) as ledger:
        assert [cell.organization for cell, _ in ledger.books.rows()] == ["", "acme"]
        assert ledger.spent_tokens("alice", "2026-11") == 6 + 3
        assert ledger.spent_tokens_of("acme", "2026-11") == 3
