"""The autopilot in a daemon over doubles: its replays, changes, events, and what it remembers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from appliance.daemon.autopilot import runner
from appliance.daemon.autopilot.barred_file import barred_path, read_barred, write_barred
from appliance.daemon.autopilot.control import START_CPU_SECONDS, Seen
from appliance.daemon.autopilot.replay_process import ReplayFailed
from appliance.daemon.autopilot.runner import AutopilotRunner
from appliance.daemon.autopilot.seasons_file import read_seasons, seasons_path
from appliance.errors import PolicyChoiceError
from appliance.journal import read
from appliance.service.autopilot import (
    CPU_SHARE,
    AutopilotMode,
    AutopilotNote,
    AutopilotReport,
    AutopilotStep,
    AutopilotTerms,
    Barred,
    Promises,
    Recommendation,
)
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import Slo
from tests.patience import PATIENCE_SECONDS
from tests.unit.daemon.autopilot.test_control import UNIX, advice
from tests.unit.doubles.daemon import Box, box_maker

OLD, NEW = PolicyChoice(use=("serverlessllm",)), PolicyChoice(use=("aegaeon",))
IN_TIME, LATE = "a", "b"
"""Models: the second one's requests are always late."""
SLOS = {LATE: Slo(ttft_seconds=1e-6, tbt_seconds=0.1)}


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
            cpu_seconds=1.0,
            watch_seconds=10.0,
            journal=str(folder / "journal"),
        )
        self.answers: asyncio.Queue[Recommendation | Exception] = asyncio.Queue()
        self.asked = asyncio.Semaphore(0)
        self.pilot.replay = self._replay
        box.start()
        self.pilot.configure(self.terms, OLD)
        self.asks = 0
        self.also: tuple[PolicyChoice, ...] = ()
        """What the newest replay is to try first."""
        self.start = box.daemon.feed.newest

    async def _replay(
        self, terms: AutopilotTerms, seconds: float, hard: float, also: tuple[PolicyChoice, ...]
    ) -> Recommendation:
        self.also = also
        self.asked.release()
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def serve(self, seconds: int, model: str, each: int = 4) -> None:
        """Requests, with a tick each second."""
        for _ in range(seconds):
            for _ in range(each):
                self.asks += 1
                self.box.ask(f"r{self.asks}", model, output=3)
                self.box.settle()
            self.box.now += 1.0
            self.pilot.tick()

    def serve_until_due(self, model: str) -> None:
        """Up to the next replay: nothing at first, then requests for 12 s."""
        self.pilot.tick()
        self.box.now += (self.terms.cpu_seconds + START_CPU_SECONDS) / CPU_SHARE - 11.0
        self.serve(12, model)

    async def replay_begun(self, model: str = IN_TIME) -> None:
        self.serve_until_due(model)
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
        journal = tmp_path / f"journal{len(rigs) or ''}"
        box = make_box(policy="serverlessllm", journal=journal, slos=SLOS)
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
    assert report.autopilot.cpu_seconds in (6.0, 12.0)  # the next one may have begun
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


class FailingDecisions:
    """Policies whose next changes fail, or come about."""

    def __init__(self, barred: Path) -> None:
        self.choice = OLD
        self.failures: list[Exception | None] = []
        """What becomes of the next changes; those after them come about."""
        self.asked: list[tuple[PolicyChoice, bool]] = []
        """For which, and whether something was barred on disk by then."""
        self._barred = barred
        self.gate: asyncio.Event | None = None
        """Until when changes take."""

    async def set_policy_if(self, still: Callable[[], bool], choice: PolicyChoice) -> bool:
        self.asked.append((choice, self._barred.exists()))
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        if still():
            self.choice = choice
            return True
        return False

    def flush_journal(self) -> None:
        pass


class Pilot:
    """An autopilot over such decisions. All requests under `OLD` are in time, none under `NEW`."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.promises = Promises()
        journal = str(folder / "journal")
        self.barred = barred_path(journal)
        self.decisions = FailingDecisions(self.barred)
        self.runner = AutopilotRunner(
            OLD, self.decisions, self._see, EventLog(), lambda: self.now, replay=self._replay
        )
        terms = AutopilotTerms(
            mode=AutopilotMode.APPLY,
            interval_seconds=10.0,
            cpu_seconds=1.0,
            watch_seconds=10.0,
            journal=journal,
        )
        self.runner.configure(terms, OLD)

    def _see(self) -> Seen:
        return Seen(active=self.decisions.choice, promises=self.promises)

    async def _replay(
        self, terms: AutopilotTerms, seconds: float, hard: float, also: tuple[PolicyChoice, ...]
    ) -> Recommendation:
        return good()

    async def second(self) -> None:
        """One goes by."""
        self.now += 1.0
        late = 10 if self.decisions.choice == NEW else 0
        self.promises = Promises(
            tokens=self.promises.tokens + 10,
            late=self.promises.late + late,
            requests=self.promises.requests + 10,
            missed=self.promises.missed + late,
        )
        self.runner.tick()
        await asyncio.sleep(0.001)

    async def until(self, step: AutopilotStep) -> AutopilotNote:
        """Time goes on until it has done so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await self.second()
                notes = self.runner.report().notes
                if notes and notes[-1].what is step:
                    return notes[-1]


@pytest.fixture
async def pilot(tmp_path: Path) -> AsyncIterator[Pilot]:
    made = Pilot(tmp_path)
    yield made
    await made.runner.stop()


async def test_what_is_rolled_back_is_remembered_before_the_change(
    monkeypatch: pytest.MonkeyPatch, pilot: Pilot
) -> None:
    """On the disk: so a daemon that ends in the change does not apply it again."""
    monkeypatch.setattr(runner, "LONGEST_WRITE_SECONDS", PATIENCE_SECONDS)
    await pilot.until(AutopilotStep.ROLLED_BACK)
    assert pilot.decisions.asked == [(NEW, False), (OLD, True)]
    assert [one.choice for one in read_barred(pilot.barred)] == [NEW]


@pytest.mark.parametrize("error", [PolicyChoiceError("no policy"), RuntimeError("a bug")])
async def test_a_change_that_fails_is_a_warning(
    pilot: Pilot, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Of whatever kind. One back is tried again until it comes about, and the autopilot goes on."""
    pilot.decisions.failures = [error, None, error, error]
    with caplog.at_level(logging.WARNING):
        first = await pilot.until(AutopilotStep.FAILED)
        rolled = await pilot.until(AutopilotStep.ROLLED_BACK)
    assert (first.choice, rolled.choice) == (NEW, OLD)
    assert pilot.decisions.choice == OLD
    assert [choice for choice, _ in pilot.decisions.asked] == [NEW, NEW, OLD, OLD, OLD]
    steps = [note.what for note in pilot.runner.report().notes]
    assert steps == ["failed", "applied", "failed", "failed", "rolled_back"]
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 3
    assert all("the policies cannot be changed" in line for line in warned)
    assert "it is tried again in 5 s" in warned[1]


@pytest.mark.parametrize("error", [PolicyChoiceError("no policy"), None])
async def test_the_end_of_a_change_that_a_reload_ended_is_not_heard(
    pilot: Pilot, error: Exception | None
) -> None:
    """It comes while the next replay runs, which goes on: its own answer is what counts."""
    pilot.decisions.gate = gate = asyncio.Event()
    pilot.decisions.failures = [error]
    asked = asyncio.Event()
    answer: asyncio.Future[Recommendation] = asyncio.get_running_loop().create_future()

    async def replay(*_: object) -> Recommendation:
        asked.set()
        return await answer

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not pilot.decisions.asked:
            await pilot.second()
        pilot.runner.replay = replay
        pilot.runner.configure(pilot.runner.terms, OLD)
        while not asked.is_set():
            await pilot.second()
    assert pilot.runner.report().phase == "replaying"
    gate.set()
    await asyncio.gather(*pilot.runner._tasks)
    assert pilot.decisions.choice == OLD
    assert pilot.runner.report().phase == "replaying"
    assert pilot.runner.report().notes == ()
    answer.set_result(good())
    applied = await pilot.until(AutopilotStep.APPLIED)
    assert applied.choice == NEW


async def test_a_mistake_of_its_own_ends_it_until_a_reload(make_rig: MakeRig) -> None:
    """It is logged and no request is lost; when the configuration is read again, it goes on."""
    rig = make_rig()
    see = rig.pilot._see
    broken = asyncio.Event()

    def fails() -> Seen:
        broken.set()
        raise RuntimeError("a bug")

    rig.pilot._see = fails
    rig.pilot.configure(rig.terms, OLD)
    await asyncio.wait_for(broken.wait(), PATIENCE_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while rig.pilot.ticks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    rig.pilot._see = see
    rig.pilot.configure(rig.terms, OLD)
    assert rig.pilot.ticks
    await rig.replay_begun()


async def test_hours_are_remembered_over_a_restart(make_rig: MakeRig) -> None:
    """Next to the journal; the next daemon has its replay try what won."""
    rig = make_rig(AutopilotMode.PROPOSE)
    rig.pilot._unix_clock = lambda: UNIX  # in the middle of an hour
    await rig.replay_begun()
    assert rig.also == ()
    rig.answers.put_nowait(good())
    await rig.noted(1)
    rig.pilot.tick()
    path = seasons_path(rig.terms.journal)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    again = make_rig(AutopilotMode.PROPOSE)
    again.pilot._unix_clock = lambda: UNIX
    assert [one.choice for one in again.pilot.report().hour] == [NEW, OLD]
    await again.replay_begun()
    assert again.also == (NEW,)


async def test_a_damaged_file_of_hours_is_an_event(make_rig: MakeRig, tmp_path: Path) -> None:
    """The memory starts anew, and the next word replaces the file."""
    path = seasons_path(str(tmp_path / "journal"))
    path.write_bytes(b"\0")
    rig = make_rig(AutopilotMode.PROPOSE)
    (note,) = rig.pilot.report().notes
    assert note.what is AutopilotStep.FORGOT
    assert str(path) in note.reason
    await rig.replay_begun()
    rig.answers.put_nowait(good())
    await rig.noted(2)
    rig.pilot.tick()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not read_seasons(path, OLD)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "text", [b'[{"choice": 1}]', b'[{"choice": {"use": ["\xff"]}}]', b"[" * 100_000]
)
def test_a_spoiled_file_is_no_obstacle(tmp_path: Path, text: bytes) -> None:
    path = barred_path(str(tmp_path / "journal"))
    assert read_barred(path) == []
    path.write_bytes(text)
    assert read_barred(path) == []


async def test_off_it_reads_no_file(tmp_path: Path) -> None:
    """Whatever is in them is no matter of a daemon without an autopilot; once it is on, they are
    read."""
    journal = str(tmp_path / "journal")
    write_barred(barred_path(journal), (Barred(choice=NEW, until_unix_seconds=UNIX + 3600),))
    seasons_path(journal).write_bytes(b"\0")
    pilot = AutopilotRunner(
        OLD, FailingDecisions(Path(journal)), lambda: Seen(active=OLD, promises=Promises()),
        EventLog(), clock=lambda: 0.0, unix_clock=lambda: UNIX,
    )  # fmt: skip
    pilot.configure(AutopilotTerms(journal=journal), OLD)
    assert (pilot.report().barred, pilot.report().notes) == ((), ())
    pilot.configure(AutopilotTerms(mode=AutopilotMode.PROPOSE, journal=journal), OLD)
    assert [one.choice for one in pilot.report().barred] == [NEW]
    assert [note.what for note in pilot.report().notes] == [AutopilotStep.FORGOT]
