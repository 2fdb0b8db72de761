"""Models that join the catalogue, and leave it, while others are served."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.scheduling.lifecycle import EngineStage
from appliance.vocabulary import (
    BuildModel,
    DropModel,
    EvictModel,
    ModelChanged,
    ModelLoadRequested,
    ModelRemoved,
    MoveKv,
    PrefetchModel,
    RunTurn,
    StoreWeights,
    Ticked,
)
from tests.unit.doubles.cluster import SLAB, SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

SMALL = ModelDouble(4, shape())


def cluster_of(names: str = "ab", **changes: Any) -> ClusterDouble:
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in names}, **changes)
    cluster.start()
    cluster.settle()
    return cluster


def place(cluster: ClusterDouble, request: str) -> int:
    """Where a request is."""
    number = cluster.machine.requests[request].instance
    assert number is not None
    return number


# --- joining -------------------------------------------------------------------------------------


def test_a_model_is_added_while_another_runs() -> None:
    """Its engine is built beside the others, its requests are served; other requests go on."""
    cluster = cluster_of("a", instances=2, policy="serverlessllm")
    running = cluster.ask("r1", "a", output=20)
    cluster.work_until(place(cluster, "r1"), lambda: running.produced == 3)

    cluster.add("b", ModelDouble(4, shape()))
    added = cluster.ask("r2", "b")
    cluster.settle()

    assert (running.outcome, added.outcome) == ("length", "length")
    assert (running.prefills, added.prefills) == (1, 1)
    built = [(command.instance, command.model) for command in cluster.commands(BuildModel)]
    assert sorted(built) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [model.name for model in cluster.machine.cluster.cluster_view(cluster.now).models] == [
        "a",
        "b",
    ]


def test_a_model_is_added_while_no_instance_is_up() -> None:
    """It is built by those that come."""
    cluster = cluster_of("a")
    cluster.lose(0)
    cluster.add("b", ModelDouble(4, shape()))
    waiting = cluster.ask("r", "b")

    cluster.start()
    cluster.settle()

    assert waiting.outcome == "length"


def test_room_in_the_host_cache_is_held_back_for_it() -> None:
    """As for those of the start, if there is some: KV does not take it meanwhile."""
    cluster = cluster_of("a", host_slabs=10)
    assert cluster.machine.host.free_slabs == 6

    cluster.add("b", ModelDouble(4, shape()), pinned=True)
    cluster.add("c", ModelDouble(4, shape()))
    cluster.settle()

    weight_cache = cluster.machine.weight_cache
    assert [weight_cache.get(name) is not None for name in "abc"] == [True, True, False]
    cluster.tell(ModelChanged(model="b", slo=SLO, batch_slo=SLO, pinned=False, draining=False))


def test_longer_kv_takes_room_from_weights() -> None:
    """Images of others give way until one request of the new model fits: that is served at once."""
    cluster = cluster_of("abc", host_slabs=14, kv_floor_slabs=2)
    assert cluster.machine.host.free_slabs == 2

    cluster.add("d", ModelDouble(4, shape(block_bytes=1000)), kv_floor_slabs=8)
    longest = cluster.ask("r", "d", prompt=100, output=20)
    cluster.settle()

    assert longest.outcome == "length"
    assert cluster.machine.host.short_slabs == 0
    assert cluster.machine.host.weight_slabs <= 6


def test_room_held_back_for_an_image_gives_way_first() -> None:
    """Room for weights that are not here yet is given up before images are."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, host_slabs=8)
    cluster.start()
    cluster.work_until(0, lambda: cluster.machine.weight_cache.get("a") is not None)
    assert cluster.machine.host.held_back == {"b": 4}

    cluster.machine.weight_cache.add(cluster.machine.models["a"], 4, ())

    assert cluster.machine.host.held_back == {}
    assert cluster.machine.host.short_slabs == 0
    assert cluster.machine.weight_cache.get("a") is not None
    cluster.settle()


def test_an_image_that_is_read_gives_way_later() -> None:
    """A request that has to wait for its room is not rejected for it."""
    cluster = cluster_of("a", host_slabs=8, slabs=40)
    cluster.tell(ModelLoadRequested(model="a"))
    assert cluster.machine.instances[0].engines["a"].stage is EngineStage.LOADING

    cluster.add("b", ModelDouble(4, shape(block_bytes=1000)), kv_floor_slabs=8)
    assert cluster.machine.host.short_slabs == 4
    early = cluster.ask("r", "b", prompt=100, output=20)
    cluster.work_until(0, lambda: cluster.machine.instances[0].engines["b"].built)
    cluster.settle()
    cluster.now += 2.0
    cluster.tell(Ticked())
    cluster.settle()

    assert early.outcome == "length"
    assert cluster.machine.weight_cache.get("a") is None


def test_weights_do_not_tear_the_room_of_long_blocks() -> None:
    """Blocks longer than a slab need several in a row: what lies between them goes, too."""
    cluster = cluster_of("abc", host_slabs=14, kv_floor_slabs=2)
    cluster.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=9)
    host = cluster.machine.host
    assert (host.short_slabs, host.free_slabs) == (0, 10)

    longest = cluster.ask("r", "d", prompt=32, output=16)
    cluster.settle()

    assert longest.outcome == "length"


def test_what_tears_the_room_of_long_blocks_may_be_read() -> None:
    """It goes when that is over; the request waits for it, and is not rejected."""
    cluster = cluster_of("ab", host_slabs=13, slabs=40)
    cluster.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=2)
    cluster.settle()
    cluster.tell(ModelLoadRequested(model="b"))
    assert cluster.machine.instances[0].engines["b"].stage is EngineStage.LOADING

    cluster.machine.weight_cache.add(cluster.machine.models["d"], 9, {"b"})
    assert cluster.machine.host.short_slabs == 0
    early = cluster.ask("r", "d", prompt=32, output=16)
    assert early.outcome is None
    cluster.settle()
    cluster.now += 2.0
    cluster.tell(Ticked())
    cluster.settle()

    assert early.outcome == "length"


def test_what_is_pinned_tears_the_room_of_long_blocks() -> None:
    """It never goes: a request whose KV finds no room beside it is served all the same."""
    cluster = cluster_of("abc", host_slabs=14, kv_floor_slabs=2, pinned=["c"])
    cluster.add("d", ModelDouble(4, shape(block_bytes=3 * SLAB)), kv_floor_slabs=9)
    alone = cluster.ask("r", "d", prompt=32, output=16)
    cluster.settle()
    assert cluster.machine.host.peak_kv_slabs == 0
    assert cluster.machine.weight_cache.get("c") is not None

    cluster.tell(ModelChanged(model="c", slo=SLO, batch_slo=SLO, pinned=False, draining=False))
    later = cluster.ask("s", "d", prompt=32, output=16)
    cluster.settle()

    assert (alone.outcome, later.outcome) == ("length", "length")
    assert cluster.machine.host.peak_kv_slabs > 0


# --- leaving -------------------------------------------------------------------------------------


def gone(cluster: ClusterDouble, model: str) -> bool:
    """Whether the machine knows nothing of a model any more."""
    machine = cluster.machine
    known = [model in table for table in (machine.models, machine.failed, machine.preemptions)]
    engines = [model in instance.engines for instance in machine.instances.values()]
    return not any([*known, *engines, machine.weight_cache.get(model) is not None])


def test_an_idle_model_leaves() -> None:
    """Everything it held is free: on the device, in the host cache; then workers forget it."""
    cluster = cluster_of()
    cluster.ask("r", "a")
    cluster.settle()
    held = cluster.machine.host.weight_slabs

    cluster.tell(ModelRemoved(model="a"))
    assert not gone(cluster, "a")
    cluster.settle()

    assert gone(cluster, "a")
    ledger = cluster.machine.instances[0].ledger
    assert (ledger.free_slabs, cluster.machine.host.weight_slabs) == (20, held - 4)
    assert cluster.commands(DropModel) == [DropModel(instance=0, model="a")]
    assert cluster.ask("late", "a").outcome == "model_not_found"
    assert cluster.ask("other", "b").outcome is None
    cluster.settle()


def test_nothing_is_kept_of_a_model_that_was_never_asked() -> None:
    """Nor is the view that policies saw of it: models come and go for as long as the daemon
    runs."""
    cluster = cluster_of()
    shown = cluster.machine.cluster._model_views
    assert shown.keys() == {"a", "b"}

    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()

    assert gone(cluster, "a")
    assert shown.keys() == {"b"}


def test_a_model_leaves_in_mid_turn() -> None:
    """Its turn is ended, its requests hear it, waiting or running; others go on."""
    cluster = cluster_of()
    lives = [cluster.ask(f"r{i}", "a", output=50) for i in range(3)]
    other = cluster.ask("other", "b")
    cluster.work_until(0, lambda: lives[0].produced == 5)

    cluster.tell(ModelRemoved(model="a"))
    refused = cluster.ask("late", "a")
    cluster.tell(ModelLoadRequested(model="a"))
    cluster.settle()

    assert [life.outcome for life in lives] == ["model_removed"] * 3
    assert (refused.outcome, other.outcome) == ("model_not_found", "length")
    assert gone(cluster, "a")


def test_a_model_leaves_while_its_engine_is_built() -> None:
    """The build is awaited; so is an image that is being written."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "ab"}, instances=2)
    cluster.start()
    assert cluster.commands(BuildModel)[0].model == "a"
    cluster.work_until(0, lambda: bool(cluster.commands(StoreWeights)))
    assert cluster.machine.instances[1].engines["a"].stage is EngineStage.BUILDING

    cluster.tell(ModelRemoved(model="a"))
    assert cluster.commands(DropModel) == []
    cluster.work(1)
    assert cluster.machine.weight_cache.get("a") is not None
    cluster.settle()

    assert gone(cluster, "a")
    assert len(cluster.commands(DropModel)) == 2
    assert cluster.machine.host.weight_slabs == 4


def test_a_model_leaves_while_it_is_loaded() -> None:
    """The load is awaited, or it would be taken for one of a later model of its name."""
    cluster = cluster_of()
    cluster.tell(ModelLoadRequested(model="a"))
    assert cluster.commands(PrefetchModel)

    cluster.tell(ModelRemoved(model="a"))
    assert cluster.commands(EvictModel) == []
    cluster.settle()

    assert gone(cluster, "a")


def test_kv_that_is_on_its_way_is_awaited() -> None:
    """Places in the host cache are free when no instance writes to them any more."""
    cluster = cluster_of(slabs=12)
    life = cluster.ask("r1", "a", output=50, prompt=60)
    cluster.work_until(0, lambda: life.produced == 8)
    cluster.ask("r2", "b", prompt=150)
    cluster.work_until(0, lambda: bool(cluster.commands(MoveKv)))

    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()

    assert gone(cluster, "a")
    assert cluster.machine.host.kv_slabs == 0
    assert life.outcome == "model_removed"


@pytest.mark.parametrize("told", [False, True])
def test_a_lost_worker_has_nothing_to_forget(told: bool) -> None:
    """Before it was told, or after: who comes next does not know the model."""
    cluster = cluster_of(instances=2, policy="serverlessllm")
    cluster.ask("r", "a", output=50)
    number = place(cluster, "r")
    cluster.work_until(number, lambda: bool(cluster.commands(RunTurn)))
    cluster.tell(ModelRemoved(model="a"))
    if told:
        cluster.work_until(number, lambda: bool(cluster.commands(DropModel)))
    cluster.lose(number)
    cluster.settle()
    assert gone(cluster, "a")

    cluster.start(number)
    cluster.settle()

    builds = [c.model for c in cluster.commands(BuildModel) if c.instance == number]
    assert builds == ["a", "b", "b"]


def test_a_name_may_come_back() -> None:
    """As another model: nothing of the first one is taken for its."""
    cluster = cluster_of()
    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()

    cluster.add("a", ModelDouble(6, shape(3, 1, 500)))
    life = cluster.ask("r", "a")
    cluster.settle()

    assert life.outcome == "length"
    assert cluster.machine.instances[0].engines["a"].weight_slabs == 6
    assert [c.model for c in cluster.commands(BuildModel)] == ["a", "b", "a"]


def test_a_failed_model_may_be_replaced() -> None:
    """Its failure goes with it."""
    cluster = cluster_of("b")
    cluster.add("a", ModelDouble(30, shape()))
    cluster.settle()
    assert "a" in cluster.machine.failed

    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()
    cluster.add("a", ModelDouble(4, shape()))
    life = cluster.ask("r", "a")
    cluster.settle()

    assert life.outcome == "length"


@pytest.mark.parametrize("policy", ["appliance", "aegaeon", "prism", "taichi", "static", "chiron"])
def test_policies_follow(policy: str) -> None:
    """Whatever they remember of models, none is at fault when one comes or goes."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, policy=policy, instances=2
    )
    cluster.start()
    for name in "ab":
        cluster.ask(f"{name}1", name, output=20)
    for _ in range(30):
        cluster.work(0)
        cluster.work(1)
    cluster.tell(ModelRemoved(model="a"))
    cluster.add("c", ModelDouble(4, shape()))
    lives = [cluster.ask(f"{name}2", name, output=20) for name in "bc"]
    cluster.settle()

    assert [life.outcome for life in lives] == ["length", "length"]
    assert not cluster.stack.take_faults()
