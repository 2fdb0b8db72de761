"""First come, first served by model: the baseline."""

from __future__ import annotations

import pytest

from appliance.plugins.fcfs import UNTIL_DONE_SECONDS, Fcfs
from appliance.scheduling.questions import Phase, PlannedTurn, PrefillChoice
from appliance.vocabulary import Role
from tests.unit.policy_views import batch_view, group_view, instance_view, request_view


def test_every_instance_does_everything() -> None:
    """There are no partitions."""
    assert Fcfs().assign_roles(instances=3) == [Role.MIXED] * 3


def test_a_request_goes_where_the_least_is_to_do() -> None:
    """Waiting and decoding requests count alike."""
    instances = [
        instance_view(0, groups=(group_view("a", 1),), batches=(batch_view("a", 2),)),
        instance_view(1, groups=(group_view("b", 2),)),
    ]

    choice = Fcfs().choose_prefill(request=request_view("c"), instances=instances)

    assert choice == PrefillChoice(instance=1)


def test_at_equal_load_the_model_that_runs_decides() -> None:
    """An instance that would not have to switch is preferred, then the first one."""
    idle = [instance_view(0, current="b"), instance_view(1, current="a")]

    assert Fcfs().choose_prefill(request=request_view("a"), instances=idle).instance == 1
    assert Fcfs().choose_prefill(request=request_view("c"), instances=idle).instance == 0


@pytest.mark.parametrize(("groups", "joined"), [("a", 0), ("ba", 1), ("aba", 0), ("b", None)])
def test_a_request_joins_those_of_its_model_that_wait(groups: str, joined: int | None) -> None:
    """Requests of one model are taken on together, in the first group that is open."""
    view = instance_view(groups=tuple(group_view(model) for model in groups))

    choice = Fcfs().choose_prefill(request=request_view("a"), instances=[view])

    assert choice == PrefillChoice(instance=0, group=joined)


def test_a_group_is_full_some_time() -> None:
    """A group takes on so many requests in all; the next one waits behind the other models."""
    view = instance_view(groups=(group_view("a", 1, admitted=3), group_view("b")))
    request = request_view("a")

    assert Fcfs(max_group=4).choose_prefill(request=request, instances=[view]).group == 0
    assert Fcfs(max_group=3).choose_prefill(request=request, instances=[view]).group is None


def test_a_request_decodes_where_it_was_prefilled() -> None:
    """Its KV stays where it is, if that instance is still there."""
    offered = [instance_view(1), instance_view(2)]

    assert Fcfs().choose_decode(request=request_view(), prefilled_on=2, instances=offered) == 2
    assert Fcfs().choose_decode(request=request_view(), prefilled_on=7, instances=offered) == 1


@pytest.mark.parametrize(("front", "phase"), [("a", Phase.PREFILL), ("b", Phase.DECODE)])
def test_prompts_of_the_model_that_runs_go_first(front: str, phase: Phase) -> None:
    """Another model's prompts wait until the batch is done."""
    view = instance_view(groups=(group_view(front),), batches=(batch_view("a"),), current="a")

    assert Fcfs().choose_phase(instance=view) is phase


@pytest.mark.parametrize(
    ("current", "runnable", "model"), [("b", 1, "b"), ("b", 0, "a"), ("c", 1, "a"), (None, 1, "a")]
)
def test_the_model_that_runs_goes_on(current: str | None, runnable: int, model: str) -> None:
    """A round is one model until it is done; if it has nothing to run, the next one."""
    view = instance_view(
        batches=(batch_view("a"), batch_view("b", runnable=runnable)), current=current
    )

    assert Fcfs().plan_round(instance=view) == [
        PlannedTurn(model=model, quota_seconds=UNTIL_DONE_SECONDS)
    ]


def test_nothing_is_prefetched() -> None:
    """Every switch begins when the one before is done."""
    assert Fcfs().choose_prefetch(instance=instance_view(), upcoming=["b"]) == []
