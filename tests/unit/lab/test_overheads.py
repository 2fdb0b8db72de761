"""What a journal tells of a daemon besides computing and copying."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from appliance.lab.replay.overheads import Overheads
from appliance.vocabulary import (
    Command,
    Direction,
    Event,
    EvictModel,
    InstanceLost,
    KvMove,
    KvMoved,
    LoadModel,
    ModelLoaded,
    MoveKv,
    PrefetchModel,
    PrefillDone,
    RunPrefill,
    RunTurn,
    Ticked,
    TurnEnd,
    TurnEnded,
)

LOAD = LoadModel(instance=0, model="m")
PREFETCH = PrefetchModel(instance=0, model="other")
EVICT = EvictModel(instance=0, model="m")
PROMPT = RunPrefill(instance=0, model="m", request="r", kv_slabs=1)
PROMPT_DONE = PrefillDone(instance=0, model="m", request="r", kv_slabs=1, seconds=2.0)
TURN = RunTurn(instance=0, model="m", turn=1, requests=("r",), quota_seconds=1.0, kv_slabs=1)
MIXED = RunTurn(
    instance=0, model="m", turn=1, requests=(), quota_seconds=1.0, kv_slabs=1, prompts=("r",)
)
TURN_ENDED = TurnEnded(
    instance=0, model="m", turn=1, reason=TurnEnd.DRAINED, steps=3, seconds=2.0, kv_slabs=1
)
MOVE_IN = MoveKv(
    instance=0,
    model="m",
    direction=Direction.IN,
    moves=(KvMove(request="r", host_offsets=(0,)),),
    kv_slabs=1,
)
MOVED_IN = KvMoved(
    instance=0,
    model="m",
    direction=Direction.IN,
    moved=("r",),
    missing=(),
    moved_bytes=9,
    seconds=0.5,
    kv_slabs=1,
)


def loaded(seconds: float = 1.0, model: str = "m") -> ModelLoaded:
    return ModelLoaded(
        instance=0, model=model, moved_bytes=100, seconds=seconds, queued_seconds=0.25
    )


def heard(*steps: tuple[float, Event, Sequence[Command]], times: int = 8) -> Overheads:
    """The same so many times, each at times of its own."""
    overheads = Overheads()
    for number in range(times):
        for now, event, commands in steps:
            overheads.hear(100.0 * number + now, event, commands)
    return overheads


WARM_PROMPTS = ((0.0, Ticked(), [PROMPT]), (2.5, PROMPT_DONE, []))
WARM_TURNS = ((10.0, Ticked(), [TURN]), (12.5, TURN_ENDED, []))
COLD_TURNS = (
    (20.0, Ticked(), [EVICT, LOAD, TURN]),
    (21.0, loaded(), []),
    (24.75, TURN_ENDED, []),
)
COLD_PROMPTS = (
    (30.0, Ticked(), [EVICT, LOAD, PROMPT]),
    (31.0, loaded(2.0), []),
    (36.0, PROMPT_DONE, []),
)


@pytest.mark.parametrize("steps", [WARM_PROMPTS, WARM_TURNS])
def test_orders_take_what_the_job_did_not(
    steps: Sequence[tuple[float, Event, Sequence[Command]]],
) -> None:
    """From order to report, less the seconds that the job took by its own account."""
    assert heard(*steps).order_seconds() == 0.5


def test_mapping_is_what_a_turn_waits_besides_its_load() -> None:
    """4.75 seconds less 2 of the turn, 1.25 of the load, 0.5 of the order."""
    overheads = heard(*WARM_TURNS, *COLD_TURNS)
    assert overheads.mapping_seconds() == 1.0


def test_interference_is_what_is_left_of_a_prompt() -> None:
    """6 seconds less 0.5 of the order, 1 of mapping, and those that were to be expected."""
    overheads = heard(*WARM_TURNS, *COLD_TURNS, *COLD_PROMPTS)
    assert overheads.interference_seconds(lambda prompt: 4.0) == 0.5
    assert overheads.interference_seconds(lambda prompt: 5.0) == 0.0
    assert overheads.interference_seconds(lambda prompt: None) == 0.0


def test_too_little_says_nothing() -> None:
    """Of fewer than eight of a kind nothing is concluded."""
    overheads = heard(*WARM_TURNS, *COLD_TURNS, *COLD_PROMPTS, times=7)
    assert overheads.order_seconds() == overheads.mapping_seconds() == 0.0
    assert overheads.interference_seconds(lambda prompt: 1.0) == 0.0


def test_the_rate_of_loads_is_that_of_those_that_were_waited_for() -> None:
    """Under a prompt they are slower; where no turn waited, theirs is all that is known."""
    assert heard(*COLD_TURNS, *COLD_PROMPTS).load_bytes_per_second() == 100.0
    assert heard(*COLD_PROMPTS).load_bytes_per_second() == 50.0
    assert heard(*WARM_TURNS).load_bytes_per_second() is None


def test_a_load_with_another_one_says_nothing_of_the_rate() -> None:
    """Nor does one beside KV that comes in; what is evicted does not come in any more."""
    other = loaded(model="other")
    both = [(0.0, Ticked(), [LOAD, PREFETCH]), (1.0, loaded(4.0), []), (2.0, other, [])]
    moved = [(0.0, Ticked(), [LOAD, MOVE_IN]), (1.0, loaded(4.0), []), (2.0, MOVED_IN, [])]
    assert heard(*both).load_bytes_per_second() is None
    assert heard(*moved).load_bytes_per_second() is None
    gone = [(0.0, Ticked(), [LOAD]), (0.5, Ticked(), [EVICT, LOAD]), (1.0, loaded(), [])]
    assert heard(*gone).load_bytes_per_second() == 100.0


@pytest.mark.parametrize(
    "first",
    [
        (0.0, Ticked(), [MOVE_IN, TURN]),
        (0.0, Ticked(), [PREFETCH, TURN]),
        (0.0, Ticked(), [PROMPT, TURN]),
        (0.0, Ticked(), [MIXED]),
    ],
)
def test_who_waits_for_something_else_says_nothing(
    first: tuple[float, Event, Sequence[Command]],
) -> None:
    """For KV, for another load, for a job before it, for its own prompts."""
    lost: tuple[float, Event, Sequence[Command]] = (50.0, InstanceLost(instance=0), [])
    assert heard(first, (9.0, TURN_ENDED, []), lost).order_seconds() == 0.0


def test_a_machine_that_stood_still_is_left_out() -> None:
    """One wait in nine that is a hundred times as long is not what orders take."""
    overheads = heard(*WARM_TURNS, times=9)
    overheads.hear(5000.0, Ticked(), [TURN])
    overheads.hear(5052.0, TURN_ENDED, [])
    assert overheads.order_seconds() == 0.5
