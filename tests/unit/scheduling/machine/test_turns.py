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
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def built(
    policy: str, names: str = "abc", *, weight_slabs: int = 4, slabs: int = 40
) -> FloorDouble:
    """One instance with every engine built and nothing to do."""
    models = {name: ModelDouble(weight_slabs, shape()) for name in names}
    floor = FloorDouble(models, policy=policy, slabs=slabs)
    floor.start()
    floor.settle()
    return floor


def turns(floor: FloorDouble) -> list[str]:
    return [command.model for command in floor.commands(RunTurn)]


def until_turn(floor: FloorDouble) -> None:
    floor.work_until(0, lambda: floor.up[0].turn is not None)


def test_serverlessllm_keeps_the_model_until_its_requests_are_done() -> None:
    """Under serverlessllm a model runs without a break, and the next one starts when it is done."""
    floor = built("serverlessllm")
    floor.ask("a1", "a", output=40)
    until_turn(floor)
    floor.ask("b1", "b", output=20)
    floor.ask("c1", "c", output=20)

    floor.settle()

    order = turns(floor)
    assert order == sorted(order)
    assert [command.request for command in floor.commands(Finish)] == ["a1", "b1", "c1"]
    assert floor.machine.preemptions == {"a": 0, "b": 0, "c": 0}


def test_serverlessllm_lets_requests_of_the_model_join_while_nobody_waits() -> None:
    """A request for the model that runs joins its batch at once if no other model waits."""
    floor = built("serverlessllm")
    floor.ask("a1", "a", output=40)
    until_turn(floor)

    floor.ask("a2", "a", output=40)
    floor.settle()

    assert len(floor.commands(Preempt)) == 1
    assert any(set(command.requests) == {"a1", "a2"} for command in floor.commands(RunTurn))


def test_serverlessllm_lets_nobody_join_past_another_model() -> None:
    """A request for the model that runs queues behind the model that waits."""
    floor = built("serverlessllm")
    floor.ask("a1", "a", output=40)
    until_turn(floor)

    floor.ask("b1", "b", output=20)
    floor.ask("a2", "a", output=5)
    floor.settle()

    assert floor.commands(Preempt) == []
    assert [command.request for command in floor.commands(Finish)] == ["a1", "b1", "a2"]


def test_aegaeon_gives_every_model_a_turn() -> None:
    """Between two turns of a model every other model with work has one."""
    floor = built("aegaeon")
    for name in "abc":
        floor.ask(f"{name}1", name, output=30)

    floor.settle()

    order = turns(floor)
    assert all(set(order[start : start + 3]) == {"a", "b", "c"} for start in range(0, 24, 3))
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_aegaeon_preempts_a_turn_for_a_prompt_of_the_same_model() -> None:
    """A prompt of the model that runs is computed at once; its requests keep their KV."""
    floor = built("aegaeon")
    first = floor.ask("a1", "a", output=40)
    until_turn(floor)

    floor.ask("a2", "a", output=40)

    assert floor.journal[-1][2] == [Preempt(instance=0, turn=1)]
    floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 2)
    ended = [event for _, event, _ in floor.journal if isinstance(event, TurnEnded)]
    assert [event.reason for event in ended] == [TurnEnd.PREEMPTED]
    assert floor.machine.preemptions["a"] == 1
    floor.settle()
    assert first.prefills == 1


def test_aegaeon_preempts_no_turn_for_a_prompt_of_another_model() -> None:
    """A prompt of another model waits for the end of the turn."""
    floor = built("aegaeon")
    floor.ask("a1", "a", output=40)
    until_turn(floor)

    floor.ask("b1", "b", output=5)

    assert floor.journal[-1][2] == []
    floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 2)
    ended = [event for _, event, _ in floor.journal if isinstance(event, TurnEnded)]
    assert [event.reason for event in ended] == [TurnEnd.QUOTA]


def test_aegaeon_owes_a_turn_after_a_group_of_prompts() -> None:
    """Prompts keep coming, but after a group's worth of them the decoding batch has its turn."""
    floor = built("aegaeon")
    floor.ask("a1", "a", output=40)
    until_turn(floor)
    for index in range(20):
        floor.ask(f"b{index}", "b", output=30)

    floor.settle()

    jobs = "".join(
        "t" if isinstance(command, RunTurn) else "p"
        for _, _, commands in floor.journal
        for command in commands
        if isinstance(command, RunPrefill | RunTurn)
    )
    assert max(map(len, jobs.split("t"))) == 8


def test_a_batch_larger_than_the_memory_rotates() -> None:
    """Requests that do not fit together take turns: those that ran longest ago go first."""
    floor = built("aegaeon", "a", slabs=4 + 16)
    lives = [floor.ask(f"r{index}", "a", prompt=200, output=40) for index in range(5)]
    floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 5)
    floor.work_until(0, lambda: all(life.produced >= 10 for life in lives))

    assert max(len(command.requests) for command in floor.commands(RunTurn)) < 5
    assert all(life.prefills == 1 for life in lives)
    floor.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_batch_is_no_larger_than_the_model_allows() -> None:
    """No turn has more requests than `max_batch`, and those left out come next."""
    floor = FloorDouble({"a": ModelDouble(4, shape())}, slabs=40, max_batch=2)
    floor.start()
    lives = [floor.ask(f"r{index}", "a", output=30) for index in range(5)]

    floor.settle()

    batches = [set(command.requests) for command in floor.commands(RunTurn)]
    assert max(map(len, batches)) == 2
    assert set().union(*batches[:3]) == {f"r{index}" for index in range(5)}
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_turn_that_filled_its_memory_goes_on() -> None:
    """A turn that ends because its KV is full is followed by one with more room."""
    floor = built("aegaeon", "a", slabs=4 + 16)
    floor.up[0].steps_per_turn = 1000
    lives = [floor.ask(f"r{index}", "a", prompt=60, output=130) for index in range(3)]

    floor.settle()

    ended = {event.reason for _, event, _ in floor.journal if isinstance(event, TurnEnded)}
    assert TurnEnd.KV_FULL in ended
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_a_request_that_ends_in_a_turn_leaves_the_others_running() -> None:
    """The end of one request does not end the turn of its batch."""
    floor = built("aegaeon", "a")
    floor.up[0].steps_per_turn = 1000
    floor.ask("short", "a", output=3)
    floor.ask("long", "a", output=30)

    floor.work_until(0, lambda: floor.world.lives["short"].outcome is not None)

    assert floor.machine.requests["long"].stage is Stage.RUNNING
    last = floor.journal[-1][1]
    assert isinstance(last, TokensProduced)


def test_the_longest_wait_is_known() -> None:
    """The oldest progress is that of the request that got nothing for the longest time."""
    floor = built("serverlessllm")
    assert floor.machine.oldest_progress() is None
    floor.ask("a1", "a", output=40)
    floor.ask("b1", "b")
    asked = floor.now

    floor.work_until(0, lambda: floor.world.lives["a1"].produced > 5)

    assert floor.machine.oldest_progress() == pytest.approx(asked)


def test_only_work_waits_for_the_clock() -> None:
    """Places are thought over every second while there are requests, and not without."""
    floor = built("aegaeon")
    assert floor.machine.next_deadline() is None

    floor.ask("a1", "a", output=40)

    deadline = floor.machine.next_deadline()
    assert deadline is not None
    assert floor.now - 1.0 < deadline <= floor.now + 1.0


def test_a_planned_turn_without_requests_is_skipped() -> None:
    """A model whose requests left since the round was planned costs no turn."""
    floor = built("aegaeon")
    for name in "abc":
        floor.ask(f"{name}1", name, output=40)
    floor.work_until(0, lambda: turns(floor) == ["a"])

    floor.cancel("b1")
    floor.work_until(0, lambda: len(turns(floor)) == 3)

    assert turns(floor) == ["a", "c", "a"]
    assert floor.commands(MoveKv) == []


def test_a_request_is_preempted_once_however_long_it_waits() -> None:
    """What comes between two turns of a request is one preemption, not one per prompt."""
    floor = built("aegaeon")
    floor.ask("a1", "a", output=40)
    until_turn(floor)
    floor.ask("a2", "a", output=40)
    floor.ask("a3", "a", output=40)

    floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 3)

    assert floor.machine.preemptions["a"] == 1
