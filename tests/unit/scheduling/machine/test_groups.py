"""Models that some instances only can have: instances of another group have no engine for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import pytest

from appliance.hookspecs import hookimpl
from appliance.policies.loader import ENTRY_POINTS
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import (
    DecodingView,
    InstanceView,
    Migration,
    Placement,
)
from appliance.vocabulary import (
    BuildModel,
    DropModel,
    FinishReason,
    ModelLoadRequested,
    ModelRemoved,
    PrefetchModel,
    Role,
    RunPrefill,
    RunTurn,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

SHIPPED = sorted(
    entry.name
    for entry in entry_points(group=ENTRY_POINTS)
    if entry.value.startswith("appliance.") and not getattr(entry.load(), "oracle", False)
)
"""Policies of ours, but those that only the lab may load."""
ONLY = {"a": frozenset({0}), "b": frozenset({1, 2})}


def grouped(*, policy: str = "serverlessllm", **options: Any) -> ClusterDouble:
    """Model a on instance 0, b on the two others, c on all."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    cluster = ClusterDouble(models, policy=policy, instances=3, only=ONLY, **options)
    cluster.start()
    return cluster


def where(cluster: ClusterDouble, kind: Any) -> Mapping[str, set[int]]:
    """The instances that got such commands, by model."""
    found: dict[str, set[int]] = {}
    for command in cluster.commands(kind):
        found.setdefault(command.model, set()).add(command.instance)
    return found


def test_engines_are_built_where_models_can_be() -> None:
    """No instance builds what it cannot serve."""
    cluster = grouped()

    cluster.settle()

    assert where(cluster, BuildModel) == {"a": {0}, "b": {1, 2}, "c": {0, 1, 2}}


@pytest.mark.parametrize("policy", SHIPPED)
def test_requests_run_where_their_models_can_be(policy: str) -> None:
    """Under every policy, which keeps to that by itself: what an instance is for may exclude what
    it alone can serve, as with the roles of prefill and decode, and the request runs there all the
    same."""
    cluster = grouped(policy=policy)

    lives = [cluster.ask(f"{model}{n}", model, output=60) for n in range(6) for model in "cba"]
    cluster.settle()

    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    for kind in (RunPrefill, RunTurn):
        assert where(cluster, kind)["a"] == {0}
        assert where(cluster, kind)["b"] <= {1, 2}
    assert isinstance(cluster.stack, PolicyStack)
    assert cluster.stack.faults == []


def test_requests_wait_for_an_instance_that_can_serve_them() -> None:
    """Others that are up do not count, and others that are out of service do not either."""
    cluster = grouped()
    cluster.settle()
    cluster.lose(0)
    life = cluster.ask("r", "a")
    cluster.settle()
    assert life.outcome is None

    cluster.start(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH


def test_requests_are_refused_when_all_that_could_serve_them_are_quarantined() -> None:
    """The message says of which model; requests of other models go on."""
    cluster = grouped()
    cluster.settle()
    waits = cluster.ask("waits", "a", output=50)
    cluster.quarantine(0, "it fails")
    cluster.lose(0)

    refused = cluster.ask("refused", "a")
    other = cluster.ask("other", "c")
    cluster.settle()

    assert (waits.outcome, refused.outcome) == ("no_instance", "no_instance")
    assert other.outcome == FinishReason.LENGTH
    reasons = [
        command.message
        for _, _, out in cluster.journal
        for command in out
        if getattr(command, "request", "") == "refused" and hasattr(command, "message")
    ]
    assert reasons == [
        "every instance that can serve a is quarantined; an operator may release one"
    ]


def test_operators_load_a_model_where_it_can_be() -> None:
    """Not on the first instance that has room."""
    cluster = grouped()
    cluster.settle()

    cluster.tell(ModelLoadRequested(model="b"))
    cluster.settle()

    assert where(cluster, PrefetchModel) == {"b": {1}}


def test_models_come_and_go_on_their_instances() -> None:
    """A model that is added is built on its instances; every instance forgets one that leaves."""
    cluster = grouped()
    cluster.settle()

    cluster.add("d", ModelDouble(4, shape()), only=frozenset({2}))
    life = cluster.ask("r", "d")
    cluster.settle()
    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert where(cluster, BuildModel)["d"] == {2}
    assert where(cluster, DropModel) == {"a": {0, 1, 2}}
    assert "a" not in cluster.machine.models


class Placing:
    """Places every model on the last instance, and has all that decode go to each other one."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, tuple[int, ...]]] = []
        self.seen: list[InstanceView] = []

    @hookimpl
    def place(self, cluster: Any) -> Sequence[Placement]:
        models = frozenset(model.name for model in cluster.models)
        last = len(cluster.instances) - 1
        self.seen = list(cluster.instances)
        return [
            Placement(role=Role.MIXED, models=models if view.id == last else frozenset())
            for view in cluster.instances
        ]

    @hookimpl
    def flow(
        self, requests: Sequence[DecodingView], others: Sequence[InstanceView]
    ) -> Sequence[Migration]:
        self.shown += [(one.model, tuple(view.id for view in others)) for one in requests]
        return [Migration(request=one.id, target=others[0].id) for one in requests]


def test_a_plan_cannot_place_a_model_where_it_cannot_be() -> None:
    """Policies see what is left of their plan; the model runs where it can be."""
    policy = Placing()
    cluster = grouped(stranger=policy)
    life = cluster.ask("r", "a")
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert where(cluster, RunTurn) == {"a": {0}}
    assert [view.models for view in policy.seen] == [
        frozenset(),
        frozenset(),
        frozenset({"b", "c"}),
    ]


def test_requests_do_not_flow_to_where_their_models_cannot_be() -> None:
    """Requests that could go nowhere are not shown, and an answer that sends one to an instance
    that cannot serve it is not one: the next policy is asked."""
    policy = Placing()
    cluster = grouped(stranger=policy)
    lives = [cluster.ask(f"{m}{n}", m, output=40) for n in range(3) for m in "abc"]

    cluster.settle()

    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    assert {model for model, _ in policy.shown} <= {"b", "c"}
    assert any(model == "b" and others[0] == 0 for model, others in policy.shown)
    assert isinstance(cluster.stack, PolicyStack)
    assert where(cluster, RunTurn)["a"] == {0}
    assert where(cluster, RunTurn)["b"] <= {1, 2}
