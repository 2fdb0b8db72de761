"""QLM: request groups in the order of their deadlines, one model after the other."""

from __future__ import annotations

from itertools import groupby

from appliance.plugins.qlm import Qlm
from appliance.scheduling.policy_api import PrefillChoice
from appliance.vocabulary import RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    group_view,
    instance_view,
    request_view,
)

COSTS = FixedCosts()


def test_requests_of_a_model_form_groups() -> None:
    """A request joins the first group of its model that is open, wherever that is."""
    instances = [instance_view(0), instance_view(1, groups=(group_view("b"), group_view("a")))]
    request = request_view("a")

    assert Qlm().prefill(request=request, instances=instances, costs=COSTS) == PrefillChoice(
        instance=1, group=1
    )
    assert Qlm(max_group=1).prefill(request=request, instances=instances, costs=COSTS).instance == 0


def test_a_new_group_goes_to_the_first_idle_instance() -> None:
    """Whatever models the others have: the swaps that Prism blames it for."""
    instances = [
        instance_view(0, batches=(batch_view("b"),)),
        instance_view(1, current="c"),
        instance_view(2, current="a", resident=["a"]),
    ]

    choice = Qlm().prefill(request=request_view("a"), instances=instances, costs=COSTS)

    assert choice == PrefillChoice(instance=1)


def test_else_it_goes_where_least_time_waits() -> None:
    """Of the queues, not of what runs."""
    instances = [
        instance_view(0, groups=(group_view("b", tokens=9000),)),
        instance_view(1, groups=(group_view("b", tokens=1000), group_view("c", tokens=1000))),
    ]

    choice = Qlm().prefill(request=request_view("a"), instances=instances, costs=COSTS)

    assert choice == PrefillChoice(instance=1)


def test_the_earliest_deadline_is_served_first() -> None:
    """Then who came first."""
    groups = (
        group_view("a", deadline=5.0, arrived=2.0),
        group_view("b", deadline=3.0),
        group_view("c", deadline=5.0, arrived=1.0),
    )

    assert Qlm().admit(instance=instance_view(groups=groups)) == [1, 2, 0]


def test_a_group_that_has_begun_is_finished() -> None:
    """Though those of it that still wait are due later than others; of the model that runs only."""
    groups = (
        group_view("b", deadline=3.0),
        group_view("a", 1, admitted=2, deadline=4.0),
        group_view("c", 1, admitted=2, deadline=5.0),
    )

    assert Qlm().admit(instance=instance_view(groups=groups, current="a")) == [1, 0, 2]


def test_a_group_runs_until_it_is_done() -> None:
    """In the machine: the first request, then a group, then the other: two swaps for six requests,
    though their models alternate."""
    cluster = ClusterDouble({m: ModelDouble(4, shape()) for m in "ab"}, stranger=Qlm())
    cluster.start()
    cluster.settle()
    for index in range(6):
        cluster.ask(f"r{index}", "ab"[index % 2], output=20)

    cluster.settle()

    turns = groupby(cluster.commands(RunTurn), key=lambda turn: turn.model)
    ran = [(model, {name for turn in run for name in turn.requests}) for model, run in turns]
    assert ran == [("a", {"r0"}), ("b", {"r1", "r3", "r5"}), ("a", {"r2", "r4"})]
