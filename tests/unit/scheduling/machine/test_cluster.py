"""Several instances: partitions for prefill and decode, losses, and what survives them."""

from __future__ import annotations

import pytest

from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.model_lifecycle import MAX_MODEL_LOSSES
from appliance.scheduling.recovery import MAX_REQUEST_LOSSES
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
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def partitions(instances: int, *, built: bool = True) -> ClusterDouble:
    """Aegaeon's partitions: instance 0 prefills, the others decode."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy="aegaeon", instances=instances)
    cluster.start()
    if built:
        cluster.settle()
    return cluster


def until_kv(cluster: ClusterDouble, worker: int, name: str, kv: KvPlace) -> None:
    cluster.work_until(worker, lambda: cluster.machine.requests[name].kv is kv)


def test_kv_moves_from_the_prefill_to_the_decode_partition() -> None:
    """A prompt is computed on one instance, its KV goes through the host tier, its source forgets
    it, and all its turns run on the other instance."""
    cluster = partitions(2)

    life = cluster.ask("r", "a", output=20)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in cluster.commands(RunPrefill)] == [0]
    assert {command.instance for command in cluster.commands(RunTurn)} == {1}
    moves = [(command.instance, command.direction) for command in cluster.commands(MoveKv)]
    assert moves == [(0, Direction.OUT), (1, Direction.IN)]
    assert cluster.commands(Release) == [Release(instance=0, model="a", request="r")]
    out, back = cluster.commands(MoveKv)
    assert out.moves == back.moves


def test_what_moved_out_is_free() -> None:
    """Slabs of KV that left a device are there for the next model; no other KV has to go."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy="aegaeon", instances=2, slabs=12)
    cluster.start()
    cluster.settle()
    cluster.ask("a1", "a", prompt=180, output=2)
    cluster.work_until(0, lambda: not cluster.up[0].busy)

    cluster.ask("b1", "b")
    cluster.settle()

    assert [command for command in cluster.commands(EvictModel) if command.instance == 0] == []


def test_a_lone_decoder_prefills_too() -> None:
    """When the prefill partition is gone, who is left does everything."""
    cluster = partitions(2)
    cluster.lose(0)

    life = cluster.ask("r", "a")
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in cluster.commands(RunPrefill)] == [1]
    assert cluster.commands(MoveKv) == []


def test_a_lone_prefiller_decodes_too() -> None:
    """When the decode partition is gone, its requests go on where prompts are computed."""
    cluster = partitions(2)
    life = cluster.ask("r", "a", output=20)
    cluster.work_until(0, lambda: not cluster.up[0].busy)
    cluster.work_until(1, lambda: life.produced > 3)

    cluster.lose(1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert [command.instance for command in cluster.commands(RunPrefill)] == [0, 0]
    assert cluster.commands(RunTurn)[-1].instance == 0


def test_kv_in_the_host_tier_survives_its_decoder() -> None:
    """KV that waits in the host tier for an instance that dies is decoded by another one, even one
    that has yet to build the engine."""
    cluster = partitions(3, built=False)
    cluster.work_until(0, lambda: not cluster.up[0].busy)
    life = cluster.ask("r", "b")
    until_kv(cluster, 0, "r", KvPlace.HOST)
    assert cluster.machine.requests["r"].instance == 1
    instance = cluster.machine.instances[1]
    assert not instance.engines["b"].built
    assert cluster.machine.device_room.sequences(instance, "b") == 64

    cluster.lose(1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1
    assert {command.instance for command in cluster.commands(RunTurn)} == {2}


def test_kv_on_its_way_in_survives_its_decoder() -> None:
    """Moving KV inwards reads the host tier, so a loss meanwhile costs nothing."""
    cluster = partitions(3)
    life = cluster.ask("r", "a")
    until_kv(cluster, 0, "r", KvPlace.ARRIVING)

    cluster.lose(1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_kv_on_its_way_out_does_not_survive_its_source() -> None:
    """KV that was still leaving the lost device is computed again."""
    cluster = partitions(3)
    life = cluster.ask("r", "a")
    until_kv(cluster, 0, "r", KvPlace.LEAVING)

    cluster.lose(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 2
    assert cluster.machine.host.kv_slabs == 0


def test_kv_on_its_way_out_survives_its_destination() -> None:
    """If the instance that was to decode dies, KV that is still leaving goes to another one."""
    cluster = partitions(3)
    life = cluster.ask("r", "a")
    until_kv(cluster, 0, "r", KvPlace.LEAVING)

    cluster.lose(1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_kv_that_was_to_leave_stays_when_only_its_source_is_left() -> None:
    """If the source of a move is the last instance, the request decodes there."""
    cluster = partitions(2)
    life = cluster.ask("r", "a")
    until_kv(cluster, 0, "r", KvPlace.LEAVING)

    cluster.lose(1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1
    assert cluster.commands(Release) == []


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.PREFILLING, Stage.READY, Stage.RUNNING])
def test_a_loss_in_any_stage(stage: Stage) -> None:
    """A request on an instance that dies waits for an instance and then comes to its end."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models)
    cluster.start()
    cluster.settle()
    first = cluster.ask("first", "a", output=1)
    life = cluster.ask("r", "a", output=20)
    other = cluster.ask("other", "b", output=20)
    cluster.work_until(0, lambda: cluster.machine.requests["r"].stage is stage)

    cluster.lose(0)

    assert cluster.machine.requests["r"].stage is Stage.UNPLACED
    assert cluster.machine.host.kv_slabs == 0
    cluster.start()
    cluster.settle()
    outcomes = [life.outcome for life in (first, life, other)]
    assert outcomes == [FinishReason.LENGTH] * 3
    assert life.produced == 20


def test_who_waits_for_an_instance_keeps_its_order() -> None:
    """Requests that no instance could take are placed in the order they came."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, policy="serverlessllm")
    for index in range(12):
        cluster.ask(f"r{index}", "a")

    cluster.start()
    cluster.settle()

    assert cluster.prompts() == [f"r{index}" for index in range(12)]


def test_an_instance_lost_before_it_was_up_is_no_news() -> None:
    """The death of a worker that never said hello orders nothing and costs nothing."""
    cluster = partitions(2)

    cluster.lose(0)
    commands = cluster.tell(InstanceLost(instance=0))

    assert commands == []


def test_moves_of_ended_requests_settle_nothing() -> None:
    """A report about KV of a request that is gone changes no books."""
    cluster = partitions(2)
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

    assert cluster.tell(moved) == []


def test_a_request_longer_than_the_host_tier_holds_up_no_other() -> None:
    """It starts without places when no other holds any, and others follow, on whichever instance
    they wait."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    cluster = ClusterDouble(models, policy="serverlessllm", instances=3, host_slabs=12 + 5)
    cluster.start()
    cluster.settle()
    lives = [
        cluster.ask("holder", "a", prompt=150, output=30),
        cluster.ask("b1", "b", prompt=150, output=30),
        cluster.ask("too long", "c", prompt=200, output=50),
        cluster.ask("b2", "b", prompt=20, output=5),
    ]

    cluster.settle()

    assert [life.outcome for life in lives] == ["length"] * 4


def test_places_scattered_by_weights() -> None:
    """Blocks larger than a slab need slabs in a row; a request that finds too few of them in a tier
    without any KV never will, and starts without instead of keeping all others waiting."""
    models = {"a": ModelDouble(1, shape()), "b": ModelDouble(1, shape(block_bytes=1500))}
    cluster = ClusterDouble(models, host_slabs=10)
    cluster.start()
    cluster.work_until(0, lambda: len(cluster.commands(BuildModel)) == 2)
    cluster.ask("holds the second slab", "a", prompt=10, output=30)
    cluster.up[0].queue.rotate()
    cluster.settle()

    wide = cluster.ask("wide", "b", prompt=60, output=4)
    narrow = cluster.ask("narrow", "a")
    cluster.settle()

    assert wide.outcome == FinishReason.LENGTH
    assert narrow.outcome == FinishReason.LENGTH


def test_the_longest_wait_for_the_host_tier_survives_a_move() -> None:
    """A request that was first in line for the host tier when its instance died is first in line
    where it goes, though others wait there already: they could not go before it."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, policy="serverlessllm", instances=2, host_slabs=4 + 6
    )
    cluster.start()
    cluster.settle()
    cluster.ask("first", "a", prompt=200, output=40)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)
    cluster.ask("longest", "a", prompt=200, output=40)
    cluster.ask("later", "a", prompt=200, output=40)
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)

    cluster.lose(1)
    cluster.settle()

    order = [command.request for command in cluster.commands(RunPrefill)]
    assert order == ["first", "longest", "later"]
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_a_request_that_kills_workers_is_given_up() -> None:
    """What is being computed when a worker dies, again and again without a token in between, ends
    with an error; who got a token since goes on."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, instances=1)
    cluster.start()
    cluster.settle()
    life = cluster.ask("r", "a", output=50)
    for _ in range(MAX_REQUEST_LOSSES):
        cluster.work_until(0, lambda: bool(cluster.commands(RunPrefill)))
        assert life.outcome is None
        cluster.lose(0)
        cluster.journal.clear()
        cluster.start(0)
    assert life.outcome == "request_failed"

    other = cluster.ask("s", "a", output=50)
    for _ in range(MAX_REQUEST_LOSSES + 2):
        before = other.produced
        cluster.work_until(0, lambda before=before: other.produced > before + 2)
        cluster.lose(0)
        cluster.start(0)
    cluster.settle()
    assert other.outcome == "length"


def test_a_model_that_kills_workers_is_given_up() -> None:
    """Whichever of its requests a worker dies of, the next one's does: the model fails, by name,
    and others are served. A token in between forgives."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "ab"}, instances=1)
    cluster.start()
    cluster.settle()

    def deaths(name: str, count: int) -> None:
        cluster.ask(name, "a", output=50)
        for _ in range(count):
            cluster.work_until(0, lambda: isinstance(cluster.machine.instances[0].job, PrefillJob))
            cluster.lose(0)
            cluster.start(0)

    deaths("r0", MAX_REQUEST_LOSSES - 1)
    cluster.settle()
    assert cluster.world.lives["r0"].outcome == "length"

    for number in range(1, 1 + MAX_MODEL_LOSSES // MAX_REQUEST_LOSSES):
        assert cluster.machine.failed == {}
        deaths(f"r{number}", MAX_REQUEST_LOSSES)
        assert cluster.world.lives[f"r{number}"].outcome == "request_failed"

    told = f"{MAX_MODEL_LOSSES} workers in a row died computing its requests"
    assert cluster.machine.failed == {"a": told}
    assert cluster.ask("late", "a").outcome == "model_failed"
    other = cluster.ask("other", "b")
    cluster.settle()
    assert other.outcome == "length"
