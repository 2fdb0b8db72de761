"""Batches over the ends of daemons: wherever one was cut off, nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.batches.files import SET_ASIDE, FileStore
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, Begun, CancelAsked, Created, LineDone, Record
from appliance.batches.results import answered
from appliance.errors import ApplianceError
from appliance.platform.database import Change, Database
from appliance.service.interface import GenerationFailed
from appliance.vocabulary import FinishReason
from tests.patience import PATIENCE_SECONDS
from tests.unit.api.test_batches import (
    CHATS,
    Clock,
    House,
    begin,
    chat,
    house,
    jsonl,
    lines_of,
    over,
    polled,
    until,
)
from tests.unit.doubles.fake_service import FakeGeneration
from tests.unit.doubles.serving import unserved

pytestmark = pytest.mark.thorough

__all__ = ["house"]


def names(house: House) -> list[str]:
    """What was asked of the appliance, each as often as it was."""
    texts = (one.text for one in house.service.submitted)
    return [text.partition("|>")[2].partition("<")[0] for text in texts]


# --- every cut -----------------------------------------------------------------------------------


def life(total: int, done: list[tuple[int, bool]], cancelled: bool) -> list[Record]:
    """The records of a batch of which so much was done, in that order."""
    now = Clock().now
    records: list[Record] = [
        Created(
            at=now,
            id="batch_1",
            owner="",
            endpoint=CHATS,
            input_file_id="file-1",
            completion_window="24h",
            expires_at=now + 1000,
        ),
        Begun(at=now, total=total),
    ]
    for request, ok in done:
        entry = answered(CHATS, str(request), 200 if ok else 400, b'{"written":true}')
        records.append(
            LineDone(at=now, request=request, ok=ok, input_tokens=5, output_tokens=7, entry=entry)
        )
    return records + ([CancelAsked(at=now)] if cancelled else [])


async def finish(house: House) -> Batch | None:
    """The batch once a daemon has carried it out, if there is one."""
    app = house.app()
    async with app.lifespan(), unserved(app) as client:

        async def ended() -> Any:
            listed = (await client.get("/v1/batches")).json()["data"]
            done = all(one["status"] in ("completed", "cancelled") for one in listed)
            return listed if done else None

        await polled(ended)
    batches = house.recorded()
    return batches[0] if batches else None


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_daemon_that_was_killed_anywhere(data: st.DataObject) -> None:
    """Whatever of its records is there: what has an outcome keeps it, byte by byte, and is not
    asked again; all the rest is asked once; tokens count once. Also of the log of an earlier
    version, whose last line was cut off.
    """
    total = data.draw(st.integers(1, 5))
    order = data.draw(st.permutations(range(total)))
    done = [(request, data.draw(st.booleans())) for request in order][
        : data.draw(st.integers(0, total))
    ]
    cancelled = data.draw(st.booleans())
    records = life(total, done, cancelled)
    earlier = data.draw(st.booleans(), "earlier")
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        logs = house.folder / "batches"
        logs.mkdir(parents=True)
        lines = jsonl(chat(str(number)) for number in range(total))
        with house.store() as store:
            files = FileStore(store, house.folder / "files", max_bytes=10**6, keep_seconds=1000.0)
            files.open()
            files.write("file-1", "", "in.jsonl", [lines], house.clock.now)
            if not earlier:
                kept = records[: data.draw(st.integers(0, len(records)))]
                BatchLog(store, logs, "batch_1").append(kept)
        if earlier:
            whole = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
            cut = data.draw(st.integers(0, len(whole)))
            kept = records[: whole[:cut].count(b"\n")]
            (logs / "batch_1.jsonl").write_bytes(whole[:cut])

        batch = asyncio.run(finish(house))

        written = {one.request: one for one in kept if isinstance(one, LineDone)}
        rest = {str(number) for number in range(total) if number not in written}
        if not kept:
            assert batch is None
            return
        assert batch is not None
        asked = Counter(names(house))
        entries = []
        for id in (batch.output_file_id, batch.error_file_id):
            if id is not None:
                entries += (house.folder / f"files/{id}.jsonl").read_bytes().splitlines()
        stopped = any(isinstance(one, CancelAsked) for one in kept)
        assert batch.status == ("cancelled" if stopped else "completed")
        assert asked == ({} if stopped else dict.fromkeys(rest, 1))
        assert {bytes(one.entry) for one in written.values()} <= set(entries)
        assert sorted(json.loads(entry)["custom_id"] for entry in entries) == [
            str(number) for number in range(total)
        ]
        ran = 0 if stopped else len(rest)
        assert batch.completed == sum(one.ok for one in written.values()) + ran
        answers = [
            json.loads(entry)["response"]["body"]
            for entry in entries
            if json.loads(entry)["response"] is not None
        ]
        used = [answer["usage"]["total_tokens"] for answer in answers if "usage" in answer]
        assert len(used) == ran
        assert batch.input_tokens + batch.output_tokens == sum(used) + 12 * len(written)


# --- a daemon that stops -------------------------------------------------------------------------


async def test_a_daemon_that_stops_in_the_middle(house: House) -> None:
    """What is done stays done; what ran is ended, and asked again by the next one."""

    def some(generation: FakeGeneration) -> None:
        if generation in house.service.submitted[:3]:
            generation.say("first life")

    house.service.script = some
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(10)])
        await until(client, batch, lambda seen: seen.request_counts.completed == 3)
        for _ in range(7):
            await house.service.arrivals.get()
    first = names(house)
    assert [one.reason for one in house.service.submitted[3:]] == [FinishReason.CANCELLED] * 4

    house.service.submitted.clear()
    house.service.script = lambda generation: generation.say("second")
    async with house.client() as client:
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)

    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (10, 0)
    assert sorted(first[:3] + names(house)) == [str(number) for number in range(10)]
    said = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in good
    }
    assert all(said[name] == ("first life" if name in first[:3] else "second") for name in said)
    assert len(said) == 10


@pytest.mark.parametrize(("code", "status"), [("shutting_down", 503), ("internal_error", 500)])
async def test_a_daemon_that_drains_or_broke(house: House, code: str, status: int) -> None:
    """Being told so is no outcome of a request; nothing more is asked."""
    failure = GenerationFailed(code, "no more of this", status)
    house.service.script = lambda generation: generation.fail(failure)
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(9)])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.service.arrivals.get()
        seen = await client.batches.retrieve(batch)
        assert seen.status == "in_progress"
        refused = await client.batches.list()
        assert refused.data[0].id == batch
    assert len(house.service.submitted) <= 4

    house.service.script = lambda generation: generation.say("hello")
    async with house.client() as client:
        done = await over(client, batch)

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (9, 0)


async def test_a_window_that_closes(house: House) -> None:
    """While nobody was there: what is done is kept, the rest is told apart."""

    def some(generation: FakeGeneration) -> None:
        if generation is house.service.submitted[0]:
            generation.say("hello")

    house.service.script = some
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(3)])
        await until(client, batch, lambda seen: seen.request_counts.completed == 1)
    house.clock.now += 24 * 3600
    async with house.client() as client:
        done = await over(client, batch)
        bad = await lines_of(client, done.error_file_id)
        good = await lines_of(client, done.output_file_id)

    assert done.status == "expired"
    assert done.expired_at is not None
    assert done.expires_at == done.created_at + 24 * 3600
    assert len(good) == 1
    assert [line["error"]["code"] for line in bad] == ["batch_expired"] * 2


async def test_an_input_that_vanished(house: House) -> None:
    """The batch fails by name; what is done has its file."""

    def some(generation: FakeGeneration) -> None:
        if generation is house.service.submitted[0]:
            generation.say("hello")

    house.service.script = some
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(3)])
        seen = await until(client, batch, lambda seen: seen.request_counts.completed == 1)
    (house.folder / f"files/{seen.input_file_id}.jsonl").unlink()
    async with house.client() as client:
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)

    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert [error.code for error in done.errors.data] == ["input_file_unreadable"]
    assert len(good) == 1


async def test_an_input_that_is_another(house: House) -> None:
    """With as many lines, which are no requests: each fails by name."""
    house.service.script = None
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(3)])
        seen = await until(client, batch, lambda seen: seen.status == "in_progress")
    (house.folder / f"files/{seen.input_file_id}.jsonl").write_bytes(b"x\n" * 3)
    async with house.client() as client:
        done = await over(client, batch)
        bad = await lines_of(client, done.error_file_id)

    assert done.status == "completed"
    assert [line["error"]["code"] for line in bad] == ["input_file_unreadable"] * 3


async def test_a_log_that_is_none(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Of an earlier version: it is set aside and named; the others go on."""
    async with house.client() as client:
        batch = await begin(client, [chat("a")])
        await over(client, batch)
    strange = house.folder / "batches/batch_0.jsonl"
    strange.write_bytes(b'{"record":"what"}\n')
    async with house.client() as client:
        listed = [one.id async for one in client.batches.list()]

    assert listed == [batch]
    assert (strange.parent / SET_ASIDE / strange.name).read_bytes() == b'{"record":"what"}\n'
    assert "batch_0.jsonl is set aside" in caplog.text


async def test_entries_that_cannot_be_opened_at_a_start(house: House, tmp_path: Path) -> None:
    """The batch is left alone, its entries with it: a later start goes on where it was."""
    logs = house.folder / "batches"
    logs.mkdir(parents=True)
    records = life(2, [(0, True)], cancelled=False)
    with house.store() as store:
        files = FileStore(store, house.folder / "files", max_bytes=10**6, keep_seconds=1000.0)
        files.open()
        lines = jsonl(chat(str(number)) for number in range(2))
        files.write("file-1", "", "in.jsonl", [lines], house.clock.now)
        BatchLog(store, logs, "batch_1").append(records)
    (entries,) = logs.glob("*.entries")
    moved = entries.rename(tmp_path / "moved")
    entries.symlink_to(moved)
    async with house.client() as client:
        assert [one.id async for one in client.batches.list()] == []

    assert entries.is_symlink()
    moved.rename(entries)
    batch = await finish(house)

    assert batch is not None
    assert (batch.status, batch.completed) == ("completed", 2)
    assert names(house) == ["1"]


async def test_one_daemon_at_a_time(house: House) -> None:
    """A second one on the same folder does not start."""
    async with house.app().lifespan():
        refusal = pytest.RaisesExc(ApplianceError, match="another daemon")
        with pytest.RaisesGroup(refusal, flatten_subgroups=True):
            async with house.app().lifespan():
                pass


# --- a disk that is full -------------------------------------------------------------------------


async def test_a_full_disk(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch pauses, everything else is answered; when there is room it goes on, and its
    log is whole."""
    full = False
    pwrite, write = os.pwrite, Database.write

    def no_entries(descriptor: int, data: Any, offset: int) -> int:
        if full:
            pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    def no_records(store: Database, changes: Iterable[Change]) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(store, changes)

    monkeypatch.setattr(os, "pwrite", no_entries)
    monkeypatch.setattr(Database, "write", no_records)
    house.service.script = None
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(4)])
        live = [await house.service.arrivals.get() for _ in range(4)]
        full = True
        for one in live[:3]:
            one.say("hello")

        async def told() -> bool | None:
            return True if f"{batch} is paused" in caplog.text else None

        await polled(told)
        counts = (await client.batches.retrieve(batch)).request_counts
        assert counts is not None
        assert counts.completed == 0
        for refused in (client.batches.cancel(batch), begin(client, [chat("a")])):
            with pytest.raises(openai.InternalServerError) as caught:
                await refused
            assert caught.value.status_code == 507
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as plain:
            alive = await plain.get(str(client.base_url).replace("/v1/", "/livez"))
        assert alive.status_code == 200
        full = False
        live[3].say("hello")
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)

    assert done.status == "completed"
    assert len(good) == len(house.service.submitted) == 4
