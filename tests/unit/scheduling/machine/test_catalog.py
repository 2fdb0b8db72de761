"""Models that join the catalogue, and leave it, while others are served."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.scheduling.lifecycle import Engine
from appliance.vocabulary import (
    BuildModel,
    DropModel,
    EvictModel,
    ModelChanged,
    ModelRemoved,
    ModelWanted,
    MoveKv,
    PrefetchModel,
    RunTurn,
    StoreWeights,
    Ticked,
)
from tests.unit.doubles.floor import SLAB, SLO, FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble

SMALL = ModelDouble(4, shape())


def floor_of(names: str = "ab", **changes: Any) -> FloorDouble:
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in names}, **changes)
    floor.start()
    floor.settle()
    return floor


def place(floor: FloorDouble, request: str) -> int:
    """Where a request is."""
    number = floor.machine.requests[request].instance
    assert number is not None
    return number


# --- joining -------------------------------------------------------------------------------------


def test_a_model_is_added_while_another_runs() -> None:
    """Its engine is built beside the others, its requests are served; nobody's are disturbed."""
    floor = floor_of("a", instances=2, policy="serverlessllm")
    running = floor.ask("r1", "a", output=20)
    floor.work_until(place(floor, "r1"), lambda: running.produced == 3)

    floor.add("b", ModelDouble(4, shape()))
    added = floor.ask("r2", "b")
    floor.settle()

    assert (running.outcome, added.outcome) == ("length", "length")
    assert (running.prefills, added.prefills) == (1, 1)
    built = [(command.instance, command.model) for command in floor.commands(BuildModel)]
    assert sorted(built) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [model.name for model in floor.machine.floor.floor_view(floor.now).models] == ["a", "b"]


def test_a_model_is_added_while_no_instance_is_up() -> None:
    """It is built by those that come."""
    floor = floor_of("a")
    floor.lose(0)
    floor.add("b", ModelDouble(4, shape()))
    waiting = floor.ask("r", "b")

    floor.start()
    floor.settle()

    assert waiting.outcome == "length"


def test_room_in_the_host_cache_is_held_back_for_it() -> None:
    """As for those of the start, if there is some: KV does not take it meanwhile."""
    floor = floor_of("a", host_slabs=10)
    assert floor.machine.host.free_slabs == 6

    floor.add("b", ModelDouble(4, shape()), pinned=True)
    floor.add("c", ModelDouble(4, shape()))
    floor.settle()

    masters = floor.machine.masters
    assert [masters.get(name) is not None for name in "abc"] == [True, True, False]
    floor.tell(ModelChanged(model="b", slo=SLO, batch_slo=SLO, pinned=False, draining=False))


def test_longer_kv_takes_room_from_weights() -> None:
    """Images of others give way until one request of the new model fits: that is served at once."""
    floor = floor_of("abc", host_slabs=14, kv_floor_slabs=2)
    assert floor.machine.host.free_slabs == 2

    floor.add("d", ModelDouble(4, shape(block_bytes=1000)), kv_floor_slabs=8)
    longest = floor.ask("r", "d", prompt=100, output=20)
    floor.settle()

    assert longest.outcome == "length"
    assert floor.machine.host.short_slabs == 0
    assert floor.machine.host.weight_slabs <= 6


def test_an_image_that_is_read_gives_way_later() -> None:
    """A request that has to wait for its room is not rejected for it."""
    floor = floor_of("a", host_slabs=8, slabs=40)
    floor.tell(ModelWanted(model="a"))
    assert floor.machine.instances[0].engines["a"].stage is Engine.LOADING

    floor.add("b", ModelDouble(4, shape(block_bytes=1000)), kv_floor_slabs=8)
    assert floor.machine.host.short_slabs == 4
    early = floor.ask("r", "b", prompt=100, output=20)
    floor.work_until(0, lambda: floor.machine.instances[0].engines["b"].built)
    floor.settle()
    floor.now += 2.0
    floor.tell(Ticked())
    floor.settle()

    assert early.outcome == "length"
    assert floor.machine.masters.get("a") is None


def test_weights_do_not_tear_the_room_of_long_blocks() -> None:
    """Blocks longer than a slab need several in a row: what lies between them goes, too."""
    floor = floor_of("abc", host_slabs=14, kv_floor_slabs=2)
    floor.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=9)
    host = floor.machine.host
    assert (host.short_slabs, host.free_slabs) == (0, 10)

    longest = floor.ask("r", "d", prompt=32, output=16)
    floor.settle()

    assert longest.outcome == "length"


def test_what_tears_the_room_of_long_blocks_may_be_read() -> None:
    """It goes when that is over; the request waits for it, and is not rejected."""
    floor = floor_of("ab", host_slabs=13, slabs=40)
    floor.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=2)
    floor.settle()
    floor.tell(ModelWanted(model="b"))
    assert floor.machine.instances[0].engines["b"].stage is Engine.LOADING

    floor.machine.masters.add(floor.machine.models["d"], 9, {"b"})
    assert floor.machine.host.short_slabs == 0
    early = floor.ask("r", "d", prompt=32, output=16)
    assert early.outcome is None
    floor.settle()
    floor.now += 2.0
    floor.tell(Ticked())
    floor.settle()

    assert early.outcome == "length"


def test_what_is_pinned_tears_the_room_of_long_blocks() -> None:
    """It never goes, and the request is told; until it is pinned no more."""
    floor = floor_of("abc", host_slabs=14, kv_floor_slabs=2, pinned=["c"])
    floor.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=9)
    refused = floor.ask("r", "d", prompt=32, output=16)
    floor.settle()

    floor.tell(ModelChanged(model="c", slo=SLO, batch_slo=SLO, pinned=False, draining=False))
    served = floor.ask("s", "d", prompt=32, output=16)
    floor.settle()

    assert (refused.outcome, served.outcome) == ("kv_too_large", "length")


# --- leaving -------------------------------------------------------------------------------------


def gone(floor: FloorDouble, model: str) -> bool:
    """Whether the machine knows nothing of a model any more."""
    machine = floor.machine
    known = [model in table for table in (machine.models, machine.failed, machine.preemptions)]
    engines = [model in instance.engines for instance in machine.instances.values()]
    return not any([*known, *engines, machine.masters.get(model) is not None])


def test_an_idle_model_leaves() -> None:
    """Everything it held is free: on the device, in the host cache; then workers forget it."""
    floor = floor_of()
    floor.ask("r", "a")
    floor.settle()
    held = floor.machine.host.weight_slabs

    floor.tell(ModelRemoved(model="a"))
    assert not gone(floor, "a")
    floor.settle()

    assert gone(floor, "a")
    ledger = floor.machine.instances[0].ledger
    assert (ledger.free_slabs, floor.machine.host.weight_slabs) == (20, held - 4)
    assert floor.commands(DropModel) == [DropModel(instance=0, model="a")]
    assert floor.ask("late", "a").outcome == "model_not_found"
    assert floor.ask("other", "b").outcome is None
    floor.settle()


def test_a_model_leaves_in_mid_turn() -> None:
    """Its turn is ended, its requests hear it, waiting or running; others go on."""
    floor = floor_of()
    lives = [floor.ask(f"r{i}", "a", output=50) for i in range(3)]
    other = floor.ask("other", "b")
    floor.work_until(0, lambda: lives[0].produced == 5)

    floor.tell(ModelRemoved(model="a"))
    refused = floor.ask("late", "a")
    floor.tell(ModelWanted(model="a"))
    floor.settle()

    assert [life.outcome for life in lives] == ["model_removed"] * 3
    assert (refused.outcome, other.outcome) == ("model_not_found", "length")
    assert gone(floor, "a")


def test_a_model_leaves_while_its_engine_is_built() -> None:
    """The build is awaited; so is an image that is being written."""
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in "ab"}, instances=2)
    floor.start()
    assert floor.commands(BuildModel)[0].model == "a"
    floor.work_until(0, lambda: bool(floor.commands(StoreWeights)))
    assert floor.machine.instances[1].engines["a"].stage is Engine.BUILDING

    floor.tell(ModelRemoved(model="a"))
    assert floor.commands(DropModel) == []
    floor.work(1)
    assert floor.machine.masters.get("a") is not None
    floor.settle()

    assert gone(floor, "a")
    assert len(floor.commands(DropModel)) == 2
    assert floor.machine.host.weight_slabs == 4


def test_a_model_leaves_while_it_is_loaded() -> None:
    """The load is awaited, or it would be taken for one of a later model of its name."""
    floor = floor_of()
    floor.tell(ModelWanted(model="a"))
    assert floor.commands(PrefetchModel)

    floor.tell(ModelRemoved(model="a"))
    assert floor.commands(EvictModel) == []
    floor.settle()

    assert gone(floor, "a")


def test_kv_that_is_on_its_way_is_awaited() -> None:
    """Places in the host cache are free when nobody writes to them any more."""
    floor = floor_of(slabs=12)
    life = floor.ask("r1", "a", output=50, prompt=60)
    floor.work_until(0, lambda: life.produced == 8)
    floor.ask("r2", "b", prompt=150)
    floor.work_until(0, lambda: bool(floor.commands(MoveKv)))

    floor.tell(ModelRemoved(model="a"))
    floor.settle()

    assert gone(floor, "a")
    assert floor.machine.host.kv_slabs == 0
    assert life.outcome == "model_removed"


@pytest.mark.parametrize("told", [False, True])
def test_a_lost_worker_has_nothing_to_forget(told: bool) -> None:
    """Before it was told, or after: who comes next does not know the model."""
    floor = floor_of(instances=2, policy="serverlessllm")
    floor.ask("r", "a", output=50)
    number = place(floor, "r")
    floor.work_until(number, lambda: bool(floor.commands(RunTurn)))
    floor.tell(ModelRemoved(model="a"))
    if told:
        floor.work_until(number, lambda: bool(floor.commands(DropModel)))
    floor.lose(number)
    floor.settle()
    assert gone(floor, "a")

    floor.start(number)
    floor.settle()

    builds = [c.model for c in floor.commands(BuildModel) if c.instance == number]
    assert builds == ["a", "b", "b"]


def test_a_name_may_come_back() -> None:
    """As another model: nothing of the first one is taken for its."""
    floor = floor_of()
    floor.tell(ModelRemoved(model="a"))
    floor.settle()

    floor.add("a", ModelDouble(6, shape(3, 1, 500)))
    life = floor.ask("r", "a")
    floor.settle()

    assert life.outcome == "length"
    assert floor.machine.instances[0].engines["a"].weight_slabs == 6
    assert [c.model for c in floor.commands(BuildModel)] == ["a", "b", "a"]


def test_a_failed_model_may_be_replaced() -> None:
    """Its failure goes with it."""
    floor = floor_of("b")
    floor.add("a", ModelDouble(30, shape()))
    floor.settle()
    assert "a" in floor.machine.failed

    floor.tell(ModelRemoved(model="a"))
    floor.settle()
    floor.add("a", ModelDouble(4, shape()))
    life = floor.ask("r", "a")
    floor.settle()

    assert life.outcome == "length"


@pytest.mark.parametrize("policy", ["appliance", "aegaeon", "prism", "taichi", "static", "chiron"])
def test_policies_follow(policy: str) -> None:
    """Whatever they remember of models, none is at fault when one comes or goes."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, policy=policy, instances=2
    )
    floor.start()
    for name in "ab":
        floor.ask(f"{name}1", name, output=20)
    for _ in range(30):
        floor.work(0)
        floor.work(1)
    floor.tell(ModelRemoved(model="a"))
    floor.add("c", ModelDouble(4, shape()))
    lives = [floor.ask(f"{name}2", name, output=20) for name in "bc"]
    floor.settle()

    assert [life.outcome for life in lives] == ["length", "length"]
    assert not floor.stack.take_faults()
