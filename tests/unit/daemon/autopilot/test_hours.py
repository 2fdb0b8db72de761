"""The autopilot at the begin of an hour: it applies what won there earlier, within its rights."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.daemon.autopilot.control import (
    MOST_NOTES,
    Action,
    Bar,
    Control,
    EndReplay,
    Seen,
    StartReplay,
    Use,
)
from appliance.daemon.autopilot.runner import AutopilotRunner
from appliance.daemon.autopilot.seasons import Cell, Mean, Remembered, Seasons
from appliance.daemon.autopilot.seasons_file import seasons_path, write_seasons
from appliance.service.autopilot import (
    AutopilotMode,
    AutopilotStep,
    AutopilotTerms,
    Barred,
    Promises,
)
from appliance.service.event_log import EventLog
from appliance.service.policy_report import PolicyChoice
from tests.unit.daemon.autopilot.test_control import NEW, OLD, TERMS, UNIX, Desk, advice

WEEK_SECONDS = 7 * 24 * 3600.0
SLOW = replace(TERMS, interval_seconds=1000.0)
BEFORE_HOUR = 3600 - UNIX % 3600 - 100
"""On a desk: that many seconds after its begin, an hour begins in 100 s."""


def hours(weeks: int = 2) -> tuple[Cell, ...]:
    """`NEW` won in the hour after `BEFORE_HOUR`, in so many weeks before."""
    seasons = Seasons()
    hour = int((UNIX + BEFORE_HOUR + 100) // 3600)
    for week in range(weeks, 0, -1):
        seasons.compared(hour - 168 * week, NEW, 0.3, 0.05)
    return seasons.table()


def desk_before_an_hour(
    terms: AutopilotTerms = SLOW,
    weeks: int = 2,
    barred: tuple[Barred, ...] = (),
    configured: PolicyChoice = OLD,
) -> Desk:
    desk = Desk(terms, configured)
    desk.control = Control(terms, configured, barred, hours(weeks))
    desk.now = BEFORE_HOUR
    return desk


def test_what_won_there_decides_from_the_begin_of_the_hour() -> None:
    """Before any replay; it is watched, and stays as it keeps more."""
    desk = desk_before_an_hour()
    assert desk.run(99) == []
    assert desk.run(1) == [Use(choice=NEW)]
    desk.use(NEW)
    (applied,) = desk.notes
    assert applied.what is AutopilotStep.APPLIED
    assert "At this hour of the week it won in 2 weeks" in applied.reason
    assert (applied.gain, applied.error) == (pytest.approx(0.3), pytest.approx(0.05))
    assert applied.before == pytest.approx(0.5)
    assert desk.run(80) == []
    assert desk.steps == [AutopilotStep.APPLIED, AutopilotStep.CONFIRMED]
    (remembered,) = desk.control.report(desk.moment).hour
    assert remembered.wins == 3
    assert remembered.kept == pytest.approx(0.9)


def test_it_is_rolled_back_if_it_keeps_less_now() -> None:
    """As what a replay recommended; it is barred, and its wins do not count any more."""
    desk = desk_before_an_hour()
    desk.share = {("old",): 0.8, ("new",): 0.5}
    assert desk.run(200) == [Use(choice=NEW)]
    desk.use(NEW)
    bar, back = desk.run(100)
    assert isinstance(bar, Bar)
    assert back == Use(choice=OLD)
    desk.use(OLD)
    assert desk.steps == [AutopilotStep.APPLIED, AutopilotStep.ROLLED_BACK]
    (remembered,) = desk.control.report(desk.moment).hour
    assert remembered.wins == 0


def test_one_win_is_tried_in_the_replay_only() -> None:
    desk = desk_before_an_hour(weeks=1)
    (begun,) = desk.run(2000)
    assert isinstance(begun, StartReplay)
    assert begun.also == (NEW,)


@pytest.mark.parametrize("why", ["proposes", "operator", "barred", "by hand", "few requests"])
def test_what_it_may_not_apply_waits_for_the_replay(why: str) -> None:
    """The same obstacles as for what a replay recommends."""
    terms = replace(SLOW, mode=AutopilotMode.PROPOSE) if why == "proposes" else SLOW
    until = UNIX + 20_000
    barred = (Barred(choice=NEW, until_unix_seconds=until),) if why == "barred" else ()
    configured = replace(OLD, decisions={"round": "old"}) if why == "by hand" else OLD
    desk = desk_before_an_hour(terms, barred=barred, configured=configured)
    if why == "operator":
        desk.do(desk.control.operator_chose(desk.moment))
    desk.promises = Promises(requests=1)
    (begun,) = desk.run(2000, requests_per_second=0 if why == "few requests" else 10)
    assert isinstance(begun, StartReplay)
    assert begun.also == (NEW,)
    assert desk.steps == []


def test_a_remembered_decision_that_the_file_does_not_name_is_not_applied() -> None:
    """It was named when that choice won: `use` is all that it may change."""
    named = replace(NEW, decisions={"round": "new"})
    seasons = Seasons()
    for cell in hours():
        for one in cell.choices:
            for week in (2, 1):
                seasons.compared(one.hour - 168 * (week - 1), named, 0.3, 0.05)
    desk = desk_before_an_hour()
    desk.control = Control(SLOW, OLD, hours=seasons.table())
    (begun,) = desk.run(2000)
    assert isinstance(begun, StartReplay)
    assert begun.also == (named,)


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        (replace(OLD, use=("old", "older")), True),
        (replace(OLD, parameters={"old": {"x": 1}}), False),
        (replace(OLD, decisions={"round": "old"}), False),
    ],
)
def test_what_was_learned_under_other_settings_by_hand_is_forgotten(
    now: PolicyChoice, kept: bool
) -> None:
    """At the reload that sets or removes one: a choice may have the parameter that is gone. It is
    an event, and the file is written anew."""
    desk = desk_before_an_hour()
    desk.do(desk.control.configure(desk.moment, SLOW, now))
    assert desk.steps == ([] if kept else [AutopilotStep.FORGOT])
    assert desk.control.learned() == (None if kept else ())
    desk.active = now
    (first,) = desk.run(200) or desk.run(2000)
    assert isinstance(first, Use if kept else StartReplay)
    assert kept or first.also == ()


def test_what_an_operator_tries_is_not_learned() -> None:
    """It would come back in other weeks, without the operator."""
    desk = desk_before_an_hour(weeks=0)
    desk.do(desk.control.operator_chose(desk.moment))
    mine = replace(OLD, parameters={"old": {"x": 9}})
    desk.active = mine
    desk.until_replay()
    desk.advise(advice(replace(NEW, parameters={"new": {"x": 9}}), current=mine))
    assert desk.steps == [AutopilotStep.PROPOSED]
    assert desk.control.learned() is None


def test_a_bar_holds_for_the_same_policies_with_other_tables() -> None:
    """Parameters of policies that do not decide make no other choice."""
    tables = {"old": {"x": 1}}
    barred = (Barred(choice=replace(NEW, parameters=tables), until_unix_seconds=UNIX + 20_000),)
    (begun,) = desk_before_an_hour(barred=barred).run(2000)
    assert isinstance(begun, StartReplay)


def test_it_learns_from_replays_of_earlier_weeks() -> None:
    """Two Mondays of advice, and in the third week there is no need to wait; each week is another
    daemon, which reads what the one before wrote."""
    cells: tuple[Cell, ...] = ()
    for week in range(3):
        desk = Desk(SLOW, OLD)
        desk.control = Control(SLOW, OLD, hours=cells)
        desk.now = BEFORE_HOUR + week * WEEK_SECONDS
        (first,) = desk.run(2000)
        if week == 2:
            assert first == Use(choice=NEW)
            return
        assert isinstance(first, StartReplay)
        desk.advise(replace(advice(), observed=0.5))
        cells = desk.control.learned() or ()
        assert desk.control.learned() is None
        remembered = {one.choice.use: one for one in desk.control.report(desk.moment).hour}
        assert remembered[NEW.use].wins == week + 1
        assert remembered[OLD.use].kept == pytest.approx(0.5)


def test_what_changed_is_reported_for_long() -> None:
    """Also after a day of replays that changed nothing; the newest is last."""
    desk = desk_before_an_hour(weeks=0)
    desk.applied()
    desk.run(80)
    for _ in range(50):
        desk.until_replay()
        desk.advise(advice(chosen=None, current=NEW))
    steps = [note.what for note in desk.control.report(desk.moment).notes]
    assert steps[:2] == [AutopilotStep.APPLIED, AutopilotStep.CONFIRMED]
    assert steps[2:] == [AutopilotStep.KEPT] * MOST_NOTES


STEPS = st.lists(
    st.sampled_from(["tick", "hour", "advise", "fail", "used", "operator", "configure"]),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_memory_gives_no_more_rights(steps: list[str]) -> None:
    """In any order of events, with a winner in every hour of the week: nothing is changed while
    an operator's choice holds, nor while a change or a replay is under way, and no hour has more
    replays than its CPU time allows."""
    seasons = Seasons()
    now = int(UNIX // 3600)
    for hour in range(now - 2 * 168, now):
        seasons.compared(hour, NEW, 0.3, 0.05)
    desk = Desk(replace(TERMS, interval_seconds=100.0, watch_seconds=10.0))
    desk.control = Control(desk.control.terms, OLD, hours=seasons.table())
    wanted: PolicyChoice | None = None
    held = running = False
    begun: list[float] = []
    for step in steps:
        done: list[Action] = []
        match step:
            case "tick":
                done = desk.run(30)
            case "hour":
                desk.now += 3600 - (UNIX + desk.now) % 3600 - 30
                done = desk.run(31)
            case "advise":
                running, done = False, desk.advise(advice(current=desk.active))
            case "fail":
                running, wanted = False, None
                done = desk.do(desk.control.failed(desk.moment, "it failed"))
            case "used" if wanted is not None and desk.control.may_change:
                desk.use(wanted)
                wanted = None
            case "operator":
                held, wanted, desk.active = True, None, PolicyChoice(use=("mine",))
                done = desk.do(desk.control.operator_chose(desk.moment))
            case "configure":
                held, running, wanted, desk.active = False, False, None, OLD
                done = desk.do(desk.control.configure(desk.moment, desk.control.terms, OLD))
        for action in done:
            if isinstance(action, StartReplay):
                assert not running
                assert wanted is None
                running = True
                begun.append(desk.now)
            elif isinstance(action, EndReplay):
                running = False
            elif isinstance(action, Use):
                assert not held
                assert not running
                assert wanted is None
                wanted = action.choice
    for end in begun:
        assert 20 * sum(end - 3600 < at <= end for at in begun) <= 360


@pytest.mark.parametrize(("month", "utc_hour"), [(2, 8), (7, 7)])
def test_hours_are_those_of_local_clocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, month: int, utc_hour: int
) -> None:
    """Nine o'clock in winter and in summer, where clocks are set forward between."""
    monday = next(day for day in range(1, 8) if datetime(2026, month, day).weekday() == 0)
    unix = datetime(2026, month, monday, utc_hour, 30, tzinfo=UTC).timestamp()
    cell = Cell(number=9, choices=(Remembered(choice=NEW, hour=int(unix // 3600), wins=1,
                gain=Mean(value=0.3, weight=1.0)),))  # fmt: skip
    write_seasons(seasons_path(str(tmp_path / "journal")), (cell,), OLD)
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        pilot = AutopilotRunner(
            OLD, NoDecisions(), lambda: Seen(active=OLD, promises=Promises()), EventLog(),
            clock=lambda: 0.0, unix_clock=lambda: unix,
        )  # fmt: skip
        journal = str(tmp_path / "journal")
        pilot.configure(AutopilotTerms(mode=AutopilotMode.PROPOSE, journal=journal), OLD)
        assert [one.choice for one in pilot.report().hour] == [NEW]
    finally:
        monkeypatch.undo()
        time.tzset()


class NoDecisions:
    """Policies that are not changed."""

    async def set_policy_if(self, still: Callable[[], bool], choice: PolicyChoice) -> bool:
        raise AssertionError("it only looks")

    def flush_journal(self) -> None:
        raise AssertionError("it only looks")


def test_a_policy_that_fails_wins_no_more() -> None:
    desk = desk_before_an_hour(weeks=5)
    assert desk.run(200) == [Use(choice=NEW)]
    desk.use(NEW)
    desk.ailing = "new"
    desk.run(1)
    (remembered,) = Seasons(desk.control.learned() or ()).report(desk.moment.hour())
    assert remembered.wins == 0
