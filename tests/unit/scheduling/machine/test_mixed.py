"""Mixed turns: prompts computed in chunks beside the decoding steps of the same model."""

from __future__ import annotations

from itertools import cycle

import pytest

from appliance.plugins.pd_aggregated import PdAggregated
from appliance.scheduling.lifecycle import Stage
from appliance.scheduling.machine import MAX_REQUEST_LOSSES
from appliance.scheduling.policy_api import BatchLimits, Phase
from appliance.vocabulary import (
    Finish,
    FinishReason,
    RunPrefill,
    RunTurn,
    Ticked,
    TurnEnd,
    TurnEnded,
)
from appliance.vocabulary import RequestClass as Kind
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

CHUNK = 16


def chunking(requests: int = 64) -> Told:
    """Prompts come as soon as they may, beside the steps of their model."""
    return Told(
        batch=lambda: BatchLimits(requests=requests, chunk_tokens=CHUNK),
        phase=lambda: Phase.PREFILL,
    )


def floor_of(
    names: str = "ab", *, slabs: int = 40, requests: int = 64, steps: int = 10
) -> FloorDouble:
    """One instance with every engine built and nothing to do."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in names},
        slabs=slabs,
        stranger=chunking(requests),
    )
    floor.start()
    floor.settle()
    floor.up[0].steps_per_turn = steps
    return floor


def mixed(floor: FloorDouble) -> list[RunTurn]:
    return [command for command in floor.commands(RunTurn) if command.prompts]


def test_a_prompt_is_computed_beside_the_steps() -> None:
    """A prompt of the model that decodes is part of a turn, in chunks; it is computed once, decodes
    from the next turn on, and nobody waits for it."""
    floor = floor_of()
    first = floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: first.produced > 3)

    second = floor.ask("a2", "a", output=20)
    floor.settle()

    (turn,) = mixed(floor)
    assert (turn.requests, turn.prompts, turn.chunk_tokens) == (("a1",), ("a2",), CHUNK)
    assert [command.request for command in floor.commands(RunPrefill)] == ["a1"]
    later = floor.commands(RunTurn)[floor.commands(RunTurn).index(turn) + 1]
    assert set(later.requests) == {"a1", "a2"}
    assert later.chunk_tokens == 0
    assert floor.machine.preemptions == {"a": 0, "b": 0}
    for life in (first, second):
        assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_the_limits_of_a_mixed_turn_are_asked_for_once() -> None:
    """A policy that would answer otherwise when asked again makes no turn that cannot be."""
    chunks = cycle([CHUNK, 0])
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())},
        slabs=40,
        stranger=Told(
            batch=lambda: BatchLimits(requests=64, chunk_tokens=next(chunks)),
            phase=lambda: Phase.PREFILL,
        ),
    )
    floor.start()
    for index in range(10):
        floor.ask(f"r{index}", "a", output=30)
    floor.settle()

    assert {turn.chunk_tokens for turn in mixed(floor)} == {CHUNK}
    assert {life.outcome for life in floor.world.lives.values()} == {FinishReason.LENGTH}


def test_a_prompt_of_another_model_is_computed_alone() -> None:
    """Only prompts of the model that decodes can go beside its steps."""
    floor = floor_of()
    floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: floor.up[0].turn is not None)

    floor.ask("b1", "b", output=2)
    floor.settle()

    assert mixed(floor) == []
    assert [command.request for command in floor.commands(RunPrefill)] == ["a1", "b1"]


def test_a_prompt_that_leaves_no_room_for_a_step_is_computed_alone() -> None:
    """If not even one request fits beside the prompt, the prompt is computed first, alone."""
    floor = floor_of("a", slabs=4 + 10)
    first = floor.ask("a1", "a", prompt=100, output=60)
    floor.work_until(0, lambda: first.produced > 3)

    second = floor.ask("a2", "a", prompt=220, output=20)
    floor.settle()

    assert mixed(floor) == []
    assert (first.outcome, second.outcome) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert first.prefills == second.prefills == 1


def test_a_mixed_turn_says_nothing_of_steps() -> None:
    """Steps that computed a prompt too do not change what a step is expected to cost."""
    floor = floor_of("a")
    life = floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: life.produced > 15)
    known = floor.machine.costs.step_seconds("a")

    floor.ask("a2", "a", output=1)
    floor.work_until(0, lambda: bool(mixed(floor)))
    ended = len([event for _, event, _ in floor.journal if isinstance(event, TurnEnded)])

    def one_more() -> bool:
        return len([e for _, e, _ in floor.journal if isinstance(e, TurnEnded)]) > ended

    floor.work_until(0, one_more)
    assert floor.machine.costs.step_seconds("a") == known


def test_a_prompt_that_did_not_fit_a_mixed_turn_comes_next() -> None:
    """A prompt that its worker could not fit beside the steps goes back to the front of the queue,
    with nothing of it kept, while the turn goes on; it is computed before those behind it."""
    floor = floor_of("a", requests=1)
    first = floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: first.produced > 3)
    floor.up[0].deferring.add("a2")
    second = floor.ask("a2", "a", output=20)
    third = floor.ask("a3", "a", output=20)
    floor.work_until(0, lambda: not floor.up[0].deferring)

    assert floor.machine.requests["a1"].stage is Stage.RUNNING
    assert floor.machine.requests["a2"].host_offsets == ()
    assert waiting(floor) == {"a2", "a3"}
    floor.settle()
    assert [turn.prompts for turn in mixed(floor)] == [("a2",), ("a2",), ("a3",)]
    for life in (first, second, third):
        assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_a_cancelled_prompt_of_a_mixed_turn_leaves_nothing() -> None:
    """A request that is cancelled while its prompt is computed beside others' steps is forgotten;
    the others go on."""
    floor = floor_of("a")
    first = floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: first.produced > 3)
    floor.ask("a2", "a", output=20)
    floor.work_until(0, lambda: "a2" not in waiting(floor))
    assert floor.machine.requests["a2"].stage is Stage.PREFILLING

    floor.cancel("a2")
    floor.settle()

    assert first.outcome == FinishReason.LENGTH
    assert [command.request for command in floor.commands(Finish)] == ["a2", "a1"]
    assert floor.machine.host.kv_slabs == 0


def waiting(floor: FloorDouble) -> set[str]:
    groups = floor.machine.instances[0].groups
    return {name for group in groups for name in group.members}


def test_prompts_of_a_turn_that_kills_workers_are_given_up() -> None:
    """A loss during a mixed turn counts for its prompts as for those that decode."""
    floor = floor_of("a")
    floor.ask("a1", "a", output=200)
    floor.work_until(0, lambda: floor.up[0].turn is not None)
    life = floor.ask("a2", "a", output=200)
    for _ in range(MAX_REQUEST_LOSSES):
        assert life.outcome is None
        floor.work_until(0, lambda: floor.machine.requests["a2"].stage is Stage.PREFILLING)
        floor.lose(0)
        floor.start(0)

    assert life.outcome == "request_failed"


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_mixed_turn_may_be_preempted(seconds: float) -> None:
    """A mixed turn is ended like any other; its prompt has been computed."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        slabs=40,
        stranger=Told(
            batch=lambda: BatchLimits(requests=64, chunk_tokens=CHUNK),
            phase=lambda: Phase.PREFILL,
            preempt=lambda instance: seconds if instance.groups[0].model == "b" else 0.0,
        ),
    )
    floor.start()
    floor.settle()
    floor.up[0].steps_per_turn = 1000
    first = floor.ask("a1", "a", output=60)
    floor.work_until(0, lambda: first.produced > 3)
    second = floor.ask("a2", "a", output=20)
    floor.work_until(0, lambda: bool(mixed(floor)))
    floor.work_until(0, lambda: floor.up[0].turn is not None)

    floor.ask("b1", "b")
    floor.now += seconds
    floor.tell(Ticked())
    floor.settle()

    ended = [event for _, event, _ in floor.journal if isinstance(event, TurnEnded)]
    (turn,) = mixed(floor)
    assert [e.reason for e in ended if e.turn == turn.turn] == [TurnEnd.PREEMPTED]
    assert (first.prefills, second.prefills) == (1, 1)
    assert {life.outcome for life in floor.world.lives.values()} == {FinishReason.LENGTH}


def test_a_mixed_turn_that_was_ended_leaves_nothing_to_go_on_with() -> None:
    """A mixed turn is there for its prompt, not for a round: ended early, it does not come before
    the turns that were planned, and those of other models are not put off for ever."""
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in "ab"}, stranger=PdAggregated())
    floor.start()
    floor.settle()
    busy = [floor.ask(f"a{n}", "a", prompt=30, output=6) for n in range(12)]
    other = floor.ask("b1", "b", output=20)
    planned = 0

    for _ in range(1500):
        floor.now += 0.02
        floor.work(0)
        if sum(life.outcome is None for life in busy) < 12:
            busy.append(floor.ask(f"a{len(busy)}", "a", prompt=30, output=6))
        planned = max(planned, len(floor.machine.instances[0].work))

    assert mixed(floor)
    assert other.outcome is FinishReason.LENGTH
    assert planned <= 2


def embed(floor: FloorDouble, *names: str, prompt: int = 20, kind: Kind = Kind.INTERACTIVE) -> None:
    """Prompts of the model a, after which nothing comes."""
    for name in names:
        floor.ask(name, "a", prompt=prompt, output=0, kind=kind)


def test_prompts_that_are_embedded_share_steps() -> None:
    """Those that wait are one turn of nothing else; the first has begun alone. No policy is asked
    about a turn in which nobody decodes, and none is told of it."""
    floor = floor_of(requests=4)
    names = [f"e{number}" for number in range(8)]
    embed(floor, *names)
    floor.settle()

    assert [command.request for command in floor.commands(RunPrefill)] == ["e0"]
    turns = floor.commands(RunTurn)
    assert [turn.prompts for turn in turns] == [tuple(names[1:5]), tuple(names[5:])]
    assert [(turn.requests, turn.chunk_tokens) for turn in turns] == [((), 80), ((), 60)]
    assert {floor.world.lives[name].outcome for name in names} == {FinishReason.STOP}
    assert {floor.world.lives[name].prefills for name in names} == {1}
    instance = floor.machine.instances[0]
    assert (instance.last_turn, instance.prefills_since_turn) == (None, 8)
    assert floor.machine.host.kv_slabs == 0


def test_what_is_embedded_together() -> None:
    """Not more than a step computes, nor batch work beside what somebody waits for."""
    floor = floor_of(slabs=400)
    embed(floor, "first")
    long = [f"long{number}" for number in range(9)]
    embed(floor, *long, prompt=250)
    embed(floor, "batch0", "batch1", kind=Kind.BATCH)
    floor.settle()

    assert [command.request for command in floor.commands(RunPrefill)] == ["first", "long8"]
    assert [turn.prompts for turn in floor.commands(RunTurn)] == [
        tuple(long[:8]),
        ("batch0", "batch1"),
    ]


def test_who_comes_meanwhile_ends_no_embedding() -> None:
    """A turn in which nobody decodes is over in a step: it is not ended for a request."""
    floor = floor_of(requests=4)
    embed(floor, "first", "second", "third")
    while not floor.commands(RunTurn):
        floor.work(0)
    chat = floor.ask("chat", "a", output=3)
    floor.settle()

    (turn, *_) = floor.commands(RunTurn)
    assert (turn.requests, turn.prompts) == ((), ("second", "third"))
    ended = [event for _, event, _ in floor.journal if isinstance(event, TurnEnded)]
    assert [e.reason for e in ended if e.turn == turn.turn] == [TurnEnd.DRAINED]
    assert {life.prefills for life in floor.world.lives.values()} == {1}
    assert chat.outcome is FinishReason.LENGTH
