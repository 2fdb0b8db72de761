"""Models whose KV does not fit the device together: each goes on until its swap was worth it."""

from __future__ import annotations

import pytest

from appliance.plugins.appliance import Appliance
from appliance.scheduling.policy_api import PlannedTurn
from appliance.vocabulary import Direction, FinishReason, MoveKv, RunPrefill, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

POLICIES = ["aegaeon", "appliance", "pd_aggregated", "taichi"]


def box(policy: str = "aegaeon", stranger: object | None = None) -> ClusterDouble:
    """One instance that holds the weights of two models, and the KV of one of them."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy=policy, slabs=8 + 8, stranger=stranger)
    cluster.start()
    cluster.settle()
    return cluster


def begin(cluster: ClusterDouble) -> None:
    """Requests of both models decode; turn by turn their KV moves."""
    for name in ("a1", "b1"):
        cluster.ask(name, name[0], prompt=150, output=100)
    cluster.work_until(0, lambda: len(arrivals(cluster)) == 1)


def arrivals(cluster: ClusterDouble) -> list[str]:
    """The models whose KV came to the device, in order."""
    moves = [move for move in cluster.commands(MoveKv) if move.moves]
    return [move.model for move in moves if move.direction is Direction.IN]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_goes_on_while_its_swap_was_not_worth_it(policy: str) -> None:
    """If moves take long, the first model whose KV comes back decodes until its request ends. The
    policy would have others run in between: with fast moves they do, if one target of slack is
    enough for it."""
    came = {}
    stranger = Appliance(slack_target=1.0) if policy == "appliance" else None
    for seconds in (0.001, 10.0):
        cluster = box(policy, stranger)
        cluster.up[0].swap_seconds = seconds
        begin(cluster)
        cluster.settle()
        came[seconds] = arrivals(cluster)
        assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}

    assert len(came[10.0]) <= 2
    assert len(came[0.001]) >= len(came[10.0])


def test_fast_moves_change_nothing() -> None:
    """Turns alternate as the policy says, and KV moves at each."""
    cluster = box()
    begin(cluster)
    cluster.settle()

    assert len(arrivals(cluster)) > 10


def test_prompts_of_the_model_come_first_meanwhile() -> None:
    """Those of other models wait until the swap was worth it, though they came before."""
    cluster = box()
    cluster.up[0].swap_seconds = 10.0
    begin(cluster)
    (model,) = arrivals(cluster)
    other = "b" if model == "a" else "a"
    cluster.ask("late", other, prompt=20, output=2)
    cluster.ask("joins", model, prompt=20, output=2)
    cluster.settle()

    prompts = [command.request for command in cluster.commands(RunPrefill)]
    assert prompts[-2:] == ["joins", "late"]


def test_another_model_runs_when_the_model_has_nothing_to_do() -> None:
    """However long its swap took."""
    cluster = box()
    cluster.up[0].swap_seconds = 10.0
    begin(cluster)
    (model,) = arrivals(cluster)
    cluster.cancel(f"{model}1")
    cluster.settle()

    assert len(arrivals(cluster)) == 2
    assert cluster.machine.requests == {}


def test_a_turn_that_took_in_a_prompt_goes_on_with_its_quota() -> None:
    """It was ended for a prompt of its own model, while the swap was not worth it yet."""
    quota = 5.0
    cluster = box(
        stranger=Told(
            round=lambda instance: [
                PlannedTurn(model=batch.model, quota_seconds=quota)
                for batch in instance.batches
                if batch.runnable
            ],
            preempt=lambda: 0.0,
        )
    )
    cluster.up[0].swap_seconds = 10.0
    begin(cluster)
    (model,) = arrivals(cluster)
    cluster.work_until(0, lambda: cluster.commands(RunTurn)[-1].quota_seconds > quota)
    cluster.ask("joins", model, prompt=20, output=2)
    cluster.settle()

    later = [turn for turn in cluster.commands(RunTurn) if "joins" in turn.requests]
    assert set(later[0].requests) == {f"{model}1", "joins"}
    assert later[0].quota_seconds > quota


def test_a_lost_instance_begins_anew() -> None:
    """What was moved before is gone with its worker."""
    cluster = box()
    cluster.up[0].swap_seconds = 10.0
    begin(cluster)
    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}
