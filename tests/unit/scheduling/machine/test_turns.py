"""Who decodes when: the turns that the two policies make of the same requests."""

from __future__ import annotations

import pytest

from appliance.scheduling.lifecycle import Stage
from appliance.vocabulary import (
    Finish,
    FinishReason,
    MoveKv,
    Preempt,
    RunPrefill,
    RunTurn,
    TokensProduced,
    TurnEnd,
    TurnEnded,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def built(
    policy: str, names: str = "abc", *, weight_slabs: int = 4, slabs: int = 40
) -> ClusterDouble:
    """One instance with every engine built and nothing to do."""
    models = {name: ModelDouble(weight_slabs, shape()) for name in names}
    cluster = ClusterDouble(models, policy=policy, slabs=slabs)
    cluster.start()
    cluster.settle()
    return cluster


def turns(cluster: ClusterDouble) -> list[str]:
    return [command.model for command in cluster.commands(RunTurn)]


def until_turn(cluster: ClusterDouble) -> None:
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)


def test_serverlessllm_keeps_the_model_until_its_requests_are_done() -> None:
    """Under serverlessllm a model runs without a break, and the next one starts when it is done."""
    cluster = built("serverlessllm")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)
    cluster.ask("b1", "b", output=20)
    cluster.ask("c1", "c", output=20)

    cluster.settle()

    order = turns(cluster)
    assert order == sorted(order)
    assert [command.request for command in cluster.commands(Finish)] == ["a1", "b1", "c1"]
    assert cluster.machine.preemptions == {"a": 0, "b": 0, "c": 0}


def test_serverlessllm_lets_requests_of_the_model_join_while_no_request_waits() -> None:
    """A request for the model that runs joins its batch at once if no other model waits."""
    cluster = built("serverlessllm")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)

    cluster.ask("a2", "a", output=40)
    cluster.settle()

    assert len(cluster.commands(Preempt)) == 1
    assert any(set(command.requests) == {"a1", "a2"} for command in cluster.commands(RunTurn))


def test_serverlessllm_lets_no_request_join_past_another_model() -> None:
    """A request for the model that runs queues behind the model that waits."""
    cluster = built("serverlessllm")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)

    cluster.ask("b1", "b", output=20)
    cluster.ask("a2", "a", output=5)
    cluster.settle()

    assert cluster.commands(Preempt) == []
    assert [command.request for command in cluster.commands(Finish)] == ["a1", "b1", "a2"]


def test_aegaeon_gives_every_model_a_turn() -> None:
    """Between two turns of a model every other model with work has one."""
    cluster = built("aegaeon")
    for name in "abc":
        cluster.ask(f"{name}1", name, output=30)

    cluster.settle()

    order = turns(cluster)
    assert all(set(order[start : start + 3]) == {"a", "b", "c"} for start in range(0, 24, 3))
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_aegaeon_preempts_a_turn_for_a_prompt_of_the_same_model() -> None:
    """A prompt of the model that runs is computed at once; its requests keep their KV."""
    cluster = built("aegaeon")
    first = cluster.ask("a1", "a", output=40)
    until_turn(cluster)

    cluster.ask("a2", "a", output=40)

    assert cluster.journal[-1][2] == [Preempt(instance=0, turn=1)]
    cluster.work_until(0, lambda: len(cluster.commands(RunPrefill)) == 2)
    ended = [event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]
    assert [event.reason for event in ended] == [TurnEnd.PREEMPTED]
    assert cluster.machine.preemptions["a"] == 1
    cluster.settle()
    assert first.prefills == 1


def test_aegaeon_preempts_no_turn_for_a_prompt_of_another_model() -> None:
    """A prompt of another model waits for the end of the turn."""
    cluster = built("aegaeon")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)

    cluster.ask("b1", "b", output=5)

    assert cluster.journal[-1][2] == []
    cluster.work_until(0, lambda: len(cluster.commands(RunPrefill)) == 2)
    ended = [event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]
    assert [event.reason for event in ended] == [TurnEnd.QUOTA]


def test_aegaeon_owes_a_turn_after_a_group_of_prompts() -> None:
    """Prompts keep coming, but after a group's worth of them the decoding batch has its turn."""
    cluster = built("aegaeon")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)
    for index in range(20):
        cluster.ask(f"b{index}", "b", output=30)

    cluster.settle()

    jobs = "".join(
        "p" if isinstance(command, RunPrefill) else "p" * len(command.prompts) or "t"
        for _, _, commands in cluster.journal
        for command in commands
        if isinstance(command, RunPrefill | RunTurn)
    )
    assert max(map(len, jobs.split("t"))) == 8


def test_a_batch_larger_than_the_memory_rotates() -> None:
    """Requests that do not fit together take turns: those that ran longest ago go first."""
    cluster = built("aegaeon", "a", slabs=4 + 16)
    lives = [cluster.ask(f"r{index}", "a", prompt=200, output=40) for index in range(5)]
    cluster.work_until(0, lambda: len(cluster.prompts()) == 5)
    cluster.work_until(0, lambda: all(life.produced >= 10 for life in lives))

    assert max(len(command.requests) for command in cluster.commands(RunTurn)) < 5
    assert all(life.prefills == 1 for life in lives)
    cluster.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_batch_is_no_larger_than_the_model_allows() -> None:
    """No turn has more requests than `max_batch`, and those left out come next."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, slabs=40, max_batch=2)
    cluster.start()
    lives = [cluster.ask(f"r{index}", "a", output=30) for index in range(5)]

    cluster.settle()

    batches = [set(turn.requests) for turn in cluster.turns()]
    assert max(map(len, batches)) == 2
    assert set().union(*batches[:3]) == {f"r{index}" for index in range(5)}
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_turn_that_filled_its_memory_goes_on() -> None:
    """A turn that ends because its KV is full is followed by one with more room."""
    cluster = built("aegaeon", "a", slabs=4 + 16)
    cluster.up[0].steps_per_turn = 1000
    lives = [cluster.ask(f"r{index}", "a", prompt=60, output=130) for index in range(3)]

    cluster.settle()

    ended = {event.reason for _, event, _ in cluster.journal if isinstance(event, TurnEnded)}
    assert TurnEnd.KV_FULL in ended
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_request_that_ends_in_a_turn_leaves_the_others_running() -> None:
    """The end of one request does not end the turn of its batch."""
    cluster = built("aegaeon", "a")
    cluster.up[0].steps_per_turn = 1000
    cluster.ask("short", "a", output=3)
    cluster.ask("long", "a", output=30)

    cluster.work_until(0, lambda: cluster.world.lives["short"].outcome is not None)

    assert cluster.machine.requests["long"].stage is Stage.RUNNING
    last = cluster.journal[-1][1]
    assert isinstance(last, TokensProduced)


def test_the_longest_wait_is_known() -> None:
    """The oldest progress is that of the request that got nothing for the longest time."""
    cluster = built("serverlessllm")
    assert cluster.machine.oldest_progress() is None
    cluster.ask("a1", "a", output=40)
    cluster.ask("b1", "b")
    asked = cluster.now

    cluster.work_until(0, lambda: cluster.world.lives["a1"].produced > 5)

    assert cluster.machine.oldest_progress() == pytest.approx(asked)


def test_only_work_waits_for_the_clock() -> None:
    """Places are thought over every second while there are requests, and not without."""
    cluster = built("aegaeon")
    assert cluster.machine.next_deadline() is None

    cluster.ask("a1", "a", output=40)

    deadline = cluster.machine.next_deadline()
    assert deadline is not None
    assert cluster.now - 1.0 < deadline <= cluster.now + 1.0


def test_a_planned_turn_without_requests_is_skipped() -> None:
    """A model whose requests left since the round was planned costs no turn."""
    cluster = built("aegaeon")
    for name in "abc":
        cluster.ask(f"{name}1", name, output=40)
    cluster.work_until(0, lambda: turns(cluster) == ["a"])

    cluster.cancel("b1")
    cluster.work_until(0, lambda: len(turns(cluster)) == 3)

    assert turns(cluster) == ["a", "c", "a"]
    assert cluster.commands(MoveKv) == []


def test_a_request_is_preempted_once_however_long_it_waits() -> None:
    """What comes between two turns of a request is one preemption, not one per prompt."""
    cluster = built("aegaeon")
    cluster.ask("a1", "a", output=40)
    until_turn(cluster)
    cluster.ask("a2", "a", output=40)
    cluster.ask("a3", "a", output=40)

    cluster.work_until(0, lambda: len(cluster.turns()) == 2)

    assert len(cluster.prompts()) == 3
    assert cluster.machine.preemptions["a"] == 1


def test_several_tokens_of_a_step_count_as_so_many_steps() -> None:
    """With drafts a step gives several tokens of a request. What is expected of a model is the time
    of a token."""
    cluster, drafting = built("aegaeon", "a"), built("aegaeon", "a")
    drafting.up[0].tokens_per_step = 4
    for each in (cluster, drafting):
        each.ask("a1", "a", output=61)
        each.settle()
        assert each.world.lives["a1"].outcome is FinishReason.LENGTH

    plain, drafted = (each.machine.costs.step_seconds("a") for each in (cluster, drafting))
    assert drafted == pytest.approx(plain / 4, rel=0.3)
    assert len(drafting.turns()) < len(cluster.turns()) / 2
    turn = drafting.machine.instances[0].last_turn
    assert turn is not None
    assert turn.tokens == turn.requests * turn.steps
