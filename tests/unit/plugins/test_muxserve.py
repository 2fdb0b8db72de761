"""MuxServe: what fits runs in short turns, what does not is refused."""

from __future__ import annotations

from itertools import pairwise

from appliance.plugins.muxserve import MuxServe
from appliance.scheduling.policy_api import PlannedTurn, Refusal
from appliance.vocabulary import EvictModel, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    GIB,
    batch_view,
    cluster_view,
    instance_view,
    model_view,
    request_view,
)


def test_what_fits_nowhere_is_refused() -> None:
    """Of three models of 14B one GPU of 80 GB takes two; the third is placed, but not served."""
    policy = MuxServe()
    models = [model_view(name, weight_bytes=28 * 10**9) for name in "abc"]

    placements = policy.place(
        cluster=cluster_view([instance_view(total_bytes=80 * 10**9)], *models)
    )

    assert [placement.models for placement in placements] == [frozenset("abc")]
    assert policy.prefill(request=request_view("b")) is None
    assert policy.prefill(request=request_view("c")) == Refusal(
        reason="c has no room: other models were placed first"
    )


def test_a_model_of_few_instances_is_not_refused_if_there_is_room() -> None:
    """What can be elsewhere goes elsewhere."""
    policy = MuxServe()
    anywhere = model_view("anywhere", weight_bytes=60 * 10**9)
    bound = model_view("bound", weight_bytes=50 * 10**9, instances=frozenset({0}))
    instances = [instance_view(number, total_bytes=80 * 10**9) for number in range(2)]

    placements = policy.place(cluster=cluster_view(instances, anywhere, bound))

    assert [one.models for one in placements] == [frozenset({"bound"}), frozenset({"anywhere"})]
    assert policy.prefill(request=request_view("bound")) is None
    assert policy.prefill(request=request_view("anywhere")) is None


def test_no_request_is_refused_before_the_sizes_are_known() -> None:
    """An instance that is not up yet may have the room."""
    policy = MuxServe()

    assert policy.prefill(request=request_view("a")) is None
    view = instance_view(up=False, total_bytes=0)
    policy.place(cluster=cluster_view([view], model_view("a", weight_bytes=GIB)))
    assert policy.prefill(request=request_view("a")) is None


def test_a_gpu_is_taken_in_turn_for_a_moment() -> None:
    """Every model that can run has the same short turn."""
    view = instance_view(
        batches=(batch_view("a"), batch_view("b", runnable=0), batch_view("c", 30))
    )

    assert MuxServe(turn_seconds=0.1).round(instance=view) == [
        PlannedTurn(model="a", quota_seconds=0.1),
        PlannedTurn(model="c", quota_seconds=0.1),
    ]


def test_residents_interleave_without_a_switch() -> None:
    """In the machine: two models on one instance take turns, no weights ever move, and requests
    of the model that does not fit end as overload."""
    cluster = ClusterDouble(
        {"a": ModelDouble(6, shape()), "b": ModelDouble(6, shape()), "c": ModelDouble(6, shape())},
        stranger=MuxServe(),
        slabs=20,
    )
    cluster.start()
    cluster.settle()
    lives = [cluster.ask(name, name, output=40) for name in "abc"]

    cluster.settle()

    assert [life.outcome for life in lives] == ["length", "length", "overloaded"]
    turns = [command.model for command in cluster.commands(RunTurn)]
    assert sum([one != other for one, other in pairwise(turns)]) > 4
    assert not cluster.commands(EvictModel)
