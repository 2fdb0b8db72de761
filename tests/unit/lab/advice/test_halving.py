"""Successive halving: the better half goes on, the baseline always, and the budget is kept."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.advice.halving import BASELINE, LOST, OUT_OF_BUDGET, Halving, Rung, Trial

RUNGS = [Rung(1 / 4), Rung(1 / 2), Rung(1.0, 3)]

scores_of = st.lists(st.floats(0, 1), min_size=1, max_size=40)
rungs_of = st.lists(
    st.builds(Rung, st.sampled_from([1 / 8, 1 / 4, 1 / 2, 1.0]), st.integers(1, 3)),
    min_size=1,
    max_size=4,
).map(lambda rungs: sorted(rungs, key=lambda rung: rung.share))


def search(
    scores: list[float], rungs: list[Rung], budget: float, costs: list[float] | None = None
) -> tuple[Halving, list[Trial]]:
    """A whole search: each candidate has one score, and CPU seconds for a replay of the window."""
    halving = Halving(len(scores), rungs, budget)
    trials = []
    while (trial := halving.next()) is not None:
        trials.append(trial)
        cost = (1.0 if costs is None else costs[trial.candidate]) * rungs[trial.rung].share
        allowed = halving.allowance_seconds(trial)
        if cost > allowed:
            halving.stopped(trial, "stopped", allowed)
        else:
            halving.scored(trial, scores[trial.candidate], cost)
    return halving, trials


def test_the_better_half_goes_on() -> None:
    """Of eight others four, two and so on; each replay of a rung is made, the baseline's first. On
    the last one all are replayed once, then it and the leader in turn."""
    scores = [0.5, 0.1, 0.8, 0.3, 0.9, 0.2, 0.7, 0.4, 0.6]
    halving, trials = search(scores, RUNGS, 1000.0)
    by_rung = [[t.candidate for t in trials if t.rung == rung] for rung in range(3)]
    assert by_rung[0] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert by_rung[1] == [0, 4, 2, 6, 8]
    assert by_rung[2] == [0, 4, 2, 0, 4, 0, 4]
    assert halving.finalists() == [0, 2, 4]
    assert halving.dropped[6] == (1, LOST)
    assert halving.dropped[1] == (0, LOST)
    assert halving.reached(6) == 1
    assert halving.spent_seconds == 9 / 4 + 5 / 2 + 7


@given(scores_of, rungs_of)
def test_the_best_wins_if_there_is_time(scores: list[float], rungs: list[Rung]) -> None:
    """With scores that are the same in replays of any length, the best is a finalist, every trial
    is made once, and the last rung has half of half of ... the others."""
    halving, trials = search(scores, rungs, 1e9)
    others = scores[1:]
    assert len(set(trials)) == len(trials)
    assert BASELINE in halving.finalists()
    assert not any(reason == OUT_OF_BUDGET for _, reason in halving.dropped.values())
    left = len(others)
    for _ in rungs[1:]:
        left = -(-left // 2)
    assert len(halving.finalists()) == 1 + left
    if others:
        best = max(scores[number] for number in halving.finalists() if number != BASELINE)
        assert best == max(others)


@given(
    scores_of.flatmap(
        lambda scores: st.tuples(
            st.just(scores),
            st.lists(st.floats(0.01, 50), min_size=len(scores), max_size=len(scores)),
        )
    ),
    rungs_of,
    st.floats(0.001, 200),
)
def test_no_more_is_spent_than_there_is(
    given_: tuple[list[float], list[float]], rungs: list[Rung], budget: float
) -> None:
    """Whatever replays cost, if those are stopped that take more than they may; the search ends,
    a finalist was replayed once at least, and the baseline not less often than any."""
    scores, costs = given_
    halving, trials = search(scores, rungs, budget, costs)
    assert halving.spent_seconds <= budget * (1 + 1e-9)
    assert halving.next() is None
    made = Counter(trial.candidate for trial in trials if trial.rung == len(rungs) - 1)
    for number in halving.finalists():
        assert 1 <= made[number] <= made[BASELINE] <= rungs[-1].replays
    for number in range(len(scores)):
        assert (number in halving.finalists()) != (number in halving.dropped) or (
            BASELINE in halving.dropped
        )


def test_a_small_budget_is_for_the_first_candidates() -> None:
    """Each rung has its part of the budget: so some get to the end, though most are not tried."""
    halving, trials = search([0.1, *[0.2] * 40], RUNGS, 12.0)
    tried = {trial.candidate for trial in trials}
    assert tried == set(range(len(tried)))
    assert 5 < len(tried) < 40
    assert halving.dropped[40] == (0, OUT_OF_BUDGET)
    assert len(halving.finalists()) > 1


def test_one_replay_of_the_last_rung_is_better_than_none() -> None:
    """If the budget does not suffice for three of the baseline and the best, there are fewer."""
    rungs = [Rung(1 / 4), Rung(1.0, 3)]
    for budget, replays in ((7.0, 3), (5.5, 2), (3.5, 1)):
        halving, trials = search([0.1, 0.2], rungs, budget)
        assert halving.finalists() == [0, 1]
        assert [t for t in trials if t.rung == 1] == [
            Trial(candidate, 1, replay) for replay in range(replays) for candidate in (0, 1)
        ]


@pytest.mark.parametrize("candidates", [2, 5, 13, 60])
@pytest.mark.parametrize("budget", [4.75, 5.0, 5.3, 6.0, 7.0])
def test_what_is_kept_for_the_last_rung_is_used_there(candidates: int, budget: float) -> None:
    """If the best has no budget on a rung before, it is compared on the last one all the same."""
    rungs = [Rung(share, warmup=1 / 8) for share in (1 / 8, 1 / 4, 1 / 2)]
    rungs.append(Rung(1.0, 3, 1 / 8))
    halving = Halving(candidates, rungs, budget)
    while (trial := halving.next()) is not None:
        halving.scored(trial, 0.5 + 0.01 * trial.candidate, rungs[trial.rung].length)
    assert len(halving.finalists()) > 1
    assert halving.spent_seconds <= budget


@pytest.mark.parametrize(
    ("budget", "last", "replays"),
    [(7.0, (2.5, 2.5), 1), (6.6, (1.4, 1.0), 2), (9.0, (1.4, 1.0), 3)],
)
def test_long_replays_may_be_dearer_than_short_ones_say(
    budget: float, last: tuple[float, float], replays: int
) -> None:
    """How many pairs there are is decided by what the last one did cost."""
    halving, made = Halving(2, [Rung(1 / 4), Rung(1.0, 3)], budget), Counter[int]()
    while (trial := halving.next()) is not None:
        made[trial.candidate] += trial.rung
        halving.scored(trial, 0.5, last[trial.candidate] if trial.rung else 0.25)
    assert halving.finalists() == [0, 1]
    assert made == {0: replays, 1: replays}
    assert halving.dropped == {}


def test_the_leader_of_whole_replays_is_replayed_again() -> None:
    """All that are left are replayed first, whichever led before."""
    halving, trials = Halving(3, [Rung(1.0, 2)], 100.0), []
    while (trial := halving.next()) is not None:
        trials.append(trial)
        halving.scored(trial, [0.5, 0.6, 0.7][trial.candidate], 1.0)
    assert trials == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("late", [0, 1])
def test_a_later_pair_that_takes_too_long_leaves_those_before(late: int) -> None:
    """Whether the baseline's replay is stopped or the leader's."""
    halving = Halving(2, [Rung(1.0, 3)], 5.0)
    while (trial := halving.next()) is not None:
        if trial == (late, 0, 1):
            halving.stopped(trial, "stopped", halving.allowance_seconds(trial))
        else:
            halving.scored(trial, 0.5, 1.0)
    assert halving.finalists() == [0, 1]
    assert halving.next() is None
    assert halving.dropped == {}


def test_the_baseline_alone_is_replayed_once() -> None:
    """Without another to compare, more replays say nothing."""
    rungs = [Rung(1 / 4), Rung(1 / 2), Rung(1.0, 3)]
    halving = Halving(2, rungs, 100.0)
    trials = []
    while (trial := halving.next()) is not None:
        trials.append(trial)
        if trial.candidate == BASELINE:
            halving.scored(trial, 0.5, 1.0)
        else:
            halving.failed(trial, "it broke", 1.0)
    assert trials == [(0, 0, 0), (1, 0, 0), (0, 2, 0)]
    assert halving.finalists() == [BASELINE]


def test_a_warmup_costs_too() -> None:
    """What a replay costs goes by all that is replayed: a short one's warm-up is most of it, so it
    does not make the long ones look dearer than they are."""
    rungs = [Rung(1 / 8, warmup=7 / 8), Rung(1.0, 1)]
    halving = Halving(2, rungs, 4.5)
    while (trial := halving.next()) is not None:
        halving.scored(trial, 0.5, 1.0)
    assert halving.finalists() == [0, 1]


def test_one_that_costs_too_much_does_not_take_the_others_time() -> None:
    """It is stopped when the rung's part is used up, and its failure is kept."""
    costs = [1.0] * 9
    costs[1] = 1e6
    halving, _ = search([0.5] * 9, RUNGS, 40.0, costs)
    assert halving.dropped[1] == (0, "stopped")
    assert halving.spent_seconds <= 40.0


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    """If its replay fails, or takes all the time, the search is over."""
    halving = Halving(3, RUNGS, 10.0)
    trial = halving.next()
    assert trial == (BASELINE, 0, 0)
    halving.failed(trial, "it broke", 1.0)
    assert halving.next() is None
    assert halving.dropped[BASELINE] == (0, "it broke")
    assert halving.finalists() == []


def test_no_long_replay_is_begun_that_there_is_no_budget_for() -> None:
    """Not even the baseline's."""
    halving = Halving(2, [Rung(1 / 4), Rung(1.0, 3)], 3.0)
    trial = halving.next()
    assert trial == (BASELINE, 0, 0)
    halving.scored(trial, 0.5, 2.0)
    assert halving.next() is None
    assert halving.dropped[BASELINE] == (1, OUT_OF_BUDGET)


def test_a_failure_in_the_last_replay_is_no_finalist() -> None:
    """Two of three replays are not enough."""
    halving = Halving(2, [Rung(1.0, 3)], 100.0)
    while (trial := halving.next()) is not None:
        if trial == (1, 0, 2):
            halving.failed(trial, "it broke", 1.0)
        else:
            halving.scored(trial, 0.5, 1.0)
    assert halving.finalists() == [BASELINE]
    assert halving.reached(1) is None


@pytest.mark.parametrize(("candidates", "rungs"), [(0, RUNGS), (3, [])])
def test_a_search_of_nothing(candidates: int, rungs: list[Rung]) -> None:
    """It is a mistake of the caller."""
    with pytest.raises(ValueError, match="a baseline and a rung"):
        Halving(candidates, rungs, 1.0)
