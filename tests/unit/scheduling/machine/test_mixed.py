"""Mixed turns: prompts computed in chunks beside the decoding steps of the same model."""

from __future__ import annotations

from itertools import cycle

import pytest

from appliance.plugins.pd_aggregated import PdAggregated
from appliance.scheduling.cost_model import UNSEEN_TURNS
from appliance.scheduling.lifecycle import Stage
from appliance.scheduling.policy_api import BatchLimits, Phase
from appliance.scheduling.recovery import MAX_REQUEST_LOSSES
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
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

CHUNK = 16


def chunking(requests: int = 64) -> Told:
    """Prompts come as soon as they may, beside the steps of their model."""
    return Told(
        batch=lambda: BatchLimits(requests=requests, chunk_tokens=CHUNK),
        phase=lambda: Phase.PREFILL,
    )


def cluster_of(
    names: str = "ab", *, slabs: int = 40, requests: int = 64, steps: int = 10
) -> ClusterDouble:
    """One instance with every engine built and nothing to do."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names},
        slabs=slabs,
        stranger=chunking(requests),
    )
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = steps
    return cluster


def mixed(cluster: ClusterDouble) -> list[RunTurn]:
    return [command for command in cluster.commands(RunTurn) if command.prompts]


def test_a_prompt_is_computed_in_the_steps() -> None:
    """A prompt of the model that decodes is part of a turn, in chunks; it is computed once, decodes
    from the next turn on, and no request waits for it."""
    cluster = cluster_of()
    first = cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: first.produced > 3)

    second = cluster.ask("a2", "a", output=20)
    cluster.settle()

    (turn,) = mixed(cluster)
    assert (turn.requests, turn.prompts, turn.chunk_tokens) == (("a1",), ("a2",), CHUNK)
    assert [command.request for command in cluster.commands(RunPrefill)] == ["a1"]
    later = cluster.commands(RunTurn)[cluster.commands(RunTurn).index(turn) + 1]
    assert set(later.requests) == {"a1", "a2"}
    assert later.chunk_tokens == 0
    assert cluster.machine.preemptions == {"a": 0, "b": 0}
    for life in (first, second):
        assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_the_limits_of_a_mixed_turn_are_asked_for_once() -> None:
    """A policy that would answer otherwise when asked again makes no turn that cannot be."""
    chunks = cycle([CHUNK, 0])
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())},
        slabs=40,
        stranger=Told(
            batch=lambda: BatchLimits(requests=64, chunk_tokens=next(chunks)),
            phase=lambda: Phase.PREFILL,
        ),
    )
    cluster.start()
    for index in range(10):
        cluster.ask(f"r{index}", "a", output=30)
        cluster.work_until(0, lambda name=f"r{index}": name in cluster.prompts())
    cluster.settle()

    assert {turn.chunk_tokens for turn in mixed(cluster)} == {CHUNK}
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_a_prompt_of_another_model_is_computed_alone() -> None:
    """Only prompts of the model that decodes can go beside its steps."""
    cluster = cluster_of()
    cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)

    cluster.ask("b1", "b", output=2)
    cluster.settle()

    assert mixed(cluster) == []
    assert [command.request for command in cluster.commands(RunPrefill)] == ["a1", "b1"]


def test_a_prompt_that_leaves_no_room_for_a_step_is_computed_alone() -> None:
    """If not even one request fits beside the prompt, the prompt is computed first, alone."""
    cluster = cluster_of("a", slabs=4 + 10)
    first = cluster.ask("a1", "a", prompt=100, output=60)
    cluster.work_until(0, lambda: first.produced > 3)

    second = cluster.ask("a2", "a", prompt=220, output=20)
    cluster.settle()

    assert mixed(cluster) == []
    assert (first.outcome, second.outcome) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert first.prefills == second.prefills == 1


def test_a_mixed_turn_says_nothing_of_steps() -> None:
    """Steps that computed a prompt too do not change what a step is expected to cost."""
    cluster = cluster_of("a")
    life = cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: life.produced > 15)
    known = cluster.machine.costs.step_seconds("a")

    cluster.ask("a2", "a", output=1)
    cluster.work_until(0, lambda: bool(mixed(cluster)))
    ended = len([event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)])

    def one_more() -> bool:
        return len([e for _, e, _ in cluster.journal if isinstance(e, TurnEnded)]) > ended

    cluster.work_until(0, one_more)
    assert cluster.machine.costs.step_seconds("a") == known


def test_a_prompt_is_computed_alone_if_all_were_computed_in_steps() -> None:
    """The first prompt comes while weights load, and says nothing of prompts; all others have steps
    to be computed in. After some of these one is computed alone, so that costs are known, and then
    they are computed in steps again."""
    cluster = cluster_of("a", steps=1)
    long = cluster.ask("long", "a", output=150)
    cluster.work_until(0, lambda: long.produced > 3)
    for number in range(2 * UNSEEN_TURNS):
        life = cluster.ask(f"r{number}", "a", output=2)
        cluster.work_until(0, lambda life=life: life.outcome is not None)  # type: ignore[misc]

    alone = [command.request for command in cluster.commands(RunPrefill)]
    assert alone == ["long", f"r{UNSEEN_TURNS}"]
    assert len(mixed(cluster)) == 2 * UNSEEN_TURNS - 1


def test_a_prompt_that_did_not_fit_a_mixed_turn_comes_next() -> None:
    """A prompt that its worker could not fit beside the steps goes back to the front of the queue,
    with nothing of it kept, while the turn goes on; it is computed before those behind it."""
    cluster = cluster_of("a", requests=1)
    first = cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: first.produced > 3)
    cluster.up[0].deferring.add("a2")
    second = cluster.ask("a2", "a", output=20)
    third = cluster.ask("a3", "a", output=20)
    cluster.work_until(0, lambda: not cluster.up[0].deferring)

    assert cluster.machine.requests["a1"].stage is Stage.RUNNING
    assert cluster.machine.requests["a2"].host_offsets == ()
    assert waiting(cluster) == {"a2", "a3"}
    cluster.settle()
    assert [turn.prompts for turn in mixed(cluster)] == [("a2",), ("a2",), ("a3",)]
    for life in (first, second, third):
        assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_a_cancelled_prompt_of_a_mixed_turn_leaves_nothing() -> None:
    """A request that is cancelled while its prompt is computed beside others' steps is forgotten;
    the others go on."""
    cluster = cluster_of("a")
    first = cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: first.produced > 3)
    cluster.ask("a2", "a", output=20)
    cluster.work_until(0, lambda: "a2" not in waiting(cluster))
    assert cluster.machine.requests["a2"].stage is Stage.PREFILLING

    cluster.cancel("a2")
    cluster.settle()

    assert first.outcome == FinishReason.LENGTH
    assert [command.request for command in cluster.commands(Finish)] == ["a2", "a1"]
    assert cluster.machine.host.kv_slabs == 0


def waiting(cluster: ClusterDouble) -> set[str]:
    groups = cluster.machine.instances[0].groups
    return {name for group in groups for name in group.members}


def test_prompts_of_a_turn_that_kills_workers_are_given_up() -> None:
    """A loss during a mixed turn counts for its prompts as for those that decode."""
    cluster = cluster_of("a")
    cluster.ask("a1", "a", output=200)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)
    life = cluster.ask("a2", "a", output=200)
    for _ in range(MAX_REQUEST_LOSSES):
        assert life.outcome is None
        cluster.work_until(0, lambda: cluster.machine.requests["a2"].stage is Stage.PREFILLING)
        cluster.lose(0)
        cluster.start(0)

    assert life.outcome == "request_failed"


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_mixed_turn_may_be_preempted(seconds: float) -> None:
    """A mixed turn is ended like any other; its prompt has been computed."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        slabs=40,
        stranger=Told(
            batch=lambda: BatchLimits(requests=64, chunk_tokens=CHUNK),
            phase=lambda: Phase.PREFILL,
            preempt=lambda instance: seconds if instance.groups[0].model == "b" else 0.0,
        ),
    )
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = 1000
    first = cluster.ask("a1", "a", output=60)
    cluster.work_until(0, lambda: first.produced > 3)
    second = cluster.ask("a2", "a", output=20)
    cluster.work_until(0, lambda: bool(mixed(cluster)))
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)

    cluster.ask("b1", "b")
    cluster.now += seconds
    cluster.tell(Ticked())
    cluster.settle()

    ended = [event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]
    (turn,) = mixed(cluster)
    assert [e.reason for e in ended if e.turn == turn.turn] == [TurnEnd.PREEMPTED]
    assert (first.prefills, second.prefills) == (1, 1)
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_a_mixed_turn_that_was_ended_leaves_nothing_to_go_on_with() -> None:
    """A mixed turn is there for its prompt, not for a round: ended early, it does not come before
    the turns that were planned, and those of other models are not put off for ever."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, stranger=PdAggregated()
    )
    cluster.start()
    cluster.settle()
    busy = [cluster.ask(f"a{n}", "a", prompt=30, output=6) for n in range(12)]
    other = cluster.ask("b1", "b", output=20)
    planned = 0

    for _ in range(1500):
        cluster.now += 0.02
        cluster.work(0)
        if sum(life.outcome is None for life in busy) < 12:
            busy.append(cluster.ask(f"a{len(busy)}", "a", prompt=30, output=6))
        planned = max(planned, len(cluster.machine.instances[0].work))

    assert mixed(cluster)
    assert other.outcome is FinishReason.LENGTH
    assert planned <= 2


def embed(
    cluster: ClusterDouble, *names: str, prompt: int = 20, kind: Kind = Kind.INTERACTIVE
) -> None:
    """Prompts of the model a, after which nothing comes."""
    for name in names:
        cluster.ask(name, "a", prompt=prompt, output=0, kind=kind)


def test_prompts_that_are_embedded_share_steps() -> None:
    """Those that wait are one turn of nothing else; the first has begun alone. No policy is asked
    about a turn in which no request decodes, and no policy learns of it."""
    cluster = cluster_of(requests=4)
    names = [f"e{number}" for number in range(8)]
    embed(cluster, *names)
    cluster.settle()

    assert [command.request for command in cluster.commands(RunPrefill)] == ["e0"]
    turns = cluster.commands(RunTurn)
    assert [turn.prompts for turn in turns] == [tuple(names[1:5]), tuple(names[5:])]
    assert [(turn.requests, turn.chunk_tokens) for turn in turns] == [((), 80), ((), 60)]
    assert {cluster.world.lives[name].outcome for name in names} == {FinishReason.STOP}
    assert {cluster.world.lives[name].prefills for name in names} == {1}
    instance = cluster.machine.instances[0]
    assert (instance.last_turn, instance.prefills_since_turn) == (None, 8)
    assert cluster.machine.host.kv_slabs == 0


def test_what_is_embedded_together() -> None:
    """Not more than a step computes, nor batch work beside an interactive prompt."""
    cluster = cluster_of(slabs=400)
    embed(cluster, "first")
    long = [f"long{number}" for number in range(9)]
    embed(cluster, *long, prompt=250)
    embed(cluster, "batch0", "batch1", kind=Kind.BATCH)
    cluster.settle()

    assert [command.request for command in cluster.commands(RunPrefill)] == ["first", "long8"]
    assert [turn.prompts for turn in cluster.commands(RunTurn)] == [
        tuple(long[:8]),
        ("batch0", "batch1"),
    ]


def test_who_comes_meanwhile_ends_no_embedding() -> None:
    """A turn in which no request decodes is over in a step: it is not ended for a request."""
    cluster = cluster_of(requests=4)
    embed(cluster, "first", "second", "third")
    while not cluster.commands(RunTurn):
        cluster.work(0)
    chat = cluster.ask("chat", "a", output=3)
    cluster.settle()

    (turn, *_) = cluster.commands(RunTurn)
    assert (turn.requests, turn.prompts) == ((), ("second", "third"))
    ended = [event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]
    assert [e.reason for e in ended if e.turn == turn.turn] == [TurnEnd.DRAINED]
    assert {life.prefills for life in cluster.world.lives.values()} == {1}
    assert chat.outcome is FinishReason.LENGTH
