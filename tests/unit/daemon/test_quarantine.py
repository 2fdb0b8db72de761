"""Quarantine as the daemon does it: who is set aside and why, what is shown, and the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.api.app import create_app
from appliance.daemon.quarantine import MOST_STILLBORN, STILLBORN_SECONDS
from appliance.journal import replay
from appliance.service.interface import Generation, GenerationFailed
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.doubles.pretend_nvml import install
from tests.unit.doubles.serving import served

GIB = 1 << 30
MakeBox = Callable[..., Box]


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=20) as make:
        yield make


async def tokens_of(stream: Generation) -> list[int]:
    return [produced.token async for batch in stream for produced in batch]


def states(box: Box) -> list[tuple[str, str | None]]:
    return [(one.state, one.quarantine) for one in box.daemon.activity().instances]


def quarantine(box: Box, number: int, reason: str = "it fails") -> None:
    """The whole of it: the worker is gone, too."""
    box.daemon.quarantine_instance(number, reason)
    assert box.workers[number].held
    box.workers[number].die()


async def test_a_stream_goes_on_elsewhere(make_box: MakeBox, tmp_path: Path) -> None:
    """Its client gets every token once, from two workers; the journal replays."""
    box = make_box(instances=2, journal=tmp_path / "journal")
    box.start()
    stream = box.ask("r", "a", output=20)
    box.work_until(lambda: box.world.lives["r"].produced == 5)

    quarantine(box, 0)
    box.settle()
    box.daemon.release_instance(0)
    assert not box.workers[0].held
    box.workers[0].greet()
    box.settle()

    assert await tokens_of(stream) == list(range(1, 21))
    assert states(box) == [("up", None), ("up", None)]
    await box.daemon.stop()
    assert replay(tmp_path / "journal")[1] == []


async def test_a_release_before_the_loss(make_box: MakeBox, tmp_path: Path) -> None:
    """A worker that is being ended is given nothing, though its instance may serve again; what it
    had goes on with the next one, and the journal replays."""
    box = make_box(journal=tmp_path / "journal")
    box.start()
    running = box.ask("r1", "a", output=20)
    box.work_until(lambda: box.world.lives["r1"].produced == 5)

    box.daemon.quarantine_instance(0, "it fails")
    box.daemon.release_instance(0)
    before = len(box.workers[0].sent)
    waiting = box.ask("r2", "a", output=5)
    assert len(box.workers[0].sent) == before
    assert states(box) == [("starting", None)]
    box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    assert await tokens_of(running) == list(range(1, 21))
    assert await tokens_of(waiting) == list(range(1, 6))
    assert states(box) == [("up", None)]
    await box.daemon.stop()
    assert replay(tmp_path / "journal")[1] == []


async def test_what_is_shown(make_box: MakeBox, caplog: pytest.LogCaptureFixture) -> None:
    """In the state of the instance, in the readiness, in the feed, as a metric and in the log."""
    box = make_box(instances=2)
    box.start()
    before = box.daemon.feed.newest
    assert box.daemon.readiness().degraded == ()

    quarantine(box, 1, "it is too loud")
    box.daemon.quarantine_instance(1, "another reason")

    readiness = box.daemon.readiness()
    assert states(box) == [("up", None), ("quarantined", "it is too loud")]
    assert readiness.ok
    assert readiness.degraded == ("instance 1 is quarantined",)
    assert box.samples("appliance_instance_quarantined") == {"instance=0": 0, "instance=1": 1}
    assert box.samples("appliance_instances")["state=quarantined"] == 1
    assert "instance 1 is quarantined: it is too loud" in caplog.text
    told = [notice async for notice in first(box, before)]
    assert told == [
        ("instance_quarantined", {"instance": 1, "reason": "it is too loud"}),
        ("instance_lost", {"instance": 1}),
    ]

    box.daemon.release_instance(1)
    box.daemon.release_instance(1)
    assert states(box)[1] == ("lost", None)
    assert box.daemon.readiness().degraded == ()
    assert box.samples("appliance_instance_quarantined") == {"instance=0": 0, "instance=1": 0}


async def first(box: Box, after: int) -> Any:
    """What happened since, as far as instances are concerned."""
    async for batch in box.daemon.events(after):
        for notice in batch or []:
            if notice.kind.startswith("instance_"):
                yield str(notice.kind), notice.facts
        return


async def test_the_only_instance_of_a_model_is_started_again(make_box: MakeBox) -> None:
    """However often its worker dies, and whatever else serves: the model would be refused. A spare
    one is set aside."""
    only = {"a": frozenset({0, 1}), "b": frozenset({2})}
    box = make_box(instances=3, only=only)
    for number in (0, 1, 2):
        box.workers[number].greet()
    for number in (1, 2):
        box.workers[number].die()
        for _ in range(MOST_STILLBORN):
            box.workers[number].be_stillborn()
            box.now += STILLBORN_SECONDS

    assert [state for state, _ in states(box)] == ["up", "quarantined", "lost"]
    readiness = box.daemon.readiness()
    assert readiness.ok
    assert readiness.degraded == (
        "instance 1 is quarantined",
        "no instance is up that can serve 1 of 2 models",
    )

    box.workers[2].greet()

    assert box.daemon.readiness().degraded == ("instance 1 is quarantined",)


async def test_without_an_instance_requests_hear_that(make_box: MakeBox) -> None:
    """503 without the reason, and when to come again; the daemon is not ready."""
    box = make_box()
    box.start()
    stream = box.ask("r", "a", output=20)
    box.work_until(lambda: box.world.lives["r"].produced == 2)

    quarantine(box, 0, "XID 79")

    with pytest.raises(GenerationFailed, match="every instance is quarantined;") as refused:
        await tokens_of(stream)
    assert (refused.value.code, refused.value.status) == ("no_instance", 503)
    with pytest.raises(GenerationFailed, match="every instance is quarantined;"):
        box.ask("r2", "a")
    assert box.daemon.readiness().reasons == ("no worker is up, 1 of 1 instances are quarantined",)


async def test_an_instance_in_quarantine_does_not_excuse_the_others(make_box: MakeBox) -> None:
    """The watchdog waits for a worker that starts, not for one that does not."""
    box = make_box(instances=2)
    box.start()
    box.ask("r", "a")
    quarantine(box, 1)
    assert box.daemon.progresses()
    box.work_until(lambda: box.world.lives["r"].produced == 2)

    box.now += 10_000

    assert not box.daemon.progresses()
    box.settle()


async def test_a_worker_that_never_comes_up_is_given_up(make_box: MakeBox) -> None:
    """While another one serves, and when it has lasted; alone it is tried for ever."""
    box = make_box(instances=2)
    box.daemon.start()
    for _ in range(2 * MOST_STILLBORN):
        box.workers[1].be_stillborn()
    assert states(box)[1] == ("starting", None)

    box.workers[0].greet()
    box.workers[1].be_stillborn()
    assert states(box)[1] == ("starting", None)
    box.now += STILLBORN_SECONDS
    box.workers[1].be_stillborn()

    assert states(box)[1] == (
        "quarantined",
        f"its worker died {2 * MOST_STILLBORN + 2} times in a row before it was up",
    )
    assert box.workers[1].held
    box.settle()


async def test_a_gpu_that_fails_takes_its_instance_out(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watch hears in its thread comes to the instance of that GPU, and to no other."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    box = make_box(instances=2, devices=["cuda:0", "cuda:1"])
    held = asyncio.Event()
    monkeypatch.setattr(box.workers[1], "hold", held.set)
    box.start()

    nvml.errors.put((1, 13))  # a program's
    nvml.errors.put((1, 95))
    await asyncio.wait_for(held.wait(), PATIENCE_SECONDS)

    assert states(box) == [("up", None), ("quarantined", "critical error of GPU 1, XID 95")]
    await box.daemon.stop()
    nvml.errors.put((1, 43))  # wakes the watch, which sees that it is over


async def test_the_endpoints_of_instances(make_box: MakeBox) -> None:
    """They list, quarantine and release; /health says, with 200, what is degraded, not why."""
    box = make_box(instances=2)
    box.start()
    async with served(create_app(box.daemon)) as port:
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client:
            whole = (await client.get("/health")).json()
            put = await client.post("/api/instances/1/quarantine", json={"reason": "a test"})
            box.workers[1].die()
            listed = (await client.get("/api/instances")).json()["instances"]
            health = await client.get("/health")
            ready = await client.get("/readyz")
            back = await client.post("/api/instances/1/release")
            bare = await client.post("/api/instances/1/quarantine", json={})

    assert whole == {"status": "ok", "reasons": []}
    assert (put.json()["state"], put.json()["quarantine"]) == ("quarantined", "a test")
    assert [one["state"] for one in listed] == ["up", "quarantined"]
    reasons = ["instance 1 is quarantined"]
    assert (health.status_code, health.json()) == (200, {"status": "degraded", "reasons": reasons})
    assert (ready.status_code, ready.json()["degraded"]) == (200, reasons)
    assert (back.json()["state"], back.json()["quarantine"]) == ("lost", None)
    assert bare.json()["quarantine"] == "an operator said so"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("2/quarantine", "{}", 404, "instance_not_found"),
        ("x/quarantine", "{}", 404, "instance_not_found"),
        ("2/release", "", 404, "instance_not_found"),
        ("0/quarantine", '{"reasons": "x"}', 400, "unsupported_field"),
        ("0/quarantine", '{"reason": ""}', 400, None),
        ("0/quarantine", "{", 400, "invalid_json"),
    ],
)
async def test_what_cannot_be_done(
    make_box: MakeBox, path: str, body: str, status: int, code: str | None
) -> None:
    """It is refused with a word for programs, and nothing is changed."""
    box = make_box()
    box.start()
    async with served(create_app(box.daemon)) as port:
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client:
            answer = await client.post(f"/api/instances/{path}", content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert states(box) == [("up", None)]


@pytest.mark.parametrize("reason", ["loud\x1b[2J", "loud\nready", "\u202eduol"])
async def test_a_reason_is_a_line_of_text(make_box: MakeBox, reason: str) -> None:
    """Terminals and logs show it: what would do more there is refused."""
    box = make_box()
    box.start()
    async with served(create_app(box.daemon)) as port:
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client:
            answer = await client.post("/api/instances/0/quarantine", json={"reason": reason})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reason")
    assert states(box) == [("up", None)]
