"""The autopilot's decisions: what it applies, takes back, leaves alone, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.daemon.autopilot.budget import CpuBudget
from appliance.daemon.autopilot.control import (
    BARRED_SECONDS,
    FIRST_SHARE,
    PATIENCE,
    START_CPU_SECONDS,
    Action,
    Bar,
    Control,
    EndReplay,
    Moment,
    Seen,
    StartReplay,
    Use,
)
from appliance.service.autopilot import (
    AutopilotMode,
    AutopilotNote,
    AutopilotStep,
    AutopilotTerms,
    Barred,
    Promises,
    Recommendation,
)
from appliance.service.policy_report import PolicyChoice

OLD, NEW = PolicyChoice(use=("old",)), PolicyChoice(use=("new",))
TERMS = AutopilotTerms(
    mode=AutopilotMode.APPLY,
    interval_seconds=100.0,
    cpu_seconds=5.0,
    watch_seconds=60.0,
    journal="journal",
)
UNIX = 1.7e9


class Desk:
    """A control with a daemon around it: time goes on, requests end, and some are late."""

    def __init__(
        self,
        terms: AutopilotTerms = TERMS,
        configured: PolicyChoice = OLD,
        barred: tuple[Barred, ...] = (),
    ) -> None:
        self.control = Control(terms, configured, barred)
        self.now = 0.0
        self.active = configured
        self.promises = Promises()
        self.share: Mapping[tuple[str, ...], float] = {("old",): 0.5, ("new",): 0.9}
        """In time, by who decides."""
        self.unanswered_per_second = 0
        self.ailing = ""
        self.journaled = True
        self.actions: list[Action] = []
        """All so far, but notes."""
        self.notes: list[AutopilotNote] = []

    @property
    def moment(self) -> Moment:
        return Moment(seconds=self.now, unix_seconds=UNIX + self.now)

    @property
    def seen(self) -> Seen:
        return Seen(
            active=self.active,
            promises=self.promises,
            ailing=self.ailing,
            journaled=self.journaled,
        )

    def do(self, actions: list[Action]) -> list[Action]:
        notes = [one for one in actions if isinstance(one, AutopilotNote)]
        others = [one for one in actions if not isinstance(one, AutopilotNote)]
        self.notes += notes
        self.actions += others
        return others

    def run(self, seconds: float, requests_per_second: int = 10) -> list[Action]:
        """A tick each second; what is to be done at its first action, or nothing."""
        for _ in range(round(seconds)):
            self.now += 1.0
            n = requests_per_second
            missed = round(n * (1 - self.share.get(self.active.use, 0.5)))
            self.promises = Promises(
                tokens=self.promises.tokens + 10 * n,
                late=self.promises.late + 10 * missed,
                requests=self.promises.requests + n,
                missed=self.promises.missed + missed,
                unanswered=self.promises.unanswered + self.unanswered_per_second,
            )
            if done := self.do(self.control.tick(self.moment, self.seen)):
                return done
        return []

    def advise(self, found: Recommendation) -> list[Action]:
        return self.do(self.control.advised(self.moment, self.seen, found))

    def use(self, choice: PolicyChoice) -> None:
        """What it asked for decides now."""
        self.active = choice
        self.do(self.control.used(self.moment, self.seen))

    def until_replay(self) -> None:
        (begun,) = self.run(2 * self.control.terms.interval_seconds)
        assert isinstance(begun, StartReplay)

    def applied(self) -> None:
        """It has replayed, and its advice decides."""
        self.until_replay()
        assert self.advise(advice()) == [Use(choice=NEW)]
        self.use(NEW)

    @property
    def steps(self) -> list[AutopilotStep]:
        return [note.what for note in self.notes]


def advice(chosen: PolicyChoice | None = NEW, current: PolicyChoice = OLD) -> Recommendation:
    return Recommendation(
        current=current,
        chosen=chosen,
        name="new",
        gain=0.3,
        error=0.05,
        reason="it is ahead.",
        observed=0.5,
        requests=100,
        seconds=60.0,
        cpu_seconds=10.0,
    )


# --- applying and going back ---------------------------------------------------------------------


def test_what_wins_is_applied_and_stays() -> None:
    """After an interval it replays; the winner decides, and stays as it keeps more in truth."""
    desk = Desk()
    desk.applied()
    assert desk.now == 101.0
    assert desk.run(80) == []
    assert desk.steps == [AutopilotStep.APPLIED, AutopilotStep.CONFIRMED]
    applied, confirmed = desk.notes
    assert (applied.choice, applied.gain, applied.error) == (NEW, 0.3, 0.05)
    assert applied.before == pytest.approx(0.5)
    assert confirmed.after == pytest.approx(0.9)
    assert confirmed.unix_seconds == UNIX + 101 + 60


def test_bad_advice_is_rolled_back_and_not_applied_for_a_day() -> None:
    """Also after a restart. What is remembered is written before the change back is asked for."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.7}
    desk.applied()
    bar, back = desk.run(100)
    assert desk.now == 101 + FIRST_SHARE * 60
    assert isinstance(bar, Bar)
    assert back == Use(choice=OLD)
    desk.use(OLD)
    assert desk.steps == [AutopilotStep.APPLIED, AutopilotStep.ROLLED_BACK]
    assert desk.notes[-1].before == pytest.approx(0.8)
    assert desk.notes[-1].after == pytest.approx(0.7)
    assert "which is worse by more than 5.0%" in desk.notes[-1].reason

    later = Desk(barred=bar.barred)
    later.now = 200.0
    later.until_replay()
    assert later.advise(advice()) == []
    assert later.steps == [AutopilotStep.PROPOSED]
    assert "was rolled back" in later.notes[-1].reason
    later.now += BARRED_SECONDS
    later.until_replay()
    later.run(10)
    assert later.advise(advice()) == [Use(choice=NEW)]


def test_a_loss_that_is_not_clear_waits_for_the_whole_watch() -> None:
    """Early on a loss has to be of three standard errors, as it is looked for at every tick; of two
    once the watch is over. Of 600 requests 4.5 points are between these."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.8}
    desk.until_replay()
    assert desk.advise(replace(advice(), error=0.01)) == [Use(choice=NEW)]
    desk.use(NEW)
    assert desk.run(58) == []
    missed = 27
    desk.promises = replace(
        desk.promises,
        late=desk.promises.late + 10 * missed,
        missed=desk.promises.missed + missed,
    )
    assert desk.run(1) == []
    assert desk.run(1)[1:] == [Use(choice=OLD)]
    assert desk.now == 101 + 60


def test_a_loss_is_taken_back_as_soon_as_it_is_clear() -> None:
    """In the second half of the watch, at the next tick."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.8}
    desk.applied()
    assert desk.run(40) == []
    desk.share = {("old",): 0.8, ("new",): 0.0}
    assert desk.run(20)[1:] == [Use(choice=OLD)]
    assert 101 + 40 < desk.now < 101 + 50


def test_nothing_is_judged_in_the_first_half_of_the_watch() -> None:
    """What a change itself costs, as weights that have to be loaded, comes at its begin."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.0}
    desk.applied()
    assert desk.run(FIRST_SHARE * 60 - 1) == []
    desk.share = {("old",): 0.8, ("new",): 1.0}
    desk.promises = replace(desk.promises, late=0, missed=0)
    assert desk.run(32) == []
    assert desk.steps[-1] is AutopilotStep.CONFIRMED


def test_a_little_less_is_no_reason_to_go_back() -> None:
    """By less than the error: what is measured varies, too."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.8}
    desk.applied()
    desk.promises = replace(desk.promises, missed=desk.promises.missed + 20)
    assert desk.run(80) == []
    assert desk.steps[-1] is AutopilotStep.CONFIRMED


def test_few_requests_are_worse_only_by_more_than_chance() -> None:
    """The lab is sure to 5 points, and 60 requests in which 10 points fewer are kept may be chance,
    and 600 may not."""
    few, many = Desk(), Desk()
    for desk, each in ((few, 10), (many, 100)):
        desk.share = {("old",): 0.8, ("new",): 0.7}
        desk.control = Control(replace(TERMS, watch_seconds=6.0), OLD)
        desk.run(94, each)
        begun = desk.run(7, each)
        assert isinstance(begun[0], StartReplay)
        desk.advise(advice())
        desk.use(NEW)
    assert few.run(7, 10) == []
    assert few.steps[-1] is AutopilotStep.CONFIRMED
    assert len(many.run(7, 100)) == 2
    many.use(OLD)
    assert many.steps[-1] is AutopilotStep.ROLLED_BACK


@pytest.mark.parametrize(("a_minute", "watches"), [(0, FIRST_SHARE), (1, 4)])
def test_policies_that_answer_next_to_nothing_are_rolled_back(
    a_minute: int, watches: float
) -> None:
    """There is no share to judge them by; after half of a watch without any answer, or after
    four."""
    desk = Desk()
    desk.applied()
    desk.unanswered_per_second = 1
    done: list[Action] = []
    for _ in range(4):
        assert done == []
        assert desk.run(1, a_minute) == []
        done = desk.run(59, 0)
        if done:
            break
    assert desk.now == 101 + 60 * watches
    assert done[1:] == [Use(choice=OLD)]
    desk.use(OLD)
    assert "had no answer in time, or were refused" in desk.notes[-1].reason


def going_back() -> Desk:
    """A change back is under way."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.1}
    desk.applied()
    assert desk.run(60)[1:] == [Use(choice=OLD)]
    return desk


def test_a_change_back_that_fails_is_tried_again() -> None:
    """After twice the time each, up to five minutes, until it comes about; and each is an event. It
    begins no replay meanwhile, and may change nothing while it waits."""
    desk, pauses = going_back(), []
    for _ in range(9):
        desk.do(desk.control.failed(desk.moment, "no memory"))
        assert not desk.control.may_change
        assert desk.notes[-1].what is AutopilotStep.FAILED
        assert desk.notes[-1].choice == OLD
        began = desk.now
        assert desk.run(400) == [Use(choice=OLD)]
        assert desk.control.may_change
        pauses.append(desk.now - began)
        assert f"no memory; it is tried again in {pauses[-1]:g} s" in desk.notes[-1].reason
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    desk.use(OLD)
    assert desk.steps[-1] is AutopilotStep.ROLLED_BACK
    assert desk.notes[-1].after == pytest.approx(0.1)
    desk.until_replay()


@pytest.mark.parametrize("by", ["operator", "reload", "others"])
def test_a_change_back_is_not_tried_again_if_others_decide(by: str) -> None:
    desk = going_back()
    desk.do(desk.control.failed(desk.moment, "no memory"))
    desk.active = PolicyChoice(use=("mine",))
    if by == "operator":
        desk.do(desk.control.operator_chose(desk.moment))
    elif by == "reload":
        desk.do(desk.control.configure(desk.moment, TERMS, desk.active))
    desk.run(50)
    assert desk.control.report(desk.moment).phase in ("waiting", "replaying")
    assert all(isinstance(one, StartReplay) for one in desk.actions[4:])
    if by != "reload":
        assert desk.steps[-1] is AutopilotStep.LEFT


def test_a_change_back_that_an_operator_prevents_is_not_tried_again() -> None:
    """It failed as the operator came first."""
    desk = going_back()
    desk.do(desk.control.operator_chose(desk.moment))
    desk.do(desk.control.failed(desk.moment, "an operator chose policies meanwhile"))
    assert desk.control.report(desk.moment).phase == "waiting"


def test_policies_that_fail_are_rolled_back_at_once() -> None:
    """Those that are not asked any more: the built-in decides instead."""
    desk = Desk()
    desk.applied()
    desk.ailing = "new"
    _, back = desk.run(1)
    assert back == Use(choice=OLD)
    desk.use(OLD)
    assert desk.notes[-1].reason == "policy new failed too often"


def test_a_watch_ends_though_little_was_served() -> None:
    """It waits for requests four times as long, then keeps what it has no reason to take back."""
    desk = Desk()
    desk.share = {("old",): 0.8, ("new",): 0.0}
    desk.applied()
    assert desk.run(239, requests_per_second=0) == []
    assert desk.steps == [AutopilotStep.APPLIED]
    desk.run(1, requests_per_second=0)
    assert desk.steps == [AutopilotStep.APPLIED, AutopilotStep.CONFIRMED]


def test_a_change_that_fails_is_an_event() -> None:
    """Forward or back; it goes on as before."""
    desk = Desk()
    desk.until_replay()
    desk.advise(advice())
    desk.do(desk.control.failed(desk.moment, "not installed any more"))
    assert desk.steps == [AutopilotStep.FAILED]
    assert desk.notes[-1].choice == NEW
    desk.until_replay()


# --- what is only proposed -----------------------------------------------------------------------


def test_it_proposes_where_it_may_not_apply() -> None:
    desk = Desk(replace(TERMS, mode=AutopilotMode.PROPOSE))
    desk.until_replay()
    assert desk.advise(advice()) == []
    assert desk.steps == [AutopilotStep.PROPOSED]
    assert desk.notes[-1].choice == NEW


def test_it_does_nothing_while_it_is_off() -> None:
    assert Desk(replace(TERMS, mode=AutopilotMode.OFF)).run(1000) == []


@pytest.mark.parametrize("before_replay", [True, False])
def test_an_operator_s_choice_is_kept(before_replay: bool) -> None:
    """It only proposes, until the configuration is read again."""
    desk = Desk()
    mine = PolicyChoice(use=("mine",))
    if before_replay:
        desk.active = mine
        desk.do(desk.control.operator_chose(desk.moment))
        desk.until_replay()
    else:
        desk.until_replay()
        desk.active = mine
        desk.do(desk.control.operator_chose(desk.moment))
        assert desk.advise(advice()) == []  # it is about the policies before
        assert desk.steps.pop() is AutopilotStep.KEPT
        desk.until_replay()
    assert desk.advise(advice(current=mine)) == []
    assert desk.steps[-1] is AutopilotStep.PROPOSED
    assert "an operator chose" in desk.notes[-1].reason
    assert desk.control.report(desk.moment).held

    desk.active = OLD
    desk.do(desk.control.configure(desk.moment, TERMS, OLD))
    assert not desk.control.report(desk.moment).held
    desk.until_replay()
    assert desk.advise(advice()) == [Use(choice=NEW)]


def test_an_operator_who_chooses_while_it_changes_or_watches() -> None:
    """The change is not made any more; what was applied is not rolled back any more."""
    desk = Desk()
    desk.until_replay()
    desk.advise(advice())
    assert desk.control.may_change
    desk.do(desk.control.operator_chose(desk.moment))
    assert not desk.control.may_change

    other = Desk()
    other.share = {("old",): 0.8, ("new",): 0.1}
    other.applied()
    other.do(other.control.operator_chose(other.moment))
    assert other.steps[-1] is AutopilotStep.LEFT
    other.run(1000)
    assert all(isinstance(one, StartReplay) for one in other.actions[2:])


@pytest.mark.parametrize(
    ("configured", "chosen", "named"),
    [
        ({"parameters": {"old": {"x": 1}}}, {"parameters": {"old": {"x": 2}}}, "policy.old.x"),
        ({"parameters": {"old": {"x": 1}}}, {"parameters": {"old": {"y": 2}}}, "policy.old.x"),
        ({"decisions": {"round": "r"}}, {}, "policy.round"),
        ({}, {"decisions": {"round": "r"}}, "policy.round"),
        ({"decisions": {"round": "r"}}, {"decisions": {"round": "s"}}, "policy.round"),
    ],
)
def test_what_the_configuration_sets_by_hand_is_not_changed(
    configured: dict, chosen: dict, named: str
) -> None:
    """Parameters, and who makes one decision."""
    old = PolicyChoice(use=("old",), **configured)
    desk = Desk(configured=old)
    desk.until_replay()
    assert desk.advise(advice(PolicyChoice(use=("old",), **chosen), old)) == []
    assert desk.steps == [AutopilotStep.PROPOSED]
    assert f"sets by hand: {named}" in desk.notes[-1].reason


def test_parameters_set_by_hand_come_along() -> None:
    """Those of policies that do not decide now are there when they are tried again."""
    old = PolicyChoice(use=("old",), parameters={"old": {"x": 1}})
    desk = Desk(configured=old)
    desk.until_replay()
    assert desk.advise(advice(current=old)) == [Use(choice=replace(NEW, parameters=old.parameters))]


def test_nothing_is_charged_before_there_is_a_request() -> None:
    """However long the daemon takes to start; the first replay begins as soon as there is one."""
    desk = Desk()
    assert desk.run(5000, requests_per_second=0) == []
    assert desk.control.report(desk.moment).cpu_seconds == 0
    (begun,) = desk.run(1, requests_per_second=1)
    assert isinstance(begun, StartReplay)


def test_nothing_is_applied_that_could_not_be_watched() -> None:
    """Without requests before, nobody could say that it is worse."""
    desk = Desk()
    desk.run(99, requests_per_second=0)
    desk.run(2, requests_per_second=1)
    assert desk.advise(advice()) == []
    assert "fewer than 20 requests" in desk.notes[-1].reason


@pytest.mark.parametrize("gain", [None, 0.05, 0.01])
def test_what_does_not_win_by_more_than_the_error_is_not_applied(gain: float | None) -> None:
    desk = Desk()
    desk.until_replay()
    assert desk.advise(replace(advice(), gain=gain)) == []
    assert desk.steps == [AutopilotStep.KEPT]


# --- parameters ----------------------------------------------------------------------------------

TUNED = PolicyChoice(use=("old",), parameters={"old": {"x": 1}})


def test_changed_parameters_have_to_win_twice() -> None:
    """In two replays in a row, the second of which tries them first: one window may be of a load
    that changes. Other policies as they ship need one."""
    desk = Desk()
    desk.until_replay()
    assert desk.advise(advice(TUNED)) == []
    assert desk.steps == [AutopilotStep.PROPOSED]
    assert "the next replay" in desk.notes[-1].reason
    (begun,) = desk.run(200)
    assert isinstance(begun, StartReplay)
    assert begun.also == (TUNED,)
    assert desk.advise(advice(TUNED)) == [Use(choice=TUNED)]
    desk.use(TUNED)
    assert desk.steps == [AutopilotStep.PROPOSED, AutopilotStep.APPLIED]


@pytest.mark.parametrize("between", ["other", "none", "failed", "hung", "configured"])
def test_wins_of_parameters_are_in_a_row(between: str) -> None:
    """What another replay does not say is as if it had never been said."""
    desk = Desk()
    desk.until_replay()
    desk.advise(advice(TUNED))
    desk.until_replay()
    match between:
        case "other":
            assert desk.advise(advice(replace(TUNED, parameters={"old": {"x": 2}}))) == []
        case "none":
            assert desk.advise(advice(None)) == []
        case "failed":
            assert desk.do(desk.control.failed(desk.moment, "too few requests")) == []
        case "hung":
            assert desk.run(1 + PATIENCE * (15 + START_CPU_SECONDS)) == [EndReplay()]
        case "configured":
            desk.do(desk.control.configure(desk.moment, desk.control.terms, OLD))
    desk.until_replay()
    assert desk.advise(advice(TUNED)) == []


def test_parameters_of_the_configuration_are_not_changed_ones() -> None:
    """A policy with what the file sets for it is as the operator wants it."""
    configured = PolicyChoice(use=("old",), parameters={"new": {"x": 1}})
    desk = Desk(configured=configured)
    desk.until_replay()
    target = replace(NEW, parameters=configured.parameters)
    assert desk.advise(advice(target, configured)) == [Use(choice=target)]


def test_the_way_back_needs_one_replay_and_no_gain() -> None:
    """While parameters are changed, each replay tries first to be without them. It does not go
    back for less."""
    desk = Desk()
    for _ in range(2):
        desk.until_replay()
        desk.advise(advice(TUNED))
    desk.use(TUNED)
    for gain, wanted in ((-0.01, []), (0.0, [Use(choice=OLD)])):
        begun = desk.run(400)[0]
        assert isinstance(begun, StartReplay)
        assert begun.also == (OLD,)
        found = replace(advice(OLD, TUNED), gain=gain)
        assert desk.advise(found) == wanted


def test_fewer_parameters_are_the_same_policies() -> None:
    """And the values of those that are left; tables of other policies change nothing."""
    both = PolicyChoice(use=("old",), parameters={"old": {"x": 1, "y": 2}, "gone": {"z": 1}})
    assert TUNED.is_simpler_than(both)
    assert OLD.is_simpler_than(both)
    assert not both.is_simpler_than(both)
    assert not both.is_simpler_than(TUNED)
    assert not NEW.is_simpler_than(both)
    assert not replace(TUNED, parameters={"old": {"x": 2}}).is_simpler_than(both)
    assert not replace(TUNED, decisions={"round": "old"}).is_simpler_than(both)


# --- replays -------------------------------------------------------------------------------------


def test_a_replay_that_hangs_is_ended() -> None:
    """It may take long at the lowest priority, but not forever; what it says then is not heard."""
    desk = Desk()
    desk.until_replay()
    limit = PATIENCE * (TERMS.cpu_seconds + START_CPU_SECONDS)
    assert desk.run(limit) == []
    assert desk.run(1) == [EndReplay()]
    assert desk.steps == [AutopilotStep.FAILED]
    assert "had no answer after 201 s" in desk.notes[-1].reason
    assert desk.advise(advice()) == []
    assert desk.steps == [AutopilotStep.FAILED]
    desk.until_replay()


def test_a_replay_that_fails_is_an_event() -> None:
    desk = Desk()
    desk.until_replay()
    desk.do(desk.control.failed(desk.moment, "too few requests"))
    assert (desk.steps, desk.notes[-1].reason) == ([AutopilotStep.FAILED], "too few requests")
    desk.until_replay()


def test_without_a_journal_nothing_is_replayed() -> None:
    """It had its largest size, say."""
    desk = Desk()
    desk.journaled = False
    assert desk.run(250) == []
    assert desk.steps == [AutopilotStep.FAILED] * 2
    assert "journal.max_size" in desk.notes[-1].reason


def test_a_new_configuration_ends_a_replay_and_a_watch() -> None:
    desk = Desk()
    desk.until_replay()
    assert desk.do(desk.control.configure(desk.moment, TERMS, OLD)) == [EndReplay()]
    desk.applied()
    assert desk.do(desk.control.configure(desk.moment, TERMS, NEW)) == []
    assert desk.control.report(desk.moment).phase == "waiting"


# --- the budget ----------------------------------------------------------------------------------

REPLAYS = st.lists(
    st.tuples(st.floats(0, 2000), st.floats(0.1, 400), st.floats(0, 2000), st.floats(0, 1)),
    max_size=40,
)


@given(REPLAYS)
def test_no_hour_has_more_than_the_budget(replays: list[tuple[float, float, float, float]]) -> None:
    """Whatever is asked for, however long a replay lasts, and whenever in it the time is spent, up
    to all of it at one moment: any hour, not only full ones."""
    budget = CpuBudget(360.0)
    now, spent = 0.0, []
    for pause, seconds, lasts, when in replays:
        now += pause
        if budget.charge(now, seconds):
            spent.append((now + when * lasts, seconds))
            now += lasts
            budget.ended(now)
    for end, _ in spent:
        assert sum(seconds for at, seconds in spent if end - 3600 < at <= end) <= 360 + 1e-6
        assert sum(seconds for at, seconds in spent if end <= at < end + 3600) <= 360 + 1e-6


def test_a_replay_that_lasts_is_charged_when_it_ends() -> None:
    """Each of these computes at its very end; from the begin on, an hour would have two more."""
    budget = CpuBudget(60.0)
    assert budget.charge(0.0, 30.0)
    budget.ended(600.0)
    assert budget.charge(600.0, 30.0)
    budget.ended(700.0)
    assert not budget.charge(3650.0, 30.0)
    assert budget.charged(4199.0) == 60.0
    assert budget.charge(4200.0, 30.0)
    budget.ended(4300.0)
    assert budget.charged(4300.0) == 30.0


@pytest.mark.parametrize("end", ["answer", "failure", "hang", "reload"])
def test_every_end_of_a_replay_is_dated(end: str) -> None:
    """Whatever it is: until an hour after it the charge holds, and not longer."""
    desk = Desk(replace(TERMS, mode=AutopilotMode.PROPOSE))
    desk.until_replay()
    desk.now += 300.0
    if end == "answer":
        desk.advise(advice(chosen=None))
    elif end == "failure":
        desk.do(desk.control.failed(desk.moment, "it failed"))
    elif end == "hang":
        desk.now += 300.0
        assert desk.run(1) == [EndReplay()]
    else:
        desk.do(desk.control.configure(desk.moment, TERMS, OLD))
    ended = desk.now
    desk.now = ended + 3599.0
    assert desk.control.report(desk.moment).cpu_seconds == 10.0
    desk.now = ended + 3600.0
    assert desk.control.report(desk.moment).cpu_seconds == 0.0


def test_a_replay_waits_until_a_tenth_of_the_time_is_as_much_as_it_may_take() -> None:
    """From the first moment, or the begin of the one before, on; and until the hour has as much
    left, however soon each ends."""
    desk = Desk(replace(TERMS, interval_seconds=10.0, cpu_seconds=95.0))
    begun: list[float] = []
    for _ in range(4):
        while not desk.run(1):
            pass
        begun.append(desk.now)
        desk.now += 20.0
        desk.do(desk.control.failed(desk.moment, "it failed"))
    assert begun == [1001.0, 2001.0, 3001.0, 1001.0 + 20.0 + 3600.0]


def test_other_terms_do_not_shorten_the_wait() -> None:
    desk = Desk()
    desk.control.configure(desk.moment, replace(TERMS, cpu_seconds=15.0), OLD)
    assert desk.run(150) == []
    desk.control.configure(desk.moment, replace(TERMS, interval_seconds=10.0), OLD)
    (begun,) = desk.run(11)
    assert begun == StartReplay(cpu_seconds=TERMS.cpu_seconds, hard_cpu_seconds=10.0)
    desk.do(desk.control.failed(desk.moment, "it failed"))
    assert desk.run(99) == []


def test_whole_seconds_are_charged() -> None:
    """The kernel's limit has whole seconds: what the process may take is what is charged."""
    desk = Desk(replace(TERMS, cpu_seconds=4.3))
    (begun,) = desk.run(101)
    assert begun == StartReplay(cpu_seconds=4.3, hard_cpu_seconds=10.0)
    assert desk.control.report(desk.moment).cpu_seconds == 10.0


@pytest.mark.parametrize("seconds", [1e-9, 1.0, 100.0, 1e6])
def test_it_never_ticks_in_a_frenzy(seconds: float) -> None:
    terms = replace(TERMS, interval_seconds=seconds, watch_seconds=seconds)
    assert 0.1 <= Control(terms, OLD).tick_seconds <= 5.0


STEPS = st.lists(
    st.sampled_from(["tick", "advise", "fail", "used", "operator", "configure"]), max_size=120
)


@given(STEPS, st.integers(0, 60))
def test_whatever_happens_it_stays_within_its_rights(steps: list[str], pause: int) -> None:
    """In any order of events: one replay at a time and no more CPU time than a tenth of a core,
    over any hour and since it began, and no change while an operator's choice holds."""
    desk = Desk(replace(TERMS, interval_seconds=10.0, watch_seconds=10.0))
    desk.share = {("old",): 0.8, ("new",): 0.2}
    replays: list[list[float]] = []
    """When each began, and when it ended at the latest."""
    wanted: PolicyChoice | None = None
    held = running = False
    for step in steps:
        done: list[Action] = []
        match step:
            case "tick":
                done = desk.run(1 + pause)
            case "advise":
                running, done = False, desk.advise(advice(current=desk.active))
            case "fail":
                running = False
                done = desk.do(desk.control.failed(desk.moment, "it failed"))
            case "used" if wanted is not None and desk.control.may_change:
                desk.use(wanted)
            case "operator":
                held, desk.active = True, PolicyChoice(use=("mine",))
                done = desk.do(desk.control.operator_chose(desk.moment))
            case "configure":
                held, running, desk.active = False, False, OLD
                done = desk.do(desk.control.configure(desk.moment, desk.control.terms, OLD))
        for action in done:
            if isinstance(action, StartReplay):
                assert not running
                running = True
                replays.append([desk.now, math.inf])
            elif isinstance(action, EndReplay):
                running = False
            elif isinstance(action, Use):
                assert not held
                wanted = action.choice
        if replays and not running:
            replays[-1][1] = min(replays[-1][1], desk.now)
    for hour, _ in replays:
        # What each of them took, it may have taken in the hour before that time.
        assert 10 * sum(hour - 3600 < end and begin <= hour for begin, end in replays) <= 360
    for count, (begin, _) in enumerate(replays, start=1):
        assert 100 * count <= begin  # a tenth of it is what so many may take
