"""A batch is what its records say; nothing that it cannot be is taken; a log survives every cut."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.batches.disk import Disk
from appliance.batches.log import SET_ASIDE, BatchLog, load, replace, shorten
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
from appliance.batches.writer import BatchWriter
from appliance.errors import IllegalTransition
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


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_log_survives_every_cut(data: st.DataObject) -> None:
    """What is whole stays, what is torn goes, and what is written next is read back behind it."""
    life = whole_life()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch_1.jsonl"
        log = BatchLog(path)
        log.append(life)
        log.close()
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        lines = lines_of(life)[: content[:cut].count(b"\n")]
        whole = sum(record in lines for record in life)

        batch = load(path)
        expected = Batch.of(life[:whole])
        assert (batch is None) == (expected is None) == (whole == 0)
        if batch is not None and expected is not None:
            assert facts(batch) == facts(expected)
        again = BatchLog(path)
        again.append(life[whole : whole + 1])
        again.append(life[whole + 1 :])
        assert list(again.records()) == life
        entries = {outcome.request: again.entry(outcome) for outcome in again.outcomes()}
        assert list(entries) == [0, 1, 2]
        assert entries[2] == '{"text":"ä\\n"}'.encode()
        again.close()


def lines_of(records: list[Record]) -> list[Record]:
    """The record that each line of their log has: only outcomes are there once."""
    return [record for one in records for record in [one] * (1 if isinstance(one, LineDone) else 2)]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_flipped_bit_costs_one_outcome(data: st.DataObject) -> None:
    """At most, and that one is computed again: what other records need is there twice. The log goes
    on from there; as it was it is set aside."""
    life = whole_life()
    if data.draw(st.booleans(), "short"):
        life = [life[0], life[-1]]
    life = life[: data.draw(st.integers(1, len(life)), "records")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch_1.jsonl"
        log = BatchLog(path)
        log.append(life)
        log.close()
        content = path.read_bytes()
        place = data.draw(st.integers(0, 8 * len(content) - 1), "bit")
        check_flip(path, life, content, place)


def check_flip(path: Path, life: list[Record], content: bytes, place: int) -> None:
    """Flip a bit of the log of these records, and load it."""
    flipped = bytearray(content)
    flipped[place // 8] ^= 1 << place % 8
    path.write_bytes(flipped)
    is_end = content[place // 8] == ord("\n")
    is_last = place // 8 == len(content) - 1
    hit = lines_of(life)[content[: place // 8].count(b"\n")]
    lost = isinstance(hit, LineDone) and (is_last or not is_end)
    expected = leniently([record for record in life if not (lost and record is hit)])
    assert expected is not None
    aside = path.parent / SET_ASIDE / path.name
    aside.unlink(missing_ok=True)

    for _ in range(2):  # once it is mended, it is as any other
        found = load(path)
        assert found is not None
        assert facts(found) == facts(expected)
    if not is_last:  # else it is as if the last line had not been written whole
        assert aside.read_bytes() == bytes(flipped)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_two_damaged_places_may_cost_the_batch(data: st.DataObject) -> None:
    """If both copies of what it began with, or of what its end depends on, are damaged: all of it
    is set aside then, and nothing is begun anew."""
    life = whole_life()
    life = [life[0], life[-1]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch_1.jsonl"
        log = BatchLog(path)
        log.append(life)
        log.close()
        lines = path.read_bytes().splitlines(keepends=True)
        which = data.draw(st.sampled_from([0, 2]), "record")
        for number in (which, which + 1):
            damaged = bytearray(lines[number])
            place = data.draw(st.integers(0, 8 * len(damaged) - 9), "bit")
            damaged[place // 8] ^= 1 << place % 8
            lines[number] = bytes(damaged)
        path.write_bytes(b"".join(lines))

        with pytest.raises(IllegalTransition, match="set aside"):
            load(path)
        assert not path.exists()
        assert (path.parent / SET_ASIDE / path.name).read_bytes() == b"".join(lines)


def leniently(records: list[Record]) -> Batch | None:
    """The batch of some of its records: those that cannot follow are left out."""
    if not records or not isinstance(records[0], Created):
        return None
    batch = Batch(records[0])
    for record in records[1:]:
        if batch.allows(record):
            batch.apply(record)
    return batch


def test_logs_of_earlier_versions(tmp_path: Path) -> None:
    """Their lines have no checksums; what is appended has."""
    life = whole_life()
    path = tmp_path / "batch_1.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in life[:4]))
    log = BatchLog(path)
    log.append(life[4:])
    log.close()

    batch = load(path)

    assert batch is not None
    expected = Batch.of(life)
    assert expected is not None
    assert facts(batch) == facts(expected)
    assert not (tmp_path / SET_ASIDE).exists()


def test_a_short_log_says_the_same(tmp_path: Path) -> None:
    """Everything that a client sees of a batch that is over."""
    life = whole_life()
    path = tmp_path / "batch_1.jsonl"
    log = BatchLog(path)
    log.append(life)
    log.close()
    long, long_bytes = load(path), path.stat().st_size
    ended = life[-1]
    assert isinstance(ended, Ended)

    shorten(path, ended)

    short = load(path)
    assert long is not None
    assert short is not None
    assert facts(short) == facts(long)
    assert path.stat().st_size < long_bytes
    assert path.read_bytes().count(b"\n") == 4  # the creation and the end, each twice


def test_a_file_is_replaced_whole_or_not(tmp_path: Path) -> None:
    """What fails on the way leaves the old one, and nothing else."""
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def failing() -> Any:
        yield b"new"
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        replace(path, failing())
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"old")]

    assert replace(path, [b"ne", b"w"]) == 3
    assert path.read_bytes() == b"new"


async def test_the_writer_takes_nothing_after_the_end(tmp_path: Path) -> None:
    """The caller gets an error even if the runner has not removed the batch yet."""
    disk = Disk()
    log = BatchLog(tmp_path / "batch_1.jsonl")
    log.append([CREATED])
    writer = BatchWriter(Batch(CREATED), log, disk)
    await writer.write(CancelAsked(at=2.0))
    await writer.stop()

    with pytest.raises(IllegalTransition):
        await asyncio.wait_for(writer.write(CancelAsked(at=3.0)), PATIENCE_SECONDS)
    log.close()
    await disk.close()


async def test_a_record_counts_though_its_caller_leaves(tmp_path: Path) -> None:
    """The caller is cancelled before the record is on the disk, and when it is applied: the record
    stays written, and `on_written` is called once, with the batch in its new state."""
    disk = Disk()
    log = BatchLog(tmp_path / "batch_1.jsonl")
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
    assert sum(isinstance(record, LineDone) for record in log.records()) == 2
    await writer.stop()
    log.close()
    await disk.close()
