"""The daemon: between requests, the machine, and workers that are doubles."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.daemon.daemon import Limits
from appliance.engines.protocol import (
    NO_TOKEN,
    GuideRefused,
    KvBytes,
    Produced,
    Verdict,
)
from appliance.journal import Journal, Setup, read, replay
from appliance.scheduling.model_lifecycle import MAX_BUILD_LOSSES
from appliance.serve import share_cpus
from appliance.service.event_log import NoticeKind
from appliance.service.front_frames import FrontModel
from appliance.service.generation import RequestStream
from appliance.service.interface import (
    COMPUTED_PHASES,
    AskedSlo,
    GenerationFailed,
    InstanceActivity,
    InstanceVerification,
    KvShapeActivity,
    KvTierActivity,
    ModelNotFound,
    QueueFull,
    SubmitRequest,
)
from appliance.service.policy_report import Missed
from appliance.vocabulary import (
    Command,
    Direction,
    Event,
    EvictModel,
    Finish,
    FinishReason,
    KvMoved,
    KvRestored,
    KvSpilled,
    ModelFailed,
    ModelLoaded,
    PrefetchModel,
    Release,
    RequestArrived,
    RequestClass,
    RequestFailed,
    RunPrefill,
    RunTurn,
    Task,
)
from appliance.worker import frames
from appliance.worker.starts import ForkedStart
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import PID, Box, Client, box_maker, setup_of, small
from tests.unit.doubles.instance import Life

MakeBox = Callable[..., Box]


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=20) as make:
        yield make


async def read_all(stream: Client) -> list[Produced]:
    return [produced async for batch in stream for produced in batch]


async def tokens_of(stream: Client) -> list[int]:
    return [produced.token for produced in await read_all(stream)]


def token(request: str, number: int, finished: FinishReason | None = None) -> frames.Tokens:
    return frames.Tokens(0, "a", [Produced(request=request, token=number, finished=finished)])


def request_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the line that each request left, whatever else is logged."""
    records = [record for record in caplog.records if record.name == "appliance.requests"]
    return [record.fields for record in records]  # type: ignore[attr-defined]


def introductions(box: Box, number: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """The requests a worker was told of, each with its output at that time."""
    sent = box.workers[number].heard(frames.AddSequence)
    return [(message.sequence.request, message.sequence.output) for message in sent]


# --- requests ------------------------------------------------------------------------------------


async def test_a_request_from_submit_to_its_end(make_box: MakeBox) -> None:
    """The client gets every token in order, the last one says why it is the last."""
    box = make_box()
    box.start()

    stream = box.ask("r", "a", output=8, limit=20)
    box.settle()
    produced = await read_all(stream)

    assert [p.token for p in produced] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [p.finished for p in produced] == [None] * 7 + [FinishReason.STOP]
    assert introductions(box) == [("r", ())]
    assert box.daemon.machine.requests == {}


async def test_a_client_that_waits_gets_tokens_as_they_come(make_box: MakeBox) -> None:
    """The first token is there before the second is computed."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a")
    waiting = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    assert not waiting.done()

    box.work_until(lambda: box.world.lives["r"].produced == 1)

    assert [produced.token for produced in await waiting] == [1]


async def test_a_client_that_does_not_read_makes_room(make_box: MakeBox) -> None:
    """Its request stops, others go on; when it reads it goes on where it was, and no token is late
    for that."""
    box = make_box()
    box.start()
    slow, other = box.ask("slow", "a", output=40), box.ask("other", "a", output=40)
    box.work_until(lambda: box.world.lives["slow"].produced >= 2)

    slow.reader(reads=False)
    slow.reader(reads=False)
    box.settle()

    assert len(await read_all(other)) == 40
    (shown,) = box.daemon.requests()
    assert shown.reason is not None
    assert (shown.id, shown.phase, shown.reason.code) == ("slow", "paused", "slow_client")
    box.now += 1000.0
    slow.reader(reads=True)
    box.settle()
    assert len(await read_all(slow)) == 40
    assert box.world.lives["slow"].prefills == 1
    assert isinstance(slow.generation, RequestStream)
    assert slow.generation.late == 0
    slow.reader(reads=False)


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon"])
async def test_models_take_turns(make_box: MakeBox, policy: str) -> None:
    """Requests of two models in memory for one are both served, each with its own tokens."""
    box = make_box(policy=policy, slabs=40)
    box.start()
    streams = [box.ask("ra", "a", output=20), box.ask("rb", "b", output=30)]

    box.settle()

    assert [await tokens_of(stream) for stream in streams] == [
        list(range(1, 21)),
        list(range(1, 31)),
    ]
    assert introductions(box) == [("ra", ()), ("rb", ())]


async def test_a_worker_gets_all_of_a_request(make_box: MakeBox) -> None:
    """What is introduced is what was submitted, right before it is named for the first time."""
    box = make_box()
    box.start()
    box.ask("r", "a", prompt=3, output=5)

    sent = box.workers[0].sent
    (place,) = [i for i, frame in enumerate(sent) if isinstance(frame, frames.AddSequence)]
    frame = sent[place]

    assert isinstance(frame, frames.AddSequence)
    assert (frame.sequence.model, frame.sequence.prompt) == ("a", (0, 1, 2))
    assert frame.sequence.body == b""
    assert isinstance(sent[place + 1], RunPrefill)


async def test_a_request_outlives_its_worker(make_box: MakeBox) -> None:
    """The next worker is told the output so far, and the client notices nothing."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a", output=8)
    box.work_until(lambda: box.world.lives["r"].produced == 3)

    box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    assert introductions(box) == [("r", ()), ("r", (1, 2, 3))]
    assert await tokens_of(stream) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert box.samples("appliance_requests_recovered_total") == {"model=a": 1, "model=b": 0}


async def test_a_worker_that_did_not_forget_is_asked_again(make_box: MakeBox) -> None:
    """Who prefilled a request, gave it away, and gets it back after a loss, knows it afresh."""
    box = make_box(policy="aegaeon", instances=2)
    box.start()
    stream = box.ask("r", "a", output=8)
    box.work_until(lambda: bool(box.workers[0].heard(Release)))
    box.work_until(lambda: box.world.lives["r"].produced == 3, number=1)

    box.workers[1].die()
    box.workers[1].greet()
    box.settle()

    assert introductions(box, 0) == [("r", ()), ("r", (1, 2, 3))]
    assert introductions(box, 1) == [("r", (1,)), ("r", (1, 2, 3, 4))]
    assert await tokens_of(stream) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_cancelled_request_is_forgotten(make_box: MakeBox) -> None:
    """Its worker is told to let go, the stream ends, and tokens still on their way are dropped."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 3)

    box.cancel(stream)
    box.workers[0].deliver(token("r", 4))
    stream.cancel(FinishReason.STOP)
    box.settle()

    assert await tokens_of(stream) == [1, 2, 3]
    assert box.workers[0].heard(Release) == [Release(instance=0, model="a", request="r")]
    assert box.daemon.machine.requests == {}
    assert box.samples("appliance_requests_total") == {"model=a,outcome=cancelled": 1}


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_is_kept_of_what_ended(make_box: MakeBox, cancelled: bool) -> None:
    """A later request, even of the same id, is as new to the worker as the first."""
    box = make_box()
    box.start()
    first = box.ask("r", "a")
    if cancelled:
        box.cancel(first)
    box.settle()

    second = box.ask("r", "a")
    box.settle()

    assert introductions(box) == [("r", ()), ("r", ())]
    assert await tokens_of(second) == [1, 2, 3, 4, 5]


async def test_a_stop_string_is_a_proper_end(make_box: MakeBox) -> None:
    """A request that the API cancels because of a stop string counts as stopped."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 3)

    box.cancel(stream, FinishReason.STOP)

    assert box.samples("appliance_requests_total") == {"model=a,outcome=stop": 1}
    assert box.samples("vllm:request_success_total") == {"finished_reason=stop,model_name=a": 1}


# --- refusals ------------------------------------------------------------------------------------


async def test_what_is_not_catalogued_is_not_found(make_box: MakeBox) -> None:
    """Whatever is asked of an unknown model."""
    box = make_box()

    for question in (box.daemon.model, lambda name: box.ask("r", name)):
        with pytest.raises(ModelNotFound, match="nobody"):
            question("nobody")


async def test_a_rejection_known_at_once_is_raised_by_submit(make_box: MakeBox) -> None:
    """A request that exceeds the context never becomes a stream."""
    box = make_box()

    with pytest.raises(GenerationFailed) as caught:
        box.ask("r", "a", prompt=200, output=57)

    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
    assert box.samples("appliance_requests_total") == {
        "model=a,outcome=context_length_exceeded": 1,
    }


async def test_a_failed_model_is_passed_to_all(make_box: MakeBox) -> None:
    """Who waits for it hears it from the stream, who comes later from submit: our fault, 500."""
    box = make_box()
    box.workers[0].greet()
    stream = box.ask("r1", "a")

    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="no such architecture"))

    with pytest.raises(GenerationFailed, match="no such architecture") as later:
        await tokens_of(stream)
    with pytest.raises(GenerationFailed, match="no such architecture") as at_once:
        box.ask("r2", "a")
    for caught in (later, at_once):
        assert (caught.value.code, caught.value.status) == ("model_failed", 500)


async def test_what_an_engine_refuses_is_the_fault_of_the_request(make_box: MakeBox) -> None:
    """A refusal by the engine comes out of the stream, as a bad request."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a")

    box.world.lives["r"].outcome = "request_failed"
    box.workers[0].deliver(RequestFailed(instance=0, model="a", request="r", reason="top_k?"))
    box.settle()

    with pytest.raises(GenerationFailed, match="top_k") as caught:
        await tokens_of(stream)
    assert (caught.value.code, caught.value.status) == ("request_failed", 400)


async def test_kv_larger_than_the_host_tier_is_served(make_box: MakeBox) -> None:
    """Its KV stays on the device, as no other needs the place."""
    box = make_box("a", host_slabs=6)
    stream = box.ask("r", "a", prompt=200, output=50)

    box.start()

    assert len(await tokens_of(stream)) == 50


async def test_tokens_that_are_computed_again_are_counted(make_box: MakeBox) -> None:
    """Two models take turns, and the host tier has no room for the KV of both: all of both streams
    comes, and scrapes tell how many tokens were computed again."""
    box = make_box("ab", policy="aegaeon", host_slabs=12, slabs=12)
    assert box.samples("appliance_kv_recomputed_tokens_total") == {"model=a": 0, "model=b": 0}
    streams = [box.ask(name, name, prompt=20, output=150) for name in "ab"]

    box.start()

    assert [len(await tokens_of(stream)) for stream in streams] == [150, 150]
    machine = box.daemon.machine
    counted = {f"model={name}": count for name, count in machine.recomputed_tokens.items()}
    assert sum(counted.values()) > 0
    for _ in range(2):  # a second scrape counts nothing again
        assert box.samples("appliance_kv_recomputed_tokens_total") == counted


async def test_the_queue_has_an_end(make_box: MakeBox) -> None:
    """One request more than allowed is told to come again; a place is free when another ends."""
    box = make_box(limits=Limits(queue=2, progress_seconds=60.0))
    box.start()
    box.ask("r1", "a")
    box.ask("r2", "b")

    with pytest.raises(QueueFull) as caught:
        box.ask("r3", "a")
    assert caught.value.retry_after_seconds > 0

    box.settle()
    assert box.ask("r4", "a").id == "r4"


# --- the end -------------------------------------------------------------------------------------


async def test_a_drain_lets_requests_end(make_box: MakeBox) -> None:
    """It is over with the last request; new ones are refused from its start."""
    box = make_box()
    box.start()
    stream = box.ask("r1", "a", output=5)
    drain = asyncio.ensure_future(box.daemon.drain(600.0))
    await asyncio.sleep(0)

    with pytest.raises(GenerationFailed) as caught:
        box.ask("r2", "a")
    assert (caught.value.code, caught.value.status) == ("shutting_down", 503)
    assert not drain.done()

    box.settle()
    await drain
    assert await tokens_of(stream) == [1, 2, 3, 4, 5]


async def test_a_drain_ends_what_does_not_end(make_box: MakeBox) -> None:
    """After a while a client gets what there is and is told; tokens that still come are dropped."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 2)

    await box.daemon.drain(0.0)
    box.settle()

    batches = aiter(stream)
    assert [produced.token for produced in await anext(batches)] == [1, 2]
    with pytest.raises(GenerationFailed) as caught:
        await anext(batches)
    assert (caught.value.code, caught.value.status) == ("shutting_down", 503)


async def test_stopping_gives_everything_back(make_box: MakeBox, tmp_path: Path) -> None:
    """Workers, memory and journal go, even if one worker's keeper had failed."""
    path = tmp_path / "journal"
    box = make_box(instances=2, journal=Journal(path, setup_of(small("ab"), instances=2)))
    box.start()
    assert all(worker.started for worker in box.workers.values())
    box.workers[0].stop_error = RuntimeError("the keeper failed long ago")

    await box.daemon.stop()

    assert all(worker.stopped for worker in box.workers.values())
    assert box.daemon.host.fd == -1
    assert path.read_bytes().endswith(b"\n")


def breaks(event: Event, now: float) -> list[Command]:
    raise RuntimeError("the books do not balance")


async def test_a_machine_that_contradicts_itself_decides_nothing_more(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The failure is told once, later requests are refused, later events are not handled, and the
    journal ends with the event that did it."""
    path = tmp_path / "journal"
    setup = setup_of(small("ab"))
    box = make_box(journal=Journal(path, setup))
    box.start()
    handled: list[Event] = []

    def handle(event: Event, now: float) -> list[Command]:
        handled.append(event)
        return breaks(event, now)

    monkeypatch.setattr(box.daemon.machine, "handle", handle)
    with pytest.raises(RuntimeError, match="balance"):
        box.ask("r1", "a")
    with pytest.raises(GenerationFailed) as caught:
        box.ask("r2", "a")
    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="?"))
    box.workers[0].die()

    assert caught.value.status == 503
    assert box.take_failures() == ["the books do not balance"]
    assert [type(event) for event in handled] == [RequestArrived]
    await box.daemon.stop()
    *_, last = read(path)[1]
    assert isinstance(last.event, RequestArrived)
    assert last.event.request.id == "r1"
    assert last.commands == []


async def test_a_failure_on_a_workers_report_is_reported_once(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper that delivered the report fails of it too, which is no news."""
    box = make_box()
    box.start()
    monkeypatch.setattr(box.daemon.machine, "handle", breaks)

    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="?"))

    assert box.take_failures() == ["the books do not balance"]


# --- the record ----------------------------------------------------------------------------------


async def test_a_run_can_be_replayed(make_box: MakeBox, tmp_path: Path) -> None:
    """What the daemon writes down gives the same commands again."""
    path = tmp_path / "journal"
    of_setup: dict[str, Any] = {"policy": "aegaeon", "instances": 2}
    box = make_box(journal=Journal(path, setup_of(small("ab"), **of_setup)), **of_setup)
    box.start()
    box.ask("r1", "a", output=20)
    box.cancel(box.ask("r2", "b", output=20))
    box.work_until(lambda: box.world.lives["r1"].produced == 1)
    box.workers[1].die()
    box.workers[1].greet()
    box.settle()
    await box.daemon.stop()

    entries = list(read(path)[1])
    count, differences = replay(path)

    assert differences == []
    assert count == len(entries)
    finished = [c for e in entries for c in e.commands if isinstance(c, Finish)]
    assert [command.request for command in finished] == ["r2", "r1"]


class FullDisk(Journal):
    """Cannot be written from a certain event on."""

    def __init__(self, path: Path, setup: Setup) -> None:
        super().__init__(path, setup)
        self.attempts = 0

    def record(
        self, now: float, event: Event, commands: list[Command], missed: Sequence[Missed] = ()
    ) -> None:
        self.attempts += 1
        raise OSError("no space left on device")


async def test_a_journal_that_cannot_be_written_ends(
    make_box: MakeBox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up with one line in the log; requests are served on."""
    journal = FullDisk(tmp_path / "journal", setup_of(small("ab")))
    with journal:
        box = make_box(journal=journal)
        box.start()
        stream = box.ask("r", "a")
        box.settle()

    assert await tokens_of(stream) == [1, 2, 3, 4, 5]
    assert journal.attempts == 1
    assert [r.message for r in caplog.records if r.exc_info] == ["the journal ends here"]


# --- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon"])
async def test_switches_are_counted_by_what_they_are_for(make_box: MakeBox, policy: str) -> None:
    """A switch is whenever another model runs than the one before, for a prompt or for a turn."""
    box = make_box(policy=policy, slabs=40)
    box.start()
    box.ask("ra", "a", output=20)
    box.ask("rb", "b", output=20)
    box.settle()

    jobs = [job for job in box.workers[0].sent if isinstance(job, RunPrefill | RunTurn)]
    first = [next(run) for _, run in groupby(jobs, key=lambda job: job.model)]
    reasons = {RunPrefill: "prefill", RunTurn: "turn"}
    expected = Counter(f"instance=0,model={j.model},reason={reasons[type(j)]}" for j in first)
    assert box.samples("appliance_switches_total") == expected
    assert ({j.model for j in first if isinstance(j, RunTurn)} != set()) == (policy == "aegaeon")


async def test_a_new_worker_has_to_switch_again(make_box: MakeBox) -> None:
    """The model that ran on the one that died does not run on the next."""
    box = make_box()
    box.start()
    box.ask("r", "a", output=8)
    box.work_until(lambda: box.world.lives["r"].produced == 3)
    box.workers[0].die()
    assert box.daemon.activity().instances[0].model is None
    box.workers[0].greet()
    box.settle()

    assert box.samples("appliance_switches_total") == {"instance=0,model=a,reason=prefill": 2}


async def test_preemptions_are_counted_once(make_box: MakeBox) -> None:
    """Every request stopped for another model counts, whatever the number of scrapes."""
    box = make_box(policy="aegaeon", slabs=40)
    box.start()
    assert box.samples("appliance_preemptions_total") == {"model=a": 0, "model=b": 0}
    box.ask("ra", "a", output=20)
    box.ask("rb", "b", output=20)
    box.settle()

    jobs = [job for job in box.workers[0].sent if isinstance(job, RunPrefill | RunTurn)]
    stopped = Counter(
        f"model={job.model}"
        for place, (job, following) in enumerate(pairwise(jobs))
        if isinstance(job, RunTurn)
        and following.model != job.model
        and any(later.model == job.model for later in jobs[place + 1 :])
    )
    assert set(stopped) == {"model=a", "model=b"}
    assert box.samples("appliance_preemptions_total") == stopped
    assert box.samples("appliance_preemptions_total") == stopped


async def test_a_prefetch_is_used(make_box: MakeBox) -> None:
    """Weights brought in beside another model's job, and then run, were worth it."""
    box = make_box("abc", policy="aegaeon", slabs=40)
    box.start()
    box.ask("a1", "a", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(RunTurn)))
    box.ask("b1", "b", output=40)
    box.ask("c1", "c", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(PrefetchModel)))
    assert box.samples("appliance_prefetches_total") == {"outcome=started": 1}

    box.settle()

    assert box.samples("appliance_prefetches_total") == {"outcome=started": 1, "outcome=used": 1}


async def test_a_prefetch_is_lost_with_its_worker(make_box: MakeBox) -> None:
    """What the next worker runs was not brought in by the one before."""
    box = make_box("abc", policy="aegaeon", slabs=40)
    box.start()
    box.ask("a1", "a", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(RunTurn)))
    box.ask("b1", "b", output=40)
    box.ask("c1", "c", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(PrefetchModel)))

    box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    counted = box.samples("appliance_prefetches_total")
    assert counted["outcome=started"] == len(box.workers[0].heard(PrefetchModel))
    assert counted.get("outcome=used", 0) == counted["outcome=started"] - 1


async def test_a_prefetch_is_wasted(make_box: MakeBox) -> None:
    """Weights brought in, and evicted before they ran, were not."""
    box = make_box("abcde", policy="aegaeon", slabs=18)
    box.start()
    box.ask("a1", "a", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(RunTurn)))
    box.ask("b1", "b", output=40)
    unwanted = box.ask("c1", "c", output=40)
    box.work_until(lambda: bool(box.workers[0].heard(PrefetchModel)))
    assert box.workers[0].heard(PrefetchModel)[0].model == "c"

    box.cancel(unwanted)
    for name in "de":
        box.ask(f"{name}1", name, output=10)
    box.work_until(
        lambda: any(command.model == "c" for command in box.workers[0].heard(EvictModel))
    )

    assert box.samples("appliance_prefetches_total")["outcome=wasted"] == 1


async def test_work_is_counted(make_box: MakeBox) -> None:
    """Prompts by model, and KV by direction: out of the one that prefills, into the other."""
    box = make_box(policy="aegaeon", instances=2)
    box.start()
    zero = {f"direction={d},model={m}": 0.0 for d in ("in", "out") for m in "ab"}
    assert box.samples("appliance_kv_swapped_bytes_total") == zero
    box.ask("r1", "a")
    box.ask("r2", "a")
    box.settle()

    assert box.samples("appliance_prefills_total") == {"model=a": 2, "model=b": 0}
    moved = {"direction=in,model=a": 600, "direction=out,model=a": 600}
    assert box.samples("appliance_kv_swapped_bytes_total") == zero | moved
    assert box.samples("appliance_requests_recovered_total") == {"model=a": 0, "model=b": 0}


async def test_transfers_are_measured(make_box: MakeBox) -> None:
    """Loads, swaps, and moves to disk, by kind, with their bytes and both times; what moved
    nothing is no swap, and what failed is counted apart."""
    box = make_box()
    box.start()
    box.ask("r", "a")
    box.settle()
    before = box.samples("appliance_transfer_seconds_count")
    observe = box.daemon._on_report
    observe(ModelLoaded(instance=0, model="b", moved_bytes=70, seconds=0.5, queued_seconds=0.25))
    nothing = KvMoved(
        instance=0, model="a", direction=Direction.IN, moved=(), missing=("r",), moved_bytes=0,
        seconds=0.0, queued_seconds=0.0, kv_slabs=0,
    )  # fmt: skip
    observe(nothing)
    observe(msgspec.structs.replace(nothing, moved=("r",), moved_bytes=5, queued_seconds=2.0))
    disk = {"model": "a", "request": "gone"}
    observe(KvSpilled(**disk, ok=True, moved_bytes=8, seconds=0.1))
    observe(KvSpilled(**disk, ok=False, moved_bytes=0, seconds=0.1))
    observe(KvRestored(**disk, ok=False, moved_bytes=0, seconds=0.1))

    assert before == {"kind=weights": 1}
    assert box.samples("appliance_transfer_bytes_total") == {
        "kind=weights,model=a": 4000, "kind=weights,model=b": 70, "kind=kv_in,model=a": 5,
        "kind=kv_spilled,model=a": 8, "kind=kv_spilled,model=b": 0,
        "kind=kv_restored,model=a": 0, "kind=kv_restored,model=b": 0,
        "kind=kv_in,model=b": 0, "kind=kv_out,model=a": 0, "kind=kv_out,model=b": 0,
    }  # fmt: skip
    counts = box.samples("appliance_transfer_seconds_count")
    assert counts == {"kind=weights": 2, "kind=kv_in": 1, "kind=kv_spilled": 1}
    errors = box.samples("appliance_kv_disk_errors_total")
    assert errors == {"operation=write": 1, "operation=read": 1}
    assert box.samples("appliance_transfer_queue_seconds_sum") == {
        "kind=weights": 0.25, "kind=kv_in": 2.0, "kind=kv_spilled": 0.0,
    }  # fmt: skip


async def test_fragmentation_of_the_devices(make_box: MakeBox) -> None:
    """By shape over all instances, cold cache counted as used; gone with the worker."""
    box = make_box(instances=2)
    box.start()
    assert box.samples("appliance_kv_fragmentation_overall") == {"tier=device": 0, "tier=host": 0}
    one = {300: KvBytes(1000, 600, 200, 2000), 500: KvBytes(1000, 500, 0, 1000)}
    other = {300: KvBytes(2000, 1500, 0, 2000)}
    box.workers[0].deliver(frames.PoolReport(0, {"free": 20}, 0, one, 2500))
    box.workers[1].deliver(frames.PoolReport(1, {"free": 20}, 0, other, 2000))

    assert box.samples("appliance_kv_fragmentation") == {
        "shape=300,tier=device": 0.175,
        "shape=500,tier=device": 0.5,
    }
    overall = box.samples("appliance_kv_fragmentation_overall")
    assert overall == {"tier=device": 1200 / 4500, "tier=host": 0}
    assert box.daemon.activity().kv["device"] == KvTierActivity(
        fragmentation=1200 / 4500,
        shapes={
            "300": KvShapeActivity(
                mapped_bytes=3000,
                used_bytes=2100,
                cold_bytes=200,
                peak_bytes=4000,
                fragmentation=0.175,
            ),
            "500": KvShapeActivity(
                mapped_bytes=1000, used_bytes=500, cold_bytes=0, peak_bytes=1000, fragmentation=0.5
            ),
        },
    )
    box.workers[0].die()
    assert box.samples("appliance_kv_fragmentation") == {"shape=300,tier=device": 0.25}


async def test_fragmentation_of_the_host_tier(make_box: MakeBox) -> None:
    """A request's places in whole slabs; they are given back, the peak is remembered."""
    box = make_box()
    box.start()
    box.ask("r", "a", prompt=20, output=5)  # two blocks of 300 bytes, three to a slab
    busy = box.daemon.activity().kv["host"]
    box.settle()
    idle = box.daemon.activity().kv["host"]

    taken = KvShapeActivity(
        mapped_bytes=1000, used_bytes=600, cold_bytes=0, peak_bytes=1000, fragmentation=0.4
    )
    assert busy == KvTierActivity(fragmentation=0.4, shapes={"300": taken})
    given_back = msgspec.structs.replace(taken, mapped_bytes=0, used_bytes=0, fragmentation=0.0)
    assert idle == KvTierActivity(fragmentation=0.0, shapes={"300": given_back})


async def test_restarts_are_counted_once(make_box: MakeBox) -> None:
    """What a keeper counted is shown, whatever the number of scrapes."""
    box = make_box(instances=2)
    assert box.samples("appliance_worker_restarts_total") == {}
    box.workers[1].restarts = 2
    assert box.samples("appliance_worker_restarts_total") == {"instance=1": 2}
    box.workers[1].restarts = 3

    assert box.samples("appliance_worker_restarts_total") == {"instance=1": 3}
    assert box.samples("appliance_worker_restarts_total") == {"instance=1": 3}


async def test_pools_are_shown_in_bytes(make_box: MakeBox) -> None:
    """The last report of a worker, by owner; nothing is left of it when the worker dies."""
    box = make_box()
    box.start()
    box.workers[0].deliver(frames.PoolReport(0, {"weights:a": 4, "free": 16}, 4, {}, 0))
    slabs = {"weights:a": 4, "kv:a": 2, "free": 14}
    box.workers[0].deliver(frames.PoolReport(0, slabs, 9, {}, 0))

    assert box.samples("appliance_pool_bytes") == {
        "instance=0,owner=weights:a": 4000,
        "instance=0,owner=kv:a": 2000,
        "instance=0,owner=free": 14000,
    }
    assert box.samples("appliance_pool_high_water_bytes") == {"instance=0": 9000}
    box.workers[0].die()
    assert box.samples("appliance_pool_bytes") == {}
    assert box.samples("appliance_pool_high_water_bytes") == {"instance=0": 0}


async def test_the_host_tier_is_shown_in_bytes(make_box: MakeBox) -> None:
    """Weights of two models once they are stored; places for KV while a request lives."""
    box = make_box()
    box.start()
    rest = {"owner=weights": 8000, "owner=kv": 0, "owner=free": 192000}
    assert box.samples("appliance_host_bytes") == rest
    box.ask("r", "a", prompt=20, output=5)
    busy = box.samples("appliance_host_bytes")
    assert busy["owner=kv"] > 0
    assert sum(busy.values()) == 200000
    box.settle()

    assert box.samples("appliance_host_bytes") == rest


async def test_latencies_are_measured_where_tokens_come(make_box: MakeBox) -> None:
    """The first token from the arrival, others from the one before, the end from the arrival."""
    box = make_box()
    box.start()
    box.ask("r", "a", prompt=7, output=3)
    for number, seconds in ((1, 2.0), (2, 0.5), (3, 0.25)):
        box.now += seconds
        last = FinishReason.LENGTH if number == 3 else None
        box.workers[0].deliver(token("r", number, last))

    label = "model_name=a"
    assert box.samples("vllm:time_to_first_token_seconds_sum")[label] == 2.0
    assert box.samples("vllm:inter_token_latency_seconds_sum")[label] == 0.75
    assert box.samples("vllm:inter_token_latency_seconds_count")[label] == 2
    assert box.samples("vllm:e2e_request_latency_seconds_sum")[label] == 2.75
    assert box.samples("vllm:prompt_tokens_total")[label] == 7
    assert box.samples("vllm:generation_tokens_total")[label] == 3
    assert box.samples("vllm:request_success_total") == {"finished_reason=length,model_name=a": 1}


async def test_a_vector_is_the_end_of_its_prompt(make_box: MakeBox) -> None:
    """It reaches the client and no token is counted, nor one that came late."""
    box = make_box()
    box.start()
    box.world.lives["r"] = Life("a", 7, 1, 1)
    client = Client("r")
    pooled = SubmitRequest(id="r", model="a", prompt=tuple(range(7)), max_tokens=0, body=b"pool")
    box.daemon.submit(pooled, client)
    (told,) = box.workers[0].heard(frames.AddSequence)
    box.now += 1000.0
    vector = Produced(request="r", token=NO_TOKEN, finished=FinishReason.STOP, detail=b"1234")
    box.workers[0].deliver(frames.Tokens(0, "a", [vector]))

    assert told.sequence.body == b"pool"
    assert await read_all(client) == [vector]
    assert box.daemon.requests() == []
    label = "model_name=a"
    assert box.samples("vllm:prompt_tokens_total")[label] == 7
    assert box.samples("vllm:generation_tokens_total")[label] == 0
    assert box.samples("vllm:request_success_total") == {"finished_reason=stop,model_name=a": 1}
    assert set(box.samples("appliance_slo_tokens_total").values()) == {0.0}


# --- what is shown -------------------------------------------------------------------------------


async def test_not_ready_without_a_worker(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is enough; deaths before the first word point to the log, and what keeps workers
    from being forked is named."""
    box = make_box(instances=2)
    assert box.daemon.readiness().reasons == ("no worker is up",)
    box.workers[0].stillborn, box.workers[1].stillborn = 2, 1
    assert box.daemon.readiness().reasons == (
        "no worker is up, 3 died before they were; see the log",
    )
    monkeypatch.setattr(ForkedStart, "trouble", lambda start: "what they are forked from died")
    assert box.daemon.readiness().reasons == (
        "no worker is up, 3 died before they were; see the log; what they are forked from died",
    )
    assert not box.daemon.readiness().ok

    box.workers[1].greet()

    assert box.daemon.readiness().ok
    assert box.daemon.readiness().reasons == ()


async def test_batch_requests_have_promises_of_their_own(make_box: MakeBox) -> None:
    """A request of class batch is promised what its model promises to those."""
    box = make_box()
    box.start()
    box.ask("r", "a", kind=RequestClass.BATCH)
    box.ask("s", "a")

    promised = {name: r.spec.slo.ttft_seconds for name, r in box.daemon.machine.requests.items()}
    assert promised == {"r": 3600.0, "s": 10.0}


async def test_a_request_s_own_service_level(make_box: MakeBox) -> None:
    """What a request asks for itself goes before what its model promises, each half apart."""
    box = make_box()
    box.start()
    box.ask("r", "a", slo=AskedSlo(ttft_seconds=2.0))
    box.ask("s", "a")

    asked, promised = (box.daemon.machine.requests[name].spec.slo for name in "rs")
    assert (asked.ttft_seconds, asked.tbt_seconds) == (2.0, promised.tbt_seconds)
    assert promised.ttft_seconds == 10.0


async def test_a_longest_gap_is_asked_for(make_box: MakeBox) -> None:
    """It may not be below the time between tokens, which is the request's or its model's."""
    box = make_box()
    box.start()
    box.ask("r", "a", slo=AskedSlo(gap_seconds=1.0))
    with pytest.raises(
        GenerationFailed, match=r"gap of 0\.05 s is less than the 0\.1 s"
    ) as failure:
        box.ask("s", "a", slo=AskedSlo(gap_seconds=0.05))
    box.ask("t", "a", slo=AskedSlo(gap_seconds=0.05, tbt_seconds=0.02))

    assert (failure.value.code, failure.value.status) == ("invalid_slo", 400)
    gaps = {name: r.spec.slo.gap_seconds for name, r in box.daemon.machine.requests.items()}
    assert gaps == {"r": 1.0, "t": 0.05}


async def test_a_token_after_the_longest_gap_is_late(make_box: MakeBox) -> None:
    """Only that one: those that follow it come soon enough, and none is late by its schedule."""
    box = make_box()
    box.start()
    request = box.ask("r", "a", output=10, slo=AskedSlo(ttft_seconds=100.0, gap_seconds=1.0))
    box.work_until(lambda: box.world.lives["r"].produced >= 2)
    box.now += 2.0
    box.settle()

    assert len(await read_all(request)) == 10
    assert isinstance(request.generation, RequestStream)
    assert request.generation.late == 1


async def test_ready_while_batch_work_waits_rightly(make_box: MakeBox) -> None:
    """Batch requests may wait as long as their instance does other work, and no longer."""
    box = make_box(slabs=40, limits=Limits(queue=9, progress_seconds=30.0))
    box.start()
    box.ask("r", "a", output=30)
    box.ask("b", "a", kind=RequestClass.BATCH)
    box.now += 40.0
    assert not box.daemon.readiness().ok

    box.work_until(lambda: box.world.lives["r"].produced == 1)
    assert box.world.lives["b"].produced == 0
    assert box.daemon.readiness().ok
    box.now += 31.0
    assert not box.daemon.readiness().ok


async def test_not_ready_without_progress(make_box: MakeBox) -> None:
    """A request may go without a token as long as allowed, and not longer; a token mends it."""
    box = make_box(limits=Limits(queue=9, progress_seconds=30.0))
    box.start()
    box.ask("r", "a")
    box.now += 30.0
    assert box.daemon.readiness().ok
    box.now += 1.0
    assert box.daemon.readiness().reasons == ("a request made no progress for 31 s",)

    box.work_until(lambda: box.world.lives["r"].produced == 1)
    assert box.daemon.readiness().ok
    box.settle()
    box.now += 1000.0
    assert box.daemon.readiness().ok


async def test_a_model_card_tells_how_far_a_model_is(make_box: MakeBox) -> None:
    """From cold over building and stored to loaded; failed stays failed."""
    box = make_box("ab")
    worker = box.workers[0]
    assert [card.state for card in box.daemon.models()] == ["absent", "absent"]
    worker.greet()
    assert box.daemon.model("a").state == "building"
    assert worker.double is not None
    worker.double.queue.clear()  # it fails to build what it was told to
    worker.deliver(ModelFailed(instance=0, model="a", reason="?"))
    assert box.daemon.model("a").state == "failed"
    box.settle()
    assert box.daemon.model("b").state == "cold"
    box.ask("r", "b")
    box.settle()

    assert box.daemon.model("b").state == "loaded"
    card = box.daemon.models()[1]
    assert (card.id, card.created, card.max_context_tokens) == ("b", 1700000000, 256)
    worker.die()
    assert [card.state for card in box.daemon.models()] == ["failed", "absent"]


async def test_a_model_has_the_state_of_its_best_instance(make_box: MakeBox) -> None:
    """Loaded on one instance counts, though it is only stored on the other."""
    box = make_box(instances=2)
    box.start()
    box.ask("r", "a")
    box.settle()

    (shown, _) = box.daemon.activity().models
    assert shown.state == "loaded"
    assert shown.residency == {"0": "loaded", "1": "cold"}


def without_counts(box: Box) -> InstanceActivity:
    """The only instance, less what it did so far."""
    (shown,) = box.daemon.activity().instances
    return msgspec.structs.replace(shown, busy_seconds=0.0, moved_bytes={})


async def test_activity_of_instances(make_box: MakeBox) -> None:
    """Starting, up with its process, model and pool, lost, and up again."""
    box = make_box()
    started = InstanceActivity(instance=0, role="mixed", state="starting")
    assert without_counts(box) == started
    box.start()
    box.ask("r", "a")
    box.settle()
    box.workers[0].deliver(frames.PoolReport(0, {"free": 20}, 6, {}, 0))

    assert without_counts(box) == InstanceActivity(
        instance=0,
        role="mixed",
        state="up",
        pid=PID,
        model="a",
        pool_bytes={"free": 20000},
        pool_high_water_bytes=6000,
    )
    box.workers[0].die()
    lost = InstanceActivity(instance=0, role="mixed", state="lost")
    assert without_counts(box) == lost
    box.workers[0].greet()
    assert box.daemon.activity().instances[0].pid == PID + 1
    assert box.daemon.activity().instances[0].state == "up"


async def test_an_instance_that_rests_is_shown_and_counted(make_box: MakeBox) -> None:
    """`utilization` closes an instance that has little to do. A scrape adds what
    came since the last one."""
    box = make_box(instances=2, policy="utilization")
    box.start()
    name = "appliance_instance_parked_seconds_total"
    for second in range(20):
        box.ask(f"r{second}", "a")
        box.settle()
        box.now += 1.0
    shown = box.daemon.activity().instances

    assert [one.parked for one in shown] == [False, True]
    assert shown[0].parked_seconds == 0.0
    assert shown[1].parked_seconds == pytest.approx(20.0, abs=1.0)
    assert box.samples(name) == {"instance=0": 0.0, "instance=1": shown[1].parked_seconds}
    box.now += 60.0
    later = box.daemon.activity().instances[1].parked_seconds
    assert later == pytest.approx(shown[1].parked_seconds + 60.0)
    assert box.samples(name)["instance=1"] == pytest.approx(later)


async def test_activity_of_models(make_box: MakeBox) -> None:
    """Requests that run and those that wait, the same in the metrics; and the time since start."""
    box = make_box()
    box.start()
    box.now = 100.0
    box.ask("r1", "a")
    box.ask("r2", "a")
    box.ask("r3", "b")

    activity = box.daemon.activity()

    assert activity.uptime_seconds == 100.0
    counted = {m.model: (m.running, m.waiting) for m in activity.models}
    assert counted == {"a": (1, 1), "b": (0, 1)}
    running = {"model_name=a": 1.0, "model_name=b": 0.0}
    assert box.samples("vllm:num_requests_running") == running
    waiting = {"model_name=a": 1.0, "model_name=b": 1.0}
    assert box.samples("vllm:num_requests_waiting") == waiting


# --- verification --------------------------------------------------------------------------------


async def verifying(box: Box) -> asyncio.Task[list[InstanceVerification]]:
    """A verification whose questions are on their way."""
    task = asyncio.ensure_future(box.daemon.verify())
    await asyncio.sleep(0)
    return task


def answer(box: Box, instance: int, **models: Verdict) -> None:
    """The worker's answer to the newest question."""
    number = box.workers[instance].heard(frames.Verify)[-1].number
    box.workers[instance].deliver(frames.Verified(instance, number, models))


async def test_every_instance_is_asked_at_once(make_box: MakeBox) -> None:
    """Verdicts come in any order; an instance that never came up has none."""
    box = make_box(instances=3)
    box.daemon.start()
    for number in (0, 1):
        box.workers[number].greet()
    box.settle()

    task = await verifying(box)
    answer(box, 1, a=Verdict.NOT_LOADED)
    assert not task.done()
    answer(box, 0, a=Verdict.OK, b=Verdict.DIFFERS)

    assert await task == [
        InstanceVerification(
            instance=0, answered=True, models={"a": Verdict.OK, "b": Verdict.DIFFERS}
        ),
        InstanceVerification(instance=1, answered=True, models={"a": Verdict.NOT_LOADED}),
        InstanceVerification(instance=2, answered=False),
    ]
    assert box.workers[2].sent == []


async def test_two_verifications_at_a_time(make_box: MakeBox) -> None:
    """Each gets the answers to its own questions."""
    box = make_box()
    box.start()

    first, second = await verifying(box), await verifying(box)
    one, two = (question.number for question in box.workers[0].heard(frames.Verify))
    box.workers[0].deliver(frames.Verified(0, two, {"a": Verdict.DIFFERS}))
    box.workers[0].deliver(frames.Verified(0, one, {"a": Verdict.OK}))

    assert [v.models for v in await first] == [{"a": Verdict.OK}]
    assert [v.models for v in await second] == [{"a": Verdict.DIFFERS}]


async def test_a_lost_worker_has_no_answer(make_box: MakeBox) -> None:
    """It is not waited for, and the next worker's answers are not taken for its."""
    box = make_box()
    box.start()

    task = await verifying(box)
    number = box.workers[0].heard(frames.Verify)[-1].number
    box.workers[0].die()
    box.workers[0].greet()
    box.workers[0].deliver(frames.Verified(0, number, {"a": Verdict.OK}))

    assert await task == [InstanceVerification(instance=0, answered=False)]


async def test_a_worker_that_takes_too_long_has_no_answer(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has an end; what is answered later goes nowhere."""
    monkeypatch.setattr("appliance.daemon.verification.ANSWER_SECONDS", 0.0)
    box = make_box()
    box.start()

    assert await box.daemon.verify() == [InstanceVerification(instance=0, answered=False)]
    answer(box, 0, a=Verdict.OK)


async def test_an_image_that_went_meanwhile_is_none(make_box: MakeBox) -> None:
    """An engine compares with slabs that may be another model's by now: that says nothing."""
    box = make_box()
    box.start()
    weight_cache = box.daemon.machine.weight_cache

    task = await verifying(box)
    weight_cache.give_up("a", 0)
    weight_cache.reap(read=())
    answer(box, 0, a=Verdict.DIFFERS, b=Verdict.DIFFERS)
    assert (await task)[0].models == {"a": Verdict.NO_IMAGE, "b": Verdict.DIFFERS}

    task = await verifying(box)
    master = weight_cache.take("a", 4, 0, 0.0)
    assert master is not None
    weight_cache.filled("a", master.version)
    answer(box, 0, a=Verdict.DIFFERS, b=Verdict.NOT_LOADED)
    assert (await task)[0].models == {"a": Verdict.NO_IMAGE, "b": Verdict.NOT_LOADED}


# --- guides --------------------------------------------------------------------------------------

GUIDE = b"(a|b)+"


async def preparing(box: Box) -> asyncio.Task[None]:
    """A guide that all instances were asked to compile."""
    task = asyncio.ensure_future(box.daemon.check_guide("a", GUIDE))
    await asyncio.sleep(0)
    return task


def prepared(box: Box, instance: int, refused: str | None = None) -> None:
    """The worker's answer to the newest question."""
    asked = box.workers[instance].heard(frames.PrepareGuide)[-1]
    assert (asked.model, asked.body) == ("a", GUIDE)
    box.workers[instance].deliver(frames.GuidePrepared(instance, asked.number, refused))


async def test_a_guide_is_compiled_wherever_a_request_may_go(make_box: MakeBox) -> None:
    """All instances that are up compile it, and all of them have to have done so."""
    box = make_box(instances=3)
    box.daemon.start()
    for number in (0, 1):
        box.workers[number].greet()
    box.settle()

    task = await preparing(box)
    prepared(box, 1)
    await asyncio.sleep(0)
    assert not task.done()
    prepared(box, 0)

    await task


async def test_a_guide_that_cannot_be_compiled_is_refused(make_box: MakeBox) -> None:
    """With the worker's reason; so is one of a model that is not there."""
    box = make_box()
    box.start()

    task = await preparing(box)
    prepared(box, 0, "it does not close")

    with pytest.raises(GuideRefused, match="it does not close"):
        await task
    with pytest.raises(ModelNotFound):
        await box.daemon.check_guide("nobody", GUIDE)


async def test_a_guide_without_an_answer_is_not_the_clients_fault(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has an end, after which it may be tried again; a later answer goes nowhere."""
    monkeypatch.setattr("appliance.daemon.guide_checks.COMPILE_SECONDS", 0.0)
    box = make_box()
    box.start()

    with pytest.raises(GenerationFailed, match="no compiler had time") as caught:
        await box.daemon.check_guide("a", GUIDE)
    assert (caught.value.status, caught.value.retry_after_seconds) == (503, 1.0)
    prepared(box, 0)


async def test_a_guide_whose_worker_dies_is_asked_of_the_next(make_box: MakeBox) -> None:
    """Its client waits for a worker to be up, and hears nothing of a death."""
    box = make_box()
    box.start()

    task = await preparing(box)
    box.workers[0].die()
    for _ in range(10):  # it gets to where it waits
        await asyncio.sleep(0)
    assert not task.done()
    box.workers[0].greet()
    box.settle()
    await until_asked_again(box)
    prepared(box, 0)

    await task


async def until_asked_again(box: Box) -> None:
    """Until a worker was asked for a second time."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(box.workers[0].heard(frames.PrepareGuide)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_guide_that_no_worker_survives_is_not_accepted(make_box: MakeBox) -> None:
    """It may be the guide that kills them, so not one worker after the other is asked."""
    box = make_box()
    box.start()

    task = await preparing(box)
    box.workers[0].die()
    await asyncio.sleep(0)
    box.workers[0].greet()
    box.settle()
    await until_asked_again(box)
    box.workers[0].die()

    with pytest.raises(GenerationFailed, match="2 times no worker survived") as caught:
        await task
    assert caught.value.status == 503


async def test_a_guide_without_a_worker_to_compile_it(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a worker has an end, too."""
    box = make_box()
    box.start()

    task = await preparing(box)
    monkeypatch.setattr("appliance.daemon.guide_checks.COMPILE_SECONDS", 0.0)
    box.workers[0].die()

    with pytest.raises(GenerationFailed, match="no other was up") as caught:
        await task
    assert caught.value.status == 503


# --- front ends ----------------------------------------------------------------------------------


async def test_front_ends_know_all_models(make_box: MakeBox) -> None:
    """And again whenever one comes or goes."""
    box = make_box("ab")
    told: list[list[str]] = []
    fronts = box.daemon.front_models
    box.daemon.catalogue.on_change = lambda: told.append([model.name for model in fronts()])
    box.start()
    assert box.daemon.front_models()[0] == FrontModel(
        name="a",
        path="/models/a",
        dtype="float32",
        max_context=256,
        max_batch=64,
        task=Task.GENERATE,
        created=1700000000,
    )
    stream = box.ask("r", "a")
    box.daemon.catalogue.remove("a", force=False)
    assert told == [["b"]]
    box.cancel(stream)
    box.settle()
    (spec,) = [spec for spec in setup_of(small("ab")).models if spec.name == "a"]
    box.daemon.catalogue.add(box.served(spec), kv_floor_slabs=0)
    assert told == [["b"], ["b", "a"]]


async def test_a_model_without_a_front_half_is_failed(make_box: MakeBox) -> None:
    """Its requests hear why, an operator sees it; another model of its name may be better."""
    box = make_box("ab")
    box.start()
    box.daemon.refuse_model("a", "its tokenizer is damaged")
    box.daemon.refuse_model("nobody", "which is gone meanwhile")
    with pytest.raises(GenerationFailed, match="tokenizer is damaged") as caught:
        box.ask("r", "a")
    assert (caught.value.code, caught.value.status) == ("model_failed", 500)
    shown = box.daemon.model_activity("a")
    assert (shown.state, shown.failure) == ("failed", "its tokenizer is damaged")
    with pytest.raises(GenerationFailed, match="damaged"):
        box.daemon.load_model("a")
    box.ask("s", "b")
    box.daemon.catalogue.remove("a", force=False)
    box.settle()
    (spec,) = [spec for spec in setup_of(small("ab")).models if spec.name == "a"]
    box.daemon.catalogue.add(box.served(spec), kv_floor_slabs=0)
    box.ask("t", "a")


# --- processors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "instances", "shares"),
    [
        ([0], 1, ["0"]),
        ([0, 1], 1, ["0"]),
        ([2, 4, 6, 8, 9], 2, ["2,4", "6,8"]),
        ([0, 1, 2, 3], 2, ["0", "1,2"]),
        ([0, 1], 2, ["0", "1"]),
        ([3], 2, ["3", "3"]),
    ],
)
def test_processors_are_dealt_out(allowed: list[int], instances: int, shares: list[str]) -> None:
    """Evenly, each to one instance, the last one left to the daemon if there are enough."""
    assert share_cpus(allowed, [1] * instances) == shares


@pytest.mark.parametrize(("processors", "instances"), [(2, 4), (2, 8), (3, 9)])
def test_scarce_processors_are_shared_evenly(processors: int, instances: int) -> None:
    """No processor has two instances more than another."""
    load = Counter(share_cpus(range(processors), [1] * instances))

    assert set(load) == {str(number) for number in range(processors)}
    assert max(load.values()) - min(load.values()) <= 1


# --- signs of life -------------------------------------------------------------------------------


async def test_a_daemon_is_stuck_when_nothing_happens(make_box: MakeBox) -> None:
    """With a request that waits and a worker that says nothing for ten times the progress
    deadline; not before, nor while an engine is built."""
    box = make_box(limits=Limits(queue=100, progress_seconds=5.0))
    box.daemon.start()
    box.workers[0].greet()
    stream = box.ask("r", "a")
    box.now += 1000.0
    assert box.daemon.progresses(), "its engine is being built"

    box.work_until(lambda: bool(box.world.lives["r"].produced))
    box.now += 49.0
    assert box.daemon.progresses(), "a token came less than ten deadlines ago"
    box.now += 2.0
    assert not box.daemon.progresses()
    assert box.daemon.summary() == "2 models, 1 of 1 instances up, 1 requests"

    box.settle()
    assert await tokens_of(stream) == [1, 2, 3, 4, 5]
    assert box.daemon.progresses(), "nobody waits for anything"


async def test_a_worker_that_is_not_there_is_no_reason_to_end(make_box: MakeBox) -> None:
    """It is started again with the daemon that there is; a new daemon would do no better."""
    box = make_box(limits=Limits(queue=100, progress_seconds=5.0))
    box.start()
    stream = box.ask("r", "a")
    box.workers[0].die()
    box.now += 1000.0
    assert box.daemon.progresses()

    box.workers[0].greet()
    box.settle()
    assert len(await tokens_of(stream)) == 5


async def test_a_model_that_the_machine_gives_up_is_named(
    make_box: MakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose building ends worker after worker: in the log and in the feed, once."""
    box = make_box()
    before = box.daemon.feed.newest
    box.daemon.start()
    for _ in range(MAX_BUILD_LOSSES):
        box.workers[0].greet()
        box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    told = f"its worker died {MAX_BUILD_LOSSES} times while the engine was built"
    notices = [notice for notice in box.daemon.feed._ring if notice.number > before]
    failed = [notice.facts for notice in notices if notice.kind is NoticeKind.MODEL_FAILED]
    assert failed == [{"model": "a", "reason": told}]
    assert caplog.text.count(f"model a cannot be served: {told}") == 1
    stream = box.ask("r", "b")
    box.settle()
    assert await tokens_of(stream) == [1, 2, 3, 4, 5]


# --- what a request leaves behind ----------------------------------------------------------------


async def test_a_request_leaves_one_line_and_its_phases(
    make_box: MakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    """The phases add up to its time; log, metrics and whoever asked are told the same."""
    box = make_box(policy="aegaeon", slabs=40)
    box.start()
    with caplog.at_level("INFO", "appliance.requests"):
        streams = [box.ask("ra", "a", output=20), box.ask("rb", "b", output=30)]
        box.settle()

    lines = {fields["request"]: fields for fields in request_lines(caplog)}
    assert len(request_lines(caplog)) == len(lines) == 2
    for stream in streams:
        line, times = lines[stream.id], stream.times
        assert times is not None
        phases = {phase: line[f"{phase}_seconds"] for phase in times.phases}
        assert phases == pytest.approx(times.phases, abs=1e-4)
        assert sum(phases.values()) == pytest.approx(line["seconds"], abs=1e-3)
        assert line["instances"] == (0,)
    assert lines["rb"]["completion_tokens"] == 30
    assert lines["rb"]["outcome"] == "length"
    assert sum(line["preemptions"] for line in lines.values()) == sum(
        box.samples("appliance_preemptions_total").values()
    )
    assert box.samples("vllm:request_num_preemptions_count") == {
        "model_name=a": 1,
        "model_name=b": 1,
    }
    decoded = box.samples("vllm:request_decode_time_seconds_sum")["model_name=b"]
    held = phases["decode"] + phases["preempted"]
    assert decoded == pytest.approx(held, abs=0.005), "but for the report of the prompt's end"


async def test_what_is_refused_leaves_a_line_too(
    make_box: MakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    """One, with the status that the client was answered; also at the end of a drain."""
    box = make_box()
    box.start()
    with caplog.at_level("INFO", "appliance.requests"):
        with pytest.raises(GenerationFailed):
            box.ask("long", "a", prompt=300, output=5)
        box.ask("r", "a")
        await box.daemon.drain(0)
        box.settle()

    found = request_lines(caplog)
    assert [(line["outcome"], line["status"]) for line in found] == [
        ("context_length_exceeded", 400),
        ("shutting_down", 503),
    ]
    assert box.samples("appliance_requests_total") == {
        "model=a,outcome=context_length_exceeded": 1,
        "model=a,outcome=shutting_down": 1,
    }
    assert box.samples("appliance_slo_requests_total") == {}


async def test_promises_are_counted(make_box: MakeBox) -> None:
    """Tokens by their deadlines, requests by TTFT and mean TBT, both by class."""
    box = make_box()
    box.start()
    box.ask("r", "a", output=5)
    box.settle()
    box.ask("late", "a", output=5, kind=RequestClass.BATCH)
    box.now += 10_000.0
    box.settle()

    assert box.samples("appliance_slo_requests_total") == {
        "class=interactive,model=a,outcome=met": 1,
        "class=batch,model=a,outcome=missed": 1,
    }
    tokens = box.samples("appliance_slo_tokens_total")
    assert tokens["class=interactive,model=a,outcome=met"] == 5
    assert tokens["class=batch,model=a,outcome=missed"] == 5


async def test_ages_are_those_of_now(make_box: MakeBox) -> None:
    """Of the oldest request that waits for its prompt, and of the slowest progress."""
    box = make_box()
    box.daemon.start()
    box.ask("r", "a")
    box.now += 7.0
    assert box.samples("appliance_queue_age_seconds") == {"model=a": 7, "model=b": 0}
    assert box.samples("appliance_progress_age_seconds") == {"": 7}
    assert box.samples("appliance_instances") == {
        "state=starting": 1, "state=up": 0, "state=lost": 0, "state=quarantined": 0,
    }  # fmt: skip

    box.workers[0].greet()
    box.settle()

    assert box.samples("appliance_queue_age_seconds") == {"model=a": 0, "model=b": 0}
    assert box.samples("appliance_progress_age_seconds") == {"": 0}
    assert box.samples("appliance_decision_seconds_count")["event=InstanceUp"] == 1


async def test_nothing_is_shown_of_a_model_that_is_gone(make_box: MakeBox) -> None:
    """Neither among the gauges, nor as what an instance runs; what was counted stays."""
    box = make_box()
    box.start()
    box.ask("r", "a", output=5)
    box.settle()
    gauges = (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        "appliance_queue_age_seconds",
    )
    before = [name for gauge in gauges for name in box.samples(gauge)]
    assert box.daemon.activity().instances[0].model == "a"

    gone = box.daemon.catalogue.remove("a", force=True)
    box.settle()

    assert gone.is_set()
    left = [name for gauge in gauges for name in box.samples(gauge)]
    assert sorted(set(before) - set(left)) == ["model=a", "model_name=a"]
    assert len(left) == len(before) // 2
    assert box.daemon.activity().instances[0].model is None
    assert box.samples("appliance_prefills_total")["model=a"] == 1


@pytest.mark.parametrize(
    ("groups", "named"),
    [(("one", "two", "two"), [("one", "two"), ("two",)]), (("", "", ""), [(), ()]), ((), [(), ()])],
)
async def test_models_name_the_groups_that_can_have_them(
    make_box: MakeBox, groups: tuple[str, ...], named: list[tuple[str, ...]]
) -> None:
    """Each once, in the order of the configuration; none where it has none."""
    box = make_box(groups=groups, instances=3, only={"b": frozenset({1, 2})})

    assert [model.groups for model in box.daemon.activity().models] == named


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon", "appliance"])
async def test_models_count_the_requests_that_are_listed(make_box: MakeBox, policy: str) -> None:
    """At any moment, as many of each model run and wait as the list of requests has."""
    box = make_box("ab", policy=policy)
    box.start()
    for number in range(6):
        box.ask(f"r{number}", "ab"[number % 2], output=5)
    phases = set()
    more = True
    while more:
        snapshot = box.daemon.snapshot()
        phases |= {request.phase for request in snapshot.requests}
        for model in snapshot.status.models:
            mine = [one.phase for one in snapshot.requests if one.model == model.model]
            assert model.running == sum(phase in COMPUTED_PHASES for phase in mine)
            assert model.waiting == len(mine) - model.running
            assert box.daemon.model_activity(model.model).waiting == model.waiting
        more = box.work()

    assert phases >= {"queued", "prefilling", "preempted", "running"}
