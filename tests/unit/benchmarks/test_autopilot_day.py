"""The day that the autopilot is tried on: the driver in virtual time, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from appliance.daemon.autopilot.control import StartReplay
from appliance.journal import read
from appliance.journal import replay as replayed
from appliance.lab.advice.cpu_time import OutOfCpuTime
from appliance.lab.experiments.run import Setting
from appliance.scheduling.machine import Machine
from appliance.service.autopilot import (
    AutopilotStep,
    AutopilotTerms,
    Recommendation,
    ReplayAnswer,
)
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from benchmarks import autopilot_drive
from benchmarks.autopilot_day import PARTS, TERMS, compared, day, shares
from benchmarks.autopilot_drive import Day, EventMeter, autopilot_day, fixed_day

PART = 80.0
BEFORE, AFTER = PolicyChoice(use=("serverlessllm",)), PolicyChoice(use=("appliance",))


@pytest.fixture(scope="module")
def tiny() -> Setting:
    return day(1, PART)


def terms(journal: Path) -> AutopilotTerms:
    return replace(TERMS, interval_seconds=40.0, watch_seconds=80.0, journal=str(journal))


def advising(
    monkeypatch: pytest.MonkeyPatch, chosen: PolicyChoice, current: PolicyChoice
) -> list[float]:
    """Have every replay recommend it; the CPU time that each was given."""
    asked: list[float] = []

    def answer(journal: Path, window: float, wanted: StartReplay, meter: object) -> ReplayAnswer:
        asked.append(wanted.cpu_seconds)
        return ReplayAnswer(
            found=Recommendation(
                current=current,
                chosen=chosen,
                name=chosen.use[0],
                gain=0.5,
                error=0.01,
                reason="It wins.",
                observed=0.5,
                requests=100,
                seconds=window,
                cpu_seconds=1.0,
            )
        )

    monkeypatch.setattr(autopilot_drive, "answer_within", answer)
    return asked


def steps(played: Day) -> list[AutopilotStep]:
    return [note.what for _, note in played.notes]


def test_what_wins_decides_from_then_on_and_is_watched(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the day, without losing a request: the journal, which says when, gives the
    same commands again."""
    asked = advising(monkeypatch, AFTER, BEFORE)
    journal = tmp_path / "journal"
    played = autopilot_day(tiny, BEFORE, terms(journal))
    assert asked[0] == TERMS.cpu_seconds
    applied, note = next(one for one in played.notes if one[1].what is AutopilotStep.APPLIED)
    assert note.choice == AFTER
    assert applied >= 40.0 + autopilot_drive.START_CPU_SECONDS
    assert AutopilotStep.CONFIRMED in steps(played)
    chosen = [entry for entry in read(journal)[1] if isinstance(entry.event, PolicyChosen)]
    assert [(entry.now, entry.event.choice) for entry in chosen] == [(applied, AFTER)]
    count, differences = replayed(journal)
    assert count > 100
    assert not differences
    assert len(played.run.recorder.lives) == len(tiny.arrivals)


def test_what_keeps_less_is_taken_back(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recommendation that is wrong: clients get less, so the policies before decide again."""
    wrong = PolicyChoice(use=("muxserve",))
    advising(monkeypatch, wrong, AFTER)
    played = autopilot_day(tiny, AFTER, terms(tmp_path / "journal"))
    assert AutopilotStep.APPLIED in steps(played)
    assert AutopilotStep.ROLLED_BACK in steps(played)
    at = next(at for at, note in played.notes if note.what is AutopilotStep.ROLLED_BACK)
    decided = [e.event for e in read(tmp_path / "journal")[1] if isinstance(e.event, PolicyChosen)]
    assert [event.choice for event in decided[:2]] == [wrong, AFTER]
    assert at < tiny.seconds


@pytest.mark.thorough
def test_a_day_is_the_same_each_time(tiny: Setting, tmp_path: Path) -> None:
    """With real replays, too: their cost is counted, not timed."""
    one, two = (
        autopilot_day(tiny, BEFORE, replace(terms(tmp_path / name), cpu_seconds=0.5))
        for name in ("one", "two")
    )
    assert one.notes == two.notes
    assert one.replays == two.replays
    assert one.replays
    assert shares(one.run, PART) == shares(two.run, PART)


def test_an_autopilot_that_does_nothing_changes_nothing(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared differs in its policies alone."""
    advising(monkeypatch, AFTER, AFTER)
    monkeypatch.setattr(
        autopilot_drive, "answer_within", lambda *_: ReplayAnswer(error="there is no journal")
    )
    played = autopilot_day(tiny, AFTER, terms(tmp_path / "journal"))
    assert set(steps(played)) == {AutopilotStep.FAILED}
    assert shares(played.run, PART) == shares(fixed_day(tiny, AFTER).run, PART)


def test_a_replay_ends_with_its_cpu_time(tiny: Setting) -> None:
    """Counted in events that machines handle, and none is counted after it."""
    meter = EventMeter(0.01)
    handle = Machine.handle
    with pytest.raises(OutOfCpuTime), meter.limited(0.5):
        fixed_day(tiny, AFTER)
    assert meter.seconds() == pytest.approx(0.51)
    assert Machine.handle is handle
    with pytest.raises(OutOfCpuTime), meter.limited(0.0):
        pass


def test_the_best_fixed_one_is_that_of_the_whole_day() -> None:
    """And what the autopilot is ahead of it is said of each part."""

    def rows(*values: float) -> dict[str, dict[str, float]]:
        named = zip([*PARTS, "the day"], values, strict=True)
        return {part: {"value": value} for part, value in named}

    fixed = {
        "appliance": rows(0.9, 0.9, 0.2, 0.9, 0.7),
        "prism": rows(0.7, 0.9, 0.95, 0.9, 0.85),
    }
    found = compared(fixed, {"muxserve": rows(0.9, 0.9, 0.9, 0.9, 0.9)})
    assert found["best_fixed"] == "prism"
    assert found["best_of_each_part"]["many models"] == "appliance"
    ahead = found["ahead"]["muxserve"]
    assert ahead["best_fixed"]["the day"]["value"] == pytest.approx(0.05)
    assert ahead["appliance"]["tight first tokens"]["value"] == pytest.approx(0.7)
