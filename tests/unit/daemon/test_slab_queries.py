"""Asking a worker for the map of its pool: answered, shared, given up; and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from appliance.api.app import create_app
from appliance.daemon.slab_queries import ANSWER_SECONDS, SlabQuestions
from appliance.service.interface import InstanceNotFound, SlabsUnanswered
from appliance.vocabulary import SlabMap, SlabOwner
from appliance.worker import frames
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.doubles.serving import unserved

MakeBox = Callable[..., Box]


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=20) as make:
        yield make


MAP = SlabMap(slab_bytes=10, owners=(SlabOwner(name="free"),), runs=((0, 20),))


async def asking(box: Box) -> asyncio.Task[SlabMap]:
    """A question for slabs that is on its way."""
    task = asyncio.ensure_future(box.daemon.pool_map(0))
    await asyncio.sleep(0)
    return task


async def test_who_asks_for_slabs_meanwhile_shares_the_answer(make_box: MakeBox) -> None:
    """There is one question to a worker at most; the next one is a new one. Who leaves takes the
    answer from nobody."""
    box = make_box()
    box.start()

    gone, first, second = await asking(box), await asking(box), await asking(box)
    gone.cancel()
    box.workers[0].deliver(frames.SlabsReported(0, MAP))
    assert [await first, await second] == [MAP, MAP]
    assert len(box.workers[0].heard(frames.ReportSlabs)) == 1

    third = await asking(box)
    box.workers[0].deliver(frames.SlabsReported(0, MAP))
    assert await third == MAP
    assert len(box.workers[0].heard(frames.ReportSlabs)) == 2


async def test_who_asks_late_has_time_of_its_own(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That somebody gave the question up takes the answer from nobody who came meanwhile."""
    box = make_box()
    box.start()
    with monkeypatch.context() as patched:
        patched.setattr("appliance.daemon.slab_queries.ANSWER_SECONDS", 0.0)
        with pytest.raises(SlabsUnanswered):
            await box.daemon.pool_map(0)

    late = await asking(box)
    assert len(box.workers[0].heard(frames.ReportSlabs)) == 1
    box.workers[0].deliver(frames.SlabsReported(0, MAP))
    assert await late == MAP


async def test_a_question_that_is_old_is_asked_again() -> None:
    """The worker may not have heard it, or could not answer; one answer is everybody's."""
    sent = 0
    moments = iter((0.0, 0.9 * ANSWER_SECONDS, ANSWER_SECONDS, 1.9 * ANSWER_SECONDS))

    def send(instance: int, message: frames.ReportSlabs) -> None:
        nonlocal sent
        sent += 1

    questions = SlabQuestions(send, moments.__next__)
    tasks, asked = [], []
    for _ in range(4):
        tasks.append(asyncio.ensure_future(questions.ask(0)))
        await asyncio.sleep(0)
        asked.append(sent)
    questions.answered(frames.SlabsReported(0, MAP))
    questions.answered(frames.SlabsReported(0, MAP))

    assert asked == [1, 1, 2, 2]
    assert await asyncio.gather(*tasks) == [MAP] * 4


async def test_slabs_of_a_lost_worker(make_box: MakeBox) -> None:
    """Whoever waits hears of it at once, and whoever asks then; a late answer is nobody's."""
    box = make_box()
    box.start()
    task = await asking(box)
    box.workers[0].die()

    with pytest.raises(SlabsUnanswered, match="the worker of instance 0 ended"):
        await task
    with pytest.raises(SlabsUnanswered, match="instance 0 is not up"):
        await box.daemon.pool_map(0)
    with pytest.raises(InstanceNotFound):
        await box.daemon.pool_map(7)
    box.workers[0].greet()
    box.workers[0].deliver(frames.SlabsReported(0, MAP))


async def test_a_worker_that_does_not_tell_its_slabs(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has an end, and an answer over HTTP; the host tier's map needs no worker."""
    monkeypatch.setattr("appliance.daemon.slab_queries.ANSWER_SECONDS", 0.0)
    box = make_box()
    box.start()
    async with unserved(create_app(box.daemon)) as client:
        refused = await client.get("/api/instances/0/slabs")
        unknown = await client.get("/api/instances/7/slabs")
        host = await client.get("/api/host/slabs")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "slabs_unanswered")
    assert "0 s" in refused.json()["error"]["message"]
    assert "Retry-After" in refused.headers
    assert unknown.status_code == 404
    total = sum(count for _, count in host.json()["runs"])
    assert total * host.json()["slab_bytes"] == sum(box.daemon.activity().host_bytes.values())
