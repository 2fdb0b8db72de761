"""Several instances: partitions for prefill and decode, losses, and what survives them."""

from __future__ import annotations

import pytest

from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.machine import MAX_MODEL_LOSSES, MAX_REQUEST_LOSSES
from appliance.scheduling.state import PrefillJob
from appliance.vocabulary import (
    BuildModel,
    Direction,
    EvictModel,
    FinishReason,
    InstanceLost,
    KvMoved,
    MoveKv,
    Release,
    RunPrefill,
    RunTurn,
)
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def partitions(instances: int, *, built: bool = True) -> FloorDouble:
    """Aegaeon's partitions: instance 0 prefills, the others decode."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    floor = FloorDouble(models, policy="aegaeon", instances=instances)
    floor.start()
    if built:
        floor.settle()
    return floor


def until_kv(floor: FloorDouble, worker: int, name: str, kv: KvPlace) -> None:
    floor.work_until(worker, lambda: floor.machine.requests[name].kv is kv)


def test_kv_moves_from_the_prefill_to_the_decode_partition() -> None:
    """A prompt is computed on one instance, its KV goes through the host tier, its source forgets
    it, and all its turns run on the other instance."""
    floor = partitions(2)

    life = floor.ask("r", "a", output=20)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in floor.commands(RunPrefill)] == [0]
    assert {command.instance for command in floor.commands(RunTurn)} == {1}
    moves = [(command.instance, command.direction) for command in floor.commands(MoveKv)]
    assert moves == [(0, Direction.OUT), (1, Direction.IN)]
    assert floor.commands(Release) == [Release(instance=0, model="a", request="r")]
    out, back = floor.commands(MoveKv)
    assert out.moves == back.moves


def test_what_moved_out_is_free() -> None:
    """Slabs of KV that left a device are there for the next model; nobody else has to go."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    floor = FloorDouble(models, policy="aegaeon", instances=2, slabs=12)
    floor.start()
    floor.settle()
    floor.ask("a1", "a", prompt=180, output=2)
    floor.work_until(0, lambda: not floor.up[0].busy)

    floor.ask("b1", "b")
    floor.settle()

    assert [command for command in floor.commands(EvictModel) if command.instance == 0] == []


def test_a_lone_decoder_prefills_too() -> None:
    """When the prefill partition is gone, who is left does everything."""
    floor = partitions(2)
    floor.lose(0)

    life = floor.ask("r", "a")
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in floor.commands(RunPrefill)] == [1]
    assert floor.commands(MoveKv) == []


def test_a_lone_prefiller_decodes_too() -> None:
    """When the decode partition is gone, its requests go on where prompts are computed."""
    floor = partitions(2)
    life = floor.ask("r", "a", output=20)
    floor.work_until(0, lambda: not floor.up[0].busy)
    floor.work_until(1, lambda: life.produced > 3)

    floor.lose(1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in floor.commands(RunPrefill)] == [0, 0]
    assert floor.commands(RunTurn)[-1].instance == 0


def test_kv_in_the_host_tier_survives_its_decoder() -> None:
    """KV that waits in the host tier for an instance that dies is decoded by another one, even one
    that has yet to build the engine."""
    floor = partitions(3, built=False)
    floor.work_until(0, lambda: not floor.up[0].busy)
    life = floor.ask("r", "b")
    until_kv(floor, 0, "r", KvPlace.HOST)
    assert floor.machine.requests["r"].instance == 1

    floor.lose(1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1
    assert {command.instance for command in floor.commands(RunTurn)} == {2}


def test_kv_on_its_way_in_survives_its_decoder() -> None:
    """Moving KV inwards reads the host tier, so a loss meanwhile costs nothing."""
    floor = partitions(3)
    life = floor.ask("r", "a")
    until_kv(floor, 0, "r", KvPlace.ARRIVING)

    floor.lose(1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_kv_on_its_way_out_does_not_survive_its_source() -> None:
    """KV that was still leaving the lost device is computed again."""
    floor = partitions(3)
    life = floor.ask("r", "a")
    until_kv(floor, 0, "r", KvPlace.LEAVING)

    floor.lose(0)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 2
    assert floor.machine.host.kv_slabs == 0


def test_kv_on_its_way_out_survives_its_destination() -> None:
    """If the instance that was to decode dies, KV that is still leaving goes to another one."""
    floor = partitions(3)
    life = floor.ask("r", "a")
    until_kv(floor, 0, "r", KvPlace.LEAVING)

    floor.lose(1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_kv_that_was_to_leave_stays_when_only_its_source_is_left() -> None:
    """If the source of a move is the last instance, the request decodes there."""
    floor = partitions(2)
    life = floor.ask("r", "a")
    until_kv(floor, 0, "r", KvPlace.LEAVING)

    floor.lose(1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1
    assert floor.commands(Release) == []


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.PREFILLING, Stage.READY, Stage.RUNNING])
def test_a_loss_in_any_stage(stage: Stage) -> None:
    """A request on an instance that dies waits for an instance and then comes to its end."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    floor = FloorDouble(models)
    floor.start()
    floor.settle()
    first = floor.ask("first", "a", output=1)
    life = floor.ask("r", "a", output=20)
    other = floor.ask("other", "b", output=20)
    floor.work_until(0, lambda: floor.machine.requests["r"].stage is stage)

    floor.lose(0)

    assert floor.machine.requests["r"].stage is Stage.UNPLACED
    assert floor.machine.host.kv_slabs == 0
    floor.start()
    floor.settle()
    outcomes = [life.outcome for life in (first, life, other)]
    assert outcomes == [FinishReason.LENGTH] * 3
    assert life.produced == 20


def test_who_waits_for_an_instance_keeps_its_order() -> None:
    """Requests that no instance could take are placed in the order they came."""
    floor = FloorDouble({"a": ModelDouble(4, shape())}, policy="serverlessllm")
    for index in range(12):
        floor.ask(f"r{index}", "a")

    floor.start()
    floor.settle()

    order = [command.request for command in floor.commands(RunPrefill)]
    assert order == [f"r{index}" for index in range(12)]


def test_an_instance_lost_before_it_was_up_is_no_news() -> None:
    """The death of a worker that never said hello orders nothing and costs nothing."""
    floor = partitions(2)

    floor.lose(0)
    commands = floor.tell(InstanceLost(instance=0))

    assert commands == []


def test_moves_of_ended_requests_settle_nothing() -> None:
    """A report about KV of a request that is gone changes no books."""
    floor = partitions(2)
    moved = KvMoved(
        instance=0,
        model="a",
        direction=Direction.OUT,
        moved=("ghost",),
        missing=("spectre",),
        moved_bytes=0,
        seconds=0.1,
        kv_slabs=0,
    )

    assert floor.tell(moved) == []


def test_a_rejection_lets_everybody_else_go_on() -> None:
    """When the first in line for the host tier is rejected, the next one is tried at once, on
    whichever instance it waits: nothing else may ever happen."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    floor = FloorDouble(models, policy="serverlessllm", instances=3, host_slabs=12 + 5)
    floor.start()
    floor.settle()
    lives = [
        floor.ask("holder", "a", prompt=150, output=30),
        floor.ask("b1", "b", prompt=150, output=30),
        floor.ask("too long", "c", prompt=200, output=50),
        floor.ask("b2", "b", prompt=20, output=5),
    ]

    floor.settle()

    assert [life.outcome for life in lives] == ["length", "length", "kv_too_large", "length"]


def test_places_scattered_by_weights() -> None:
    """Blocks larger than a slab need slabs in a row; a request that finds too few of them in a tier
    without any KV never will, and is rejected instead of keeping everybody waiting."""
    models = {"a": ModelDouble(1, shape()), "b": ModelDouble(1, shape(block_bytes=1500))}
    floor = FloorDouble(models, host_slabs=10)
    floor.start()
    floor.work_until(0, lambda: len(floor.commands(BuildModel)) == 2)
    floor.ask("holds the second slab", "a", prompt=10, output=30)
    floor.up[0].queue.rotate()
    floor.settle()

    wide = floor.ask("wide", "b", prompt=60, output=4)
    narrow = floor.ask("narrow", "a")
    floor.settle()

    assert wide.outcome in (FinishReason.LENGTH, "kv_too_large")
    assert narrow.outcome == FinishReason.LENGTH


def test_the_longest_wait_for_the_host_tier_survives_a_move() -> None:
    """A request that was first in line for the host tier when its instance died is first in line
    where it goes, though others wait there already: they could not go before it."""
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())}, policy="serverlessllm", instances=2, host_slabs=4 + 6
    )
    floor.start()
    floor.settle()
    floor.ask("first", "a", prompt=200, output=40)
    floor.work_until(0, lambda: floor.up[0].turn is not None)
    floor.ask("longest", "a", prompt=200, output=40)
    floor.ask("later", "a", prompt=200, output=40)
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)

    floor.lose(1)
    floor.settle()

    order = [command.request for command in floor.commands(RunPrefill)]
    assert order == ["first", "longest", "later"]
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_a_request_that_kills_workers_is_given_up() -> None:
    """What is being computed when a worker dies, again and again without a token in between, ends
    with an error; who got a token since goes on."""
    floor = FloorDouble({"a": ModelDouble(4, shape())}, instances=1)
    floor.start()
    floor.settle()
    life = floor.ask("r", "a", output=50)
    for _ in range(MAX_REQUEST_LOSSES):
        floor.work_until(0, lambda: bool(floor.commands(RunPrefill)))
        assert life.outcome is None
        floor.lose(0)
        floor.journal.clear()
        floor.start(0)
    assert life.outcome == "request_failed"

    other = floor.ask("s", "a", output=50)
    for _ in range(MAX_REQUEST_LOSSES + 2):
        before = other.produced
        floor.work_until(0, lambda before=before: other.produced > before + 2)
        floor.lose(0)
        floor.start(0)
    floor.settle()
    assert other.outcome == "length"


def test_a_model_that_kills_workers_is_given_up() -> None:
    """Whichever of its requests a worker dies of, the next one's does: the model fails, by name,
    and others are served. A token in between forgives."""
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in "ab"}, instances=1)
    floor.start()
    floor.settle()

    def deaths(name: str, count: int) -> None:
        floor.ask(name, "a", output=50)
        for _ in range(count):
            floor.work_until(0, lambda: isinstance(floor.machine.instances[0].job, PrefillJob))
            floor.lose(0)
            floor.start(0)

    deaths("r0", MAX_REQUEST_LOSSES - 1)
    floor.settle()
    assert floor.world.lives["r0"].outcome == "length"

    for number in range(1, 1 + MAX_MODEL_LOSSES // MAX_REQUEST_LOSSES):
        assert floor.machine.failed == {}
        deaths(f"r{number}", MAX_REQUEST_LOSSES)
        assert floor.world.lives[f"r{number}"].outcome == "request_failed"

    told = f"{MAX_MODEL_LOSSES} workers in a row died computing its requests"
    assert floor.machine.failed == {"a": told}
    assert floor.ask("late", "a").outcome == "model_failed"
    other = floor.ask("other", "b")
    floor.settle()
    assert other.outcome == "length"
