"""A batch is what its records say; nothing that it cannot be is taken; a log survives every cut."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.batches.disk import Disk
from appliance.batches.earlier import take_in
from appliance.batches.files import SET_ASIDE
from appliance.batches.log import BatchLog, entries_path, load_all
from appliance.batches.records import (
    OVER,
    Batch,
    Begun,
    CancelAsked,
    Closing,
    Created,
    Ended,
    LineDone,
    Problem,
    Record,
    Status,
)
from appliance.batches.store import store_in
from appliance.batches.writer import BatchWriter
from appliance.errors import IllegalTransition
from appliance.platform.database import Database
from tests.patience import PATIENCE_SECONDS

CREATED = Created(
    at=0.0,
    id="batch_1",
    owner="me",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    expires_at=100.0,
)


def facts(batch: Batch) -> dict[str, Any]:
    """All that can be known of a batch."""
    return {
        **{name: value for name, value in vars(batch).items() if not name.startswith("_")},
        "pending": batch.pending if not batch.over else [],
        "closing": [batch.closing(now) for now in (50.0, 100.0)],
        "ending": None if batch.over else batch.ending,
    }


def line(request: int, ok: bool = True, entry: bytes = b'{"a":1}') -> LineDone:
    return LineDone(
        at=1.0, request=request, ok=ok, input_tokens=3, output_tokens=2, entry=msgspec.Raw(entry)
    )


times = st.floats(0, 200)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(Begun, at=times, total=st.integers(1, 4)),
    st.builds(line, st.integers(-1, 4), st.booleans()),
    st.builds(line, st.integers(0, 3), st.booleans()),
    st.builds(CancelAsked, at=times),
    st.builds(Closing, at=times, status=st.sampled_from(Status)),
    st.just(CREATED),
)


@settings(deadline=None)
@given(st.lists(st.one_of(records, st.sampled_from(Status)), max_size=14))
def test_only_a_life_that_can_be(tried: list[Record | Status]) -> None:
    """What is refused changes nothing; counts are those of outcomes; the end is the end. A status
    stands for ending so."""
    batch = Batch(CREATED)
    outcomes: dict[int, LineDone] = {}
    for one in tried:
        record = batch.ended(9.0, one) if isinstance(one, Status) else one
        before, was_over = facts(batch), batch.over
        if not batch.allows(record):
            with pytest.raises(IllegalTransition):
                batch.apply(record)
            assert facts(batch) == before
            continue
        batch.apply(record)
        assert not was_over
        if isinstance(record, LineDone):
            assert record.request not in outcomes
            outcomes[record.request] = record
        assert batch.completed == sum(record.ok for record in outcomes.values())
        assert batch.completed + batch.failed == len(outcomes)
        assert batch.input_tokens == 3 * len(outcomes)
        assert batch.over == (batch.status in OVER)
        if not batch.over:
            assert batch.pending == [n for n in range(batch.total) if n not in outcomes]
        if batch.status is Status.COMPLETED and batch.total:
            assert len(outcomes) == batch.total


def test_a_late_batch_that_is_done_is_completed() -> None:
    """Whatever the time is; one that is not expires."""
    batch = Batch.of([CREATED, Begun(at=1.0, total=2), line(0)])
    assert batch is not None
    assert batch.closing(99.9) is None
    assert batch.closing(100.0) is Status.EXPIRED

    batch.apply(line(1))

    assert batch.closing(1000.0) is Status.COMPLETED


def test_what_begins_otherwise_is_no_batch() -> None:
    """The first record is the creation."""
    with pytest.raises(IllegalTransition):
        Batch.of([Begun(at=1.0, total=2), CREATED])


LIFE: list[Record] = [
    CREATED,
    Begun(at=1.0, total=3),
    line(2, entry='{"text":"ä\\n"}'.encode()),
    line(0, ok=False),
    line(1),
    Closing(at=5.0, status=Status.COMPLETED),
]


def whole_life() -> list[Record]:
    batch = Batch.of(LIFE)
    assert batch is not None
    problem = Problem(code="x", message="y", line=3)
    ended = batch.ended(6.0, Status.COMPLETED, "file-output-1", "file-error-1", (problem,))
    return [*LIFE, ended]


@contextmanager
def opened(folder: Path) -> Iterator[Database]:
    """The store that a daemon has that starts now."""
    store = store_in(folder)
    store.open()
    try:
        yield store
    finally:
        store.close()


def write(folder: Path, records: list[Record]) -> None:
    """Append to the log of batch_1."""
    with opened(folder) as store:
        log = BatchLog(store, folder, "batch_1")
        log.append(records)
        log.close()


def found(folder: Path) -> Batch | None:
    """The batch that a daemon finds that starts now."""
    with opened(folder) as store:
        batches = load_all(store, folder)
    assert len(batches) <= 1
    return batches[0] if batches else None


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_log_goes_on_after_every_stop(data: st.DataObject) -> None:
    """Whatever was being appended to its entries then. What is written next is read back."""
    life = whole_life()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stop = data.draw(st.integers(1, len(life)), "records")
        write(folder, life[:stop])
        with entries_path(folder, "batch_1").open("ab") as file:
            file.write(data.draw(st.binary(max_size=30), "torn"))

        batch, expected = found(folder), Batch.of(life[:stop])
        assert batch is not None
        assert expected is not None
        assert facts(batch) == facts(expected)
        if stop == len(life):
            return
        with opened(folder) as store:
            log = BatchLog(store, folder, "batch_1")
            for record in life[stop:]:
                log.append([record])
            entries = {outcome.request: log.entry(outcome) for outcome in log.outcomes()}
            log.close()
        assert list(entries) == [0, 1, 2]
        assert entries[2] == '{"text":"ä\\n"}'.encode()


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_flipped_bit_of_an_entry_costs_its_outcome(data: st.DataObject) -> None:
    """It is computed again, and nothing else is."""
    life = LIFE[: data.draw(st.integers(3, len(LIFE)), "records")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, life)
        path = entries_path(folder, "batch_1")
        flipped = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, 8 * len(flipped) - 1), "bit")
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with opened(folder) as store:
            log = BatchLog(store, folder, "batch_1")
            (hit,) = [
                outcome.request
                for outcome in log.outcomes()
                if outcome.offset <= place // 8 < outcome.offset + outcome.size
            ]
            log.close()
        rest = [one for one in life if not (isinstance(one, LineDone) and one.request == hit)]
        expected = Batch.of(one for one in rest if not isinstance(one, Closing))
        assert expected is not None

        for _ in range(2):  # once it is mended, it is as any other
            batch = found(folder)
            assert batch is not None
            assert facts(batch) == facts(expected)


def test_a_log_whose_entries_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of its requests are computed again."""
    write(tmp_path, LIFE)
    entries_path(tmp_path, "batch_1").unlink()

    batch = found(tmp_path)

    assert batch is not None
    assert batch.pending == [0, 1, 2]
    assert "batch_1: 4 damaged records are taken back" in caplog.text


def test_entries_that_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That is no damage: nothing is computed again, and the next start finds the batch."""
    write(tmp_path, LIFE)
    entries = entries_path(tmp_path, "batch_1")
    moved = entries.rename(tmp_path / "moved")
    entries.symlink_to(moved)

    assert found(tmp_path) is None
    assert "batch_1 is left alone until the next start" in caplog.text

    moved.rename(entries)
    batch, expected = found(tmp_path), Batch.of(LIFE)
    assert batch is not None
    assert expected is not None
    assert facts(batch) == facts(expected)


@pytest.mark.parametrize("records", [range(1, 5), (0, 2, 3)])
def test_records_that_make_no_batch(
    records: Iterable[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay where they are, and the others are found."""
    write(tmp_path, [LIFE[number] for number in records])
    other = msgspec.structs.replace(CREATED, id="batch_2")
    with opened(tmp_path) as store:
        BatchLog(store, tmp_path, "batch_2").append([other])
        before = store.rows("records")

        assert [batch.id for batch in load_all(store, tmp_path)] == ["batch_2"]
        assert store.rows("records") == before
    assert "batch_1 is ignored" in caplog.text


@pytest.mark.parametrize("checksums", [False, True])
def test_logs_of_earlier_versions(tmp_path: Path, checksums: bool) -> None:
    """They are taken in: what was cut off goes, what comes next is appended."""
    life = whole_life()
    earlier_log(tmp_path, life[:4], checksums=checksums, more=b'1234 {"record":"cl')

    for _ in range(2):
        with opened(tmp_path) as store:
            take_in(store, tmp_path / "files", tmp_path)
    assert not (tmp_path / SET_ASIDE).exists()
    assert not list(tmp_path.glob("*.jsonl"))
    write(tmp_path, life[4:])

    batch, expected = found(tmp_path), Batch.of(life)
    assert batch is not None
    assert expected is not None
    assert facts(batch) == facts(expected)


def test_a_damaged_log_of_an_earlier_version(tmp_path: Path) -> None:
    """Its whole lines are taken in, and it is set aside as it was; nothing is begun anew of one
    that does not say whether it began."""
    log = earlier_log(tmp_path, LIFE)
    content = log.read_bytes().replace(b'"request":2', b'"request":1')
    log.write_bytes(content)
    less = earlier_log(tmp_path, [CREATED, Begun(at=1.0, total=3)], name="batch_2")
    less.write_bytes(less.read_bytes().replace(b'"total":3', b'"total":4'))
    none = earlier_log(tmp_path, [], name="batch_3")

    with opened(tmp_path) as store:
        take_in(store, tmp_path / "files", tmp_path)

    batch, expected = found(tmp_path), Batch.of([*LIFE[:2], *LIFE[3:5]])
    assert batch is not None
    assert expected is not None
    assert facts(batch) == facts(expected)
    assert (tmp_path / SET_ASIDE / log.name).read_bytes() == content
    assert (tmp_path / SET_ASIDE / less.name).exists()
    assert not none.exists()


def earlier_log(
    folder: Path,
    records: list[Record],
    *,
    checksums: bool = True,
    more: bytes = b"",
    name: str = "batch_1",
) -> Path:
    """A log as earlier versions wrote it: with checksums, all but outcomes were there twice."""
    path = folder / f"{name}.jsonl"
    lines = []
    for record in records:
        encoded = msgspec.json.encode(record)
        line = (b"%08x " % zlib.crc32(encoded) if checksums else b"") + encoded + b"\n"
        lines += [line] * (1 if isinstance(record, LineDone) or not checksums else 2)
    path.write_bytes(b"".join(lines) + more)
    return path


def test_a_short_log_says_the_same(tmp_path: Path) -> None:
    """Everything that a client sees of a batch that is over."""
    life = whole_life()
    write(tmp_path, life)
    long = found(tmp_path)
    ended = life[-1]
    assert isinstance(ended, Ended)

    with opened(tmp_path) as store:
        log = BatchLog(store, tmp_path, "batch_1")
        log.finish(ended)
        log.close()
        assert store.rows("outcomes") == []
        assert len(store.rows("records")) == 2

    short = found(tmp_path)
    assert long is not None
    assert short is not None
    assert facts(short) == facts(long)
    assert not entries_path(tmp_path, "batch_1").exists()


async def test_the_writer_takes_nothing_after_the_end(tmp_path: Path) -> None:
    """The caller gets an error even if the runner has not removed the batch yet."""
    disk = Disk()
    store = store_in(tmp_path)
    store.open()
    log = BatchLog(store, tmp_path, "batch_1")
    log.append([CREATED])
    writer = BatchWriter(Batch(CREATED), log, disk)
    await writer.write(CancelAsked(at=2.0))
    await writer.stop()

    with pytest.raises(IllegalTransition):
        await asyncio.wait_for(writer.write(CancelAsked(at=3.0)), PATIENCE_SECONDS)
    log.close()
    await disk.close()
    store.close()


async def test_a_record_counts_though_its_caller_leaves(tmp_path: Path) -> None:
    """The caller is cancelled before the record is on the disk, and when it is applied: the record
    stays written, and `on_written` is called once, with the batch in its new state."""
    disk = Disk()
    store = store_in(tmp_path)
    store.open()
    log = BatchLog(store, tmp_path, "batch_1")
    log.append([CREATED])
    batch = Batch(CREATED)
    batch.apply(Begun(at=1.0, total=2))
    writer = BatchWriter(batch, log, disk)
    counted: list[int] = []
    callers: list[asyncio.Task[None]] = []

    def applied() -> None:
        counted.append(batch.completed)
        for caller in callers:
            caller.cancel()

    for request in range(2):
        done = LineDone(at=2.0, request=request, ok=True, entry=msgspec.Raw(b"{}"))
        callers.append(asyncio.create_task(writer.write(done, applied)))
    await asyncio.sleep(0)  # both have begun to write
    callers[0].cancel()
    await writer.flush()
    await asyncio.wait(callers)

    assert counted == [1, 2]
    assert len(log.outcomes()) == 2
    await writer.stop()
    log.close()
    await disk.close()
    store.close()
