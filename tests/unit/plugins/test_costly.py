"""Where switches are costly: the model that runs goes on, then come those that soon have run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from appliance.lab.experiments.comparison import Match, played
from appliance.plugins.appliance import Appliance
from appliance.plugins.instance_work.costly import LEAST_SWITCHES, MOST_SWITCHES, CostlySwitches
from appliance.plugins.instance_work.outlook import Condition, ModelWork
from appliance.scheduling.policy_api import InstanceView
from tests.unit.plugins.policy_views import FixedCosts, batch_view, group_view, instance_view

SWITCH, LONGEST = 2.0, 30.0
NOW = 100.0
SCENARIO = Path(__file__).parents[3] / "benchmarks/scenarios/slow_links.toml"


def asked(behind: bool, gap: float = math.inf) -> Condition:
    return Condition(behind=behind, gap_seconds=gap, short=False)


def running(model: str) -> InstanceView:
    return instance_view(0, current=model)


def work(model: str, *, runs: bool = True, here: bool = False, late: bool = False) -> ModelWork:
    """Of a model to which a switch is costly."""
    return ModelWork(
        model,
        due=NOW,
        ttft_seconds=20.0,
        overdue=NOW if late else math.inf,
        prompt_seconds=0.5,
        runs=runs,
        switch_seconds=0.0 if here else SWITCH,
        costly_seconds=SWITCH,
    )


def by_model(*works: ModelWork) -> dict[str, ModelWork]:
    return {one.model: one for one in works}


@pytest.mark.parametrize("behind", [False, True])
def test_the_model_that_runs_has_its_time(behind: bool) -> None:
    """It goes on for what is left, however the instance is asked meanwhile."""
    switches, works = CostlySwitches(LONGEST), by_model(work("a", here=True), work("b"))
    most = LONGEST if behind else SWITCH * LEAST_SWITCHES

    for later in (0.0, 0.75 * most):
        turn = switches.next(NOW + later, running("a"), works, asked(behind))
        assert turn is not None
        assert (turn.work.model, turn.seconds) == ("a", most - later)


def test_its_time_is_a_part_of_the_targets() -> None:
    """Half of the strictest TTFT of those that wait; and it is no longer than other turns."""
    strict = work("b")
    strict.ttft_seconds = 4.0
    works, view = by_model(work("a", here=True), strict), running("a")

    for limit, behind, expected in ((LONGEST, False, 2.0), (9.0, True, 9.0), (99.0, True, 40.0)):
        turn = CostlySwitches(limit).next(NOW, view, works, asked(behind))
        assert turn is not None
        assert turn.seconds == expected
    assert MOST_SWITCHES * SWITCH == 40.0


@pytest.mark.parametrize("behind", [False, True])
def test_other_rules_decide(behind: bool) -> None:
    """Where it has nothing to choose, where all weights are there, and where a gap is to be
    kept."""
    a, b = work("a", here=True), work("b")
    one, there = by_model(a, work("b", runs=False)), by_model(a, work("b", here=True))
    for works, gap in ((one, math.inf), (there, math.inf), (by_model(a, b), 2.0)):
        found = CostlySwitches(LONGEST).next(NOW, running("a"), works, asked(behind, gap))
        assert found is None


def test_its_time_begins_anew_with_another_model() -> None:
    switches, works = CostlySwitches(LONGEST), by_model(work("a", here=True), work("b"))
    switches.next(NOW, running("a"), works, asked(True))
    switches.next(NOW + 5.0, running("b"), works, asked(True))

    turn = switches.next(NOW + 9.0, running("a"), works, asked(True))
    assert turn is not None
    assert (turn.work.model, turn.seconds) == ("a", LONGEST)


def test_then_the_other_rules_decide_unless_it_is_behind() -> None:
    """A model that is asked for without end does not keep the others out."""
    switches, works = CostlySwitches(LONGEST), by_model(work("a", here=True), work("b"))
    switches.next(NOW, running("a"), works, asked(True))

    assert switches.next(NOW + SWITCH * LEAST_SWITCHES, running("a"), works, asked(False)) is None
    turn = switches.next(NOW + LONGEST, running("a"), works, asked(True))
    assert turn is not None
    assert turn.work.model == "b"


def test_on_one_that_is_behind_what_is_soonest_comes_next() -> None:
    """The model that ran has nothing to do: first one whose weights are there, then one that can be
    in time, then the one with the least to compute before it decodes."""
    ran, here = work("a", runs=False, here=True), work("b", here=True, late=True)
    late, in_time, long = work("c", late=True), work("d"), work("e", late=True)
    long.prompt_seconds = 5.0
    switches = CostlySwitches(LONGEST)

    for works, model in (
        (by_model(ran, here, late, in_time), "b"),
        (by_model(ran, late, in_time), "d"),
        (by_model(ran, long, late), "c"),
    ):
        turn = switches.next(NOW, running("a"), works, asked(True))
        assert turn is not None
        assert turn.work.model == model
    assert switches.next(NOW, running("a"), by_model(ran, late), asked(False)) is None


def test_switches_that_hide_behind_turns_are_not_costly() -> None:
    """A share of what an answer takes: 300 tokens of 25 ms here."""
    policy = Appliance()
    view = instance_view(
        0,
        groups=(group_view("b", arrived=NOW, deadline=NOW + 1.0, ttft=10.0),),
        batches=(batch_view("a", 1, deadline=NOW + 1.0),),
        current="a",
        resident="a",
    )
    answer = 300 * 0.025
    for switch, costly in ((0.3 * answer, False), (0.5 * answer, True)):
        turn = policy._costly_turn(NOW, view, FixedCosts(switch=switch))
        assert (turn is not None) is costly
        policy = Appliance()


@pytest.mark.thorough
@pytest.mark.parametrize("rate", ["0.04", "0.05"])
def test_a_box_with_slow_links_does_not_load_all_the_time(rate: str) -> None:
    """More is asked of it than it can do, and it keeps more tokens in time than a policy that
    never leaves a model which has something to do."""
    changes = {"hardware.count": "2", "models.0.count": "18", "arrivals.rate": rate}
    tokens = {
        policy: played(Match(path=str(SCENARIO), policy=policy, seed=1, changes=changes)).metrics[
            "token_attainment"
        ]
        for policy in ("appliance", "serverlessllm_sjf")
    }
    assert tokens["appliance"] > tokens["serverlessllm_sjf"]
