"""ServerlessLLM: first come, first served by model; and with the shortest job first."""

from __future__ import annotations

import math

import pytest

from appliance.errors import PolicyError
from appliance.plugins.serverlessllm import UNTIL_DONE_SECONDS, ServerlessLlm
from appliance.plugins.serverlessllm_sjf import ServerlessLlmSjf
from appliance.policies.loader import load_stack
from appliance.scheduling.policy_api import Phase, Placement, PlannedTurn, PrefillChoice
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Role, RunPrefill
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    request_view,
)


def test_every_instance_does_everything() -> None:
    """There are no partitions."""
    assert ServerlessLlm().place(cluster=cluster_view(3)) == [Placement(role=Role.MIXED)] * 3


def test_a_request_goes_where_the_fewest_models_are_before_it() -> None:
    """Waiting or decoding: each of them costs a switch; of equals where the fewest requests are."""
    instances = [
        instance_view(0, groups=(group_view("a"),), batches=(batch_view("b"),)),
        instance_view(1, groups=(group_view("a", 3),)),
        instance_view(2, batches=(batch_view("b", 2),)),
    ]

    choice = ServerlessLlm().prefill(request=request_view("c"), instances=instances)

    assert choice == PrefillChoice(instance=2)


def test_a_request_joins_its_model_where_it_runs() -> None:
    """Before it goes to an idle instance that would have to switch; unless others wait there."""
    idle = instance_view(0, current="b")
    alone = instance_view(1, current="a", batches=(batch_view("a", 5),))
    queued = instance_view(2, current="a", batches=(batch_view("a"),), groups=(group_view("b"),))
    shared = instance_view(3, current="a", batches=(batch_view("a"), batch_view("b")))
    request = request_view("a")

    assert ServerlessLlm().prefill(request=request, instances=[idle, alone]).instance == 1
    assert ServerlessLlm().prefill(request=request, instances=[queued, idle]).instance == 0
    assert ServerlessLlm().prefill(request=request, instances=[shared, idle]).instance == 0


def test_at_equal_load_the_model_that_runs_decides() -> None:
    """An instance that would not have to switch is preferred, then the first one."""
    idle = [instance_view(0, current="b"), instance_view(1, current="a")]

    assert ServerlessLlm().prefill(request=request_view("a"), instances=idle).instance == 1
    assert ServerlessLlm().prefill(request=request_view("c"), instances=idle).instance == 0


@pytest.mark.parametrize(("groups", "joined"), [("a", 0), ("ba", 1), ("aba", 0), ("b", None)])
def test_a_request_joins_those_of_its_model_that_wait(groups: str, joined: int | None) -> None:
    """Requests of one model are taken on together, in the first group that is open."""
    view = instance_view(groups=tuple(group_view(model) for model in groups))

    choice = ServerlessLlm().prefill(request=request_view("a"), instances=[view])

    assert choice == PrefillChoice(instance=0, group=joined)


def test_a_group_is_full_some_time() -> None:
    """A group takes on so many requests in all; the next one waits behind the other models."""
    view = instance_view(groups=(group_view("a", 1, admitted=3), group_view("b")))
    request = request_view("a")

    assert ServerlessLlm(max_group=4).prefill(request=request, instances=[view]).group == 0
    assert ServerlessLlm(max_group=3).prefill(request=request, instances=[view]).group is None


def test_a_request_decodes_where_it_was_prefilled() -> None:
    """Its KV stays where it is, if that instance is still there."""
    offered = [instance_view(1), instance_view(2)]

    assert ServerlessLlm().decode(prefilled_on=2, instances=offered) == 2
    assert ServerlessLlm().decode(prefilled_on=7, instances=offered) == 1


@pytest.mark.parametrize(
    ("front", "batches", "phase", "seconds"),
    [
        ("a", "a", Phase.PREFILL, 0.0),
        ("b", "a", Phase.DECODE, math.inf),
        ("a", "ab", Phase.DECODE, math.inf),
    ],
)
def test_who_joins_goes_first(front: str, batches: str, phase: Phase, seconds: float) -> None:
    """A prompt of the model that runs joins it at once, unless another model waits to go on: that
    would wait for ever if always more joined. Other prompts wait until the batch is done."""
    view = instance_view(
        groups=(group_view(front),),
        batches=tuple([batch_view(model) for model in batches]),
        current="a",
        turn="a",
    )

    assert ServerlessLlm().phase(instance=view) is phase
    assert ServerlessLlm().preempt(instance=view) == seconds


def test_a_turn_goes_on_if_no_request_waits_for_a_prompt() -> None:
    """A request that comes to decode ends no turn."""
    view = instance_view(batches=(batch_view("a"), batch_view("b")), turn="a")

    assert ServerlessLlm().preempt(instance=view) == math.inf


@pytest.mark.parametrize(
    ("current", "runnable", "model"), [("b", 1, "b"), ("b", 0, "a"), ("c", 1, "a"), (None, 1, "a")]
)
def test_the_model_that_runs_goes_on(current: str | None, runnable: int, model: str) -> None:
    """A round is one model until it is done; if it has nothing to run, the next one."""
    view = instance_view(
        batches=(batch_view("a"), batch_view("b", runnable=runnable)), current=current
    )

    assert ServerlessLlm().round(instance=view) == [
        PlannedTurn(model=model, quota_seconds=UNTIL_DONE_SECONDS)
    ]


def test_nothing_is_prefetched() -> None:
    """Every switch begins when the one before is done."""
    assert ServerlessLlm().prefetch() == []


def test_the_shortest_job_is_first() -> None:
    """By the time of prompt and true answer together, and then by arrival."""
    groups = (
        group_view("a", first="long answer", tokens=100),
        group_view("a", first="long prompt", tokens=3000),
        group_view("a", first="short", tokens=100, arrived=2.0),
        group_view("a", first="short, older", tokens=100, arrived=1.0),
        group_view("slow", first="few slow tokens", tokens=100),
    )
    policy = ServerlessLlmSjf()
    policy.learn_oracle(
        {
            "long answer": 500,
            "long prompt": 10,
            "short": 10,
            "short, older": 10,
            "few slow tokens": 20,
        }
    )
    costs = FixedCosts(per_token=0.001, step=0.01, steps={"slow": 0.1})

    order = policy.admit(instance=instance_view(groups=groups), costs=costs)

    assert order == [3, 2, 4, 1, 0]


def test_jobs_of_what_runs_join_it() -> None:
    """They cost no switch; the shortest of them first."""
    groups = (
        group_view("b", first="shortest"),
        group_view("a", first="long"),
        group_view("a", first="short"),
    )
    policy = ServerlessLlmSjf()
    policy.learn_oracle({"shortest": 1, "long": 30, "short": 20})
    view = instance_view(groups=groups, batches=(batch_view("a"),))

    assert policy.admit(instance=view, costs=FixedCosts()) == [2, 1, 0]


def test_every_job_waits_by_itself() -> None:
    """With those of its model, to be batched with them, but not as one: they are not equally long.
    Else where the fewest models are."""
    instances = [
        instance_view(0, groups=(group_view("b"),)),
        instance_view(1, groups=(group_view("b"), group_view("a"))),
    ]
    policy = ServerlessLlmSjf()

    joined = policy.prefill(request=request_view("a"), instances=instances)
    apart = policy.prefill(request=request_view("c"), instances=instances)

    assert (joined, apart) == (PrefillChoice(instance=1), PrefillChoice(instance=0))


def test_the_shortest_job_is_first_in_the_machine() -> None:
    """While one request runs, those that wait are put in the order of their true lengths."""
    policy = ServerlessLlmSjf()
    policy.learn_oracle({"first": 5, "long": 30, "short": 3, "middle": 10})
    cluster = ClusterDouble({m: ModelDouble(4, shape()) for m in "abcd"}, stranger=policy)
    cluster.start()
    cluster.settle()
    for name, model, output in [
        ("first", "a", 5),
        ("long", "b", 30),
        ("short", "c", 3),
        ("middle", "d", 10),
    ]:
        cluster.ask(name, model, output=output, limit=60)

    cluster.settle()

    prefills = [command.request for command in cluster.commands(RunPrefill)]
    assert prefills == ["first", "short", "middle", "long"]
    assert not cluster.machine.requests


def test_only_the_lab_can_load_an_oracle() -> None:
    """Without true lengths the policy is refused by name, with them it gets just these."""
    with pytest.raises(PolicyError, match="serverlessllm_sjf needs an oracle: lab only"):
        load_stack(PolicyChoice(use=("serverlessllm_sjf",)))

    lengths = {"r": 7}
    load_stack(PolicyChoice(use=("serverlessllm_sjf", "serverlessllm")), lengths=lengths)
    assert lengths == {"r": 7}
