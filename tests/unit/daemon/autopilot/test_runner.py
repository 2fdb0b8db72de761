"""The autopilot in a daemon over doubles: its replays, changes, events, and what it remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from appliance.daemon.autopilot.barred_file import barred_path, read_barred
from appliance.daemon.autopilot.replay_process import ReplayFailed
from appliance.journal import read
from appliance.service.autopilot import (
    AutopilotMode,
    AutopilotReport,
    AutopilotStep,
    AutopilotTerms,
    Recommendation,
)
from appliance.service.event_log import NoticeKind
from appliance.service.interface import AskedSlo, GenerationFailed, QueueFull
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from tests.patience import PATIENCE_SECONDS
from tests.unit.daemon.autopilot.test_control import advice
from tests.unit.doubles.daemon import Box, box_maker

OLD, NEW = PolicyChoice(use=("serverlessllm",)), PolicyChoice(use=("aegaeon",))
IN_TIME, LATE = AskedSlo(ttft_seconds=60, tbt_seconds=60), AskedSlo(ttft_seconds=1e-6)


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Box]]:
    with box_maker(monkeypatch, slabs=40) as make:
        yield make


class Rig:
    """A box with an autopilot whose replays the test answers, and that the test has tick."""

    def __init__(self, box: Box, folder: Path, mode: AutopilotMode = AutopilotMode.APPLY) -> None:
        self.box = box
        self.pilot = box.daemon.autopilot
        self.terms = AutopilotTerms(
            mode=mode,
            interval_seconds=10.0,
            watch_seconds=10.0,
            journal=str(folder / "journal"),
        )
        self.answers: asyncio.Queue[Recommendation | Exception] = asyncio.Queue()
        self.asked = asyncio.Semaphore(0)
        self.pilot.replay = self._replay
        box.start()
        self.pilot.configure(self.terms, OLD)
        self.asks = 0
        self.start = box.daemon.feed.newest

    async def _replay(self, terms: AutopilotTerms, seconds: float, hard: float) -> Recommendation:
        self.asked.release()
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def serve(self, seconds: int, slo: AskedSlo, each: int = 4) -> None:
        """Requests, with a tick each second."""
        for _ in range(seconds):
            for _ in range(each):
                self.asks += 1
                self.box.ask(f"r{self.asks}", "a", output=3, slo=slo)
                self.box.settle()
            self.box.now += 1.0
            self.pilot.tick()

    async def replay_begun(self, slo: AskedSlo = IN_TIME) -> None:
        self.serve(12, slo)
        await asyncio.wait_for(self.asked.acquire(), PATIENCE_SECONDS)

    async def until(self, true: Callable[[AutopilotReport], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true(self.pilot.report()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def noted(self, count: int) -> None:
        """So many notes, in all."""
        await self.until(lambda report: len(report.notes) == count)

    async def phase(self, name: str) -> None:
        await self.until(lambda report: report.phase == name)

    async def active(self) -> PolicyChoice:
        return (await self.box.daemon.policies()).active

    async def told(self) -> list[str]:
        """What its events say that it did."""
        self.box.daemon.feed.close()
        notices = [
            notice
            async for batch in self.box.daemon.events(self.start)
            for notice in batch or ()
            if notice.kind is NoticeKind.AUTOPILOT
        ]
        return [str(notice.facts["what"]) for notice in notices]


MakeRig = Callable[..., Rig]


@pytest.fixture
async def make_rig(make_box: Callable[..., Box], tmp_path: Path) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    def make(mode: AutopilotMode = AutopilotMode.APPLY) -> Rig:
        box = make_box(policy="serverlessllm", journal=tmp_path / f"journal{len(rigs) or ''}")
        rigs.append(Rig(box, tmp_path, mode))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.pilot.stop()
        rig.box.daemon._decisions.close()


def good(current: PolicyChoice = OLD, chosen: PolicyChoice | None = NEW) -> Recommendation:
    return advice(chosen, current)


async def test_a_better_policy_is_applied_as_an_operator_would(make_rig: MakeRig) -> None:
    """By the same way: the journal and the history of choices have it. It is an event, and stays
    as it keeps its promise."""
    rig = make_rig()
    await rig.replay_begun(LATE)
    rig.answers.put_nowait(good())
    await rig.phase("watching")
    assert await rig.active() == NEW
    rig.serve(12, IN_TIME)
    await rig.noted(2)

    report = await rig.box.daemon.policies()
    assert report.active == NEW
    assert report.previous == (OLD,)
    assert [note.what for note in report.autopilot.notes] == ["applied", "confirmed"]
    assert report.autopilot.notes[1].after == 1.0
    assert (report.autopilot.notes[0].before or 0) < 0.7
    assert report.autopilot.cpu_seconds in (30.0, 60.0)  # the next one may have begun
    assert await rig.told() == ["applied", "confirmed"]
    rig.box.daemon._decisions.flush_journal()
    entries = read(Path(rig.terms.journal))[1]
    assert [e.event.choice for e in entries if isinstance(e.event, PolicyChosen)] == [NEW]


async def test_planted_bad_advice_is_rolled_back(make_rig: MakeRig) -> None:
    """What clients get then is worse; it is remembered beside the journal, also by the next
    daemon, which only proposes it."""
    rig = make_rig()
    await rig.replay_begun()
    rig.answers.put_nowait(good())
    await rig.phase("watching")
    rig.serve(12, LATE)
    await rig.noted(2)
    assert await rig.active() == OLD
    notes = rig.pilot.report().notes
    assert [note.what for note in notes] == ["applied", "rolled_back"]
    assert await rig.told() == ["applied", "rolled_back"]
    path = barred_path(rig.terms.journal)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [one.choice for one in read_barred(path)] == [NEW]

    again = make_rig()
    await again.replay_begun()
    again.answers.put_nowait(good())
    await again.noted(1)
    assert again.pilot.report().notes[0].what is AutopilotStep.PROPOSED
    assert await again.active() == OLD


async def test_requests_without_an_answer_count(make_rig: MakeRig) -> None:
    """A policy that answers nobody delivers no late token; its requests miss their targets all the
    same, and those that are refused do, too."""
    rig = make_rig()
    rig.serve(1, IN_TIME)
    kept = rig.box.daemon._seen().promises
    assert (kept.requests, kept.missed, kept.tokens, kept.late) == (4, 0, 12, 0)
    rig.box.ask("starved", "b", slo=AskedSlo(ttft_seconds=1.0))
    rig.box.now += 2.0
    rig.box.daemon.limits = replace(rig.box.daemon.limits, queue=1)
    with suppress(GenerationFailed, QueueFull):
        rig.box.ask("refused", "b")
    del rig.box.world.lives["refused"], rig.box.clients["refused"]
    now = rig.box.daemon._seen().promises.since(kept)
    assert (now.requests, now.missed, now.tokens) == (2, 2, 0)
    rig.box.settle()
    now = rig.box.daemon._seen().promises.since(kept)
    assert (now.requests, now.missed) == (2, 2)
    assert now.value == pytest.approx((0 + 1 - now.late / 5) / 2)


async def test_an_operator_s_choice_is_kept(make_rig: MakeRig) -> None:
    """A `policy set` while it replays: what it finds is only proposed from then on. One that comes
    while its change is made wins."""
    mine = PolicyChoice(use=("aegaeon", "serverlessllm"))
    rig = make_rig()
    await rig.box.daemon.set_policy(mine)
    await rig.replay_begun()
    rig.answers.put_nowait(good(current=mine))
    await rig.noted(1)
    assert rig.pilot.report().notes[0].what is AutopilotStep.PROPOSED
    assert rig.pilot.report().held
    assert await rig.active() == mine

    rig.pilot.configure(rig.terms, OLD)
    assert not rig.pilot.report().held
    await rig.replay_begun()
    operator = asyncio.ensure_future(rig.box.daemon.set_policy(OLD))
    await asyncio.sleep(0)  # it has begun
    rig.answers.put_nowait(good(current=mine))
    await operator
    await rig.noted(2)
    assert await rig.active() == OLD


@pytest.mark.parametrize("error", [ReplayFailed("too few requests"), RuntimeError("a bug")])
async def test_a_replay_that_fails_is_an_event(make_rig: MakeRig, error: Exception) -> None:
    """Of whatever kind; requests are served on, and the next replay comes."""
    rig = make_rig(AutopilotMode.PROPOSE)
    await rig.replay_begun()
    rig.answers.put_nowait(error)
    await rig.noted(1)
    assert str(error) in rig.pilot.report().notes[0].reason
    await rig.replay_begun()
    rig.answers.put_nowait(good())
    await rig.noted(2)
    assert await rig.told() == ["failed", "proposed"]
    assert await rig.active() == OLD


async def test_a_replay_that_hangs_is_cancelled(make_rig: MakeRig) -> None:
    """And one that runs when the daemon ends."""
    rig = make_rig()
    await rig.replay_begun()
    rig.box.now += 1000.0
    rig.pilot.tick()
    assert [note.what for note in rig.pilot.report().notes] == ["failed"]
    await rig.replay_begun()
    await asyncio.wait_for(rig.pilot.stop(), PATIENCE_SECONDS)


async def test_policies_that_cannot_be_made_are_an_event(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.replay_begun()
    rig.answers.put_nowait(good(chosen=PolicyChoice(use=("gone",))))
    await rig.noted(1)
    assert "no policy 'gone'" in rig.pilot.report().notes[0].reason
    assert await rig.active() == OLD


def test_a_spoiled_file_is_no_obstacle(tmp_path: Path) -> None:
    path = barred_path(str(tmp_path / "journal"))
    assert read_barred(path) == []
    path.write_bytes(b'[{"choice": 1}]')
    assert read_barred(path) == []
