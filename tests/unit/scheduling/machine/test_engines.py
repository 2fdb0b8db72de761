"""Which engines are built, when, and what happens if one cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.scheduling.model_lifecycle import MAX_BUILD_LOSSES
from appliance.vocabulary import (
    BuildModel,
    FinishReason,
    LoadModel,
    ModelBuilt,
    ModelFailed,
    ModelLoaded,
    Reject,
    RunPrefill,
    StoreWeights,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def cluster_of(names: str = "abc", **options: Any) -> ClusterDouble:
    return ClusterDouble({name: ModelDouble(4, shape()) for name in names}, **options)


def builds(cluster: ClusterDouble, instance: int = 0) -> list[str]:
    return [c.model for c in cluster.commands(BuildModel) if c.instance == instance]


def test_engines_are_built_in_the_order_of_the_catalogue() -> None:
    """An instance with nothing to do builds one engine after the other."""
    cluster = cluster_of("cab")
    cluster.start()
    assert builds(cluster) == ["c"]

    cluster.settle()

    assert builds(cluster) == ["c", "a", "b"]


def test_an_engine_that_a_request_waits_for_is_built_next() -> None:
    """The engine of a waiting request goes before the order of the catalogue."""
    cluster = cluster_of("abcd")
    cluster.start()

    life = cluster.ask("r", "d")
    cluster.settle()

    assert builds(cluster) == ["a", "d", "b", "c"]
    assert life.outcome == FinishReason.LENGTH


def test_serving_goes_before_building() -> None:
    """A request for an engine that is there does not wait for engines that none asked for."""
    cluster = cluster_of("abc")
    cluster.start()
    life = cluster.ask("r", "a")

    cluster.work_until(0, lambda: life.outcome is not None)

    assert builds(cluster) == ["a"]
    cluster.settle()
    assert builds(cluster) == ["a", "b", "c"]


def test_the_master_image_is_written_once() -> None:
    """The first instance that built a model fills its place in the host tier, others adopt it."""
    cluster = cluster_of("a", instances=2)
    cluster.start()
    cluster.work_until(0, lambda: not cluster.up[0].busy)
    cluster.settle()

    stores = cluster.commands(StoreWeights)
    assert [store.fill for store in stores] == [True, False]
    assert stores[0].host_offsets == stores[1].host_offsets
    assert len(stores[0].host_offsets) == 4


def test_a_model_that_cannot_be_built_is_not_served() -> None:
    """Requests that wait for the model and those that come later hear why; others are served."""
    cluster = cluster_of("ab")
    cluster.start()
    waiting = cluster.ask("r1", "a")
    other = cluster.ask("r2", "b")
    cluster.up[0].queue.clear()

    commands = cluster.tell(ModelFailed(instance=0, model="a", reason="no such architecture"))

    assert Reject(request="r1", code="model_failed", message="no such architecture") in commands
    assert waiting.outcome == "model_failed"
    assert cluster.ask("r3", "a").outcome == "model_failed"
    cluster.settle()
    assert other.outcome == FinishReason.LENGTH
    assert builds(cluster) == ["a", "b"]


def test_a_pool_too_small_for_one_request() -> None:
    """A model that could not serve one request of full length fails and says what to change."""
    cluster = cluster_of("ab", slabs=11)
    cluster.start()
    cluster.ask("r1", "a")

    cluster.settle()

    (reject,) = cluster.commands(Reject)
    assert reject.code == "model_failed"
    assert "need 12 slabs, the pool has 11" in reject.message
    assert "devices.memory" in reject.message


def test_a_model_that_can_never_run_keeps_no_place_in_the_host_tier() -> None:
    """The host slabs of a model that failed for the size of the pool are free for KV."""
    cluster = cluster_of("a", slabs=11)
    cluster.start()

    cluster.settle()

    assert cluster.machine.host.weight_slabs == 0


def test_a_model_that_kills_its_builders_is_given_up() -> None:
    """After so many workers died over one build the model fails; a build in between forgives."""
    cluster = cluster_of("a")
    life = cluster.ask("r", "a")
    for _ in range(MAX_BUILD_LOSSES - 1):
        cluster.start()
        cluster.lose(0)
    assert life.outcome is None
    cluster.start()
    cluster.settle()
    assert life.outcome == FinishReason.LENGTH
    cluster.lose(0)
    second = cluster.ask("s", "a")

    for _ in range(MAX_BUILD_LOSSES):
        assert second.outcome is None
        cluster.start()
        cluster.lose(0)

    assert second.outcome == "model_failed"
    cluster.start()
    assert builds(cluster).count("a") == 2 * MAX_BUILD_LOSSES
    assert not cluster.up[0].busy


def test_a_model_whose_first_store_kills_workers_is_given_up() -> None:
    """Though its engine is built each time: the weights were never stored."""
    cluster = cluster_of("a")
    life = cluster.ask("r", "a")
    for _ in range(MAX_BUILD_LOSSES):
        assert life.outcome is None
        cluster.start()
        stores = len(cluster.commands(StoreWeights))
        while len(cluster.commands(StoreWeights)) == stores:
            assert cluster.work(0), "it never stored the weights"
        cluster.lose(0)

    assert life.outcome == "model_failed"
    (reject,) = cluster.commands(Reject)
    assert f"its worker died {MAX_BUILD_LOSSES} times" in reject.message


def test_a_loss_without_a_build_is_not_counted() -> None:
    """Workers that die over anything but a build cost no model its place."""
    cluster = cluster_of("a")
    cluster.start()
    cluster.settle()

    for index in range(MAX_BUILD_LOSSES + 1):
        cluster.ask(f"r{index}", "a", output=30)
        cluster.work_until(0, lambda: cluster.up[0].turn is not None)
        cluster.lose(0)
        cluster.start()
        cluster.settle()

    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_a_late_report_of_a_load_changes_nothing() -> None:
    """Weights that were evicted before their arrival was reported are loaded again when needed."""
    cluster = cluster_of("ab", slabs=12)
    cluster.start()
    cluster.settle()
    cluster.ask("r1", "a")
    cluster.settle()
    stale = ModelLoaded(instance=0, model="b", moved_bytes=4000, seconds=1.0, prefetched=True)

    cluster.tell(stale)
    life = cluster.ask("r2", "b")
    cluster.settle()

    assert [command.model for command in cluster.commands(LoadModel)] == ["a", "b"]
    assert life.outcome == FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon"])
def test_a_request_for_an_unbuilt_engine_is_served(policy: str) -> None:
    """Whatever is built already, a model is built when its request is the one to run."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "ab"}, policy=policy)
    cluster.start()
    cluster.work_until(0, lambda: builds(cluster) == ["a", "b"])
    first = cluster.ask("r1", "b")
    second = cluster.ask("r2", "a")

    cluster.settle()

    assert [first.outcome, second.outcome] == [FinishReason.LENGTH] * 2
    assert len(cluster.commands(RunPrefill)) == 2
    assert sum(isinstance(event, ModelBuilt) for _, event, _ in cluster.journal) == 2


def test_what_waits_behind_a_full_host_tier_is_built_next() -> None:
    """While the first in line waits for memory, the engine of the one behind it is built before
    those that no request asked for."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "abcd"},
        policy="serverlessllm",
        instances=2,
        host_slabs=16 + 6,
    )
    cluster.start()
    cluster.work_until(0, lambda: builds(cluster, 0) == ["a", "b"])
    cluster.work_until(1, lambda: builds(cluster, 1) == ["a", "b"])
    cluster.ask("first", "a", prompt=200, output=40)
    cluster.ask("waits", "a", prompt=200, output=40)
    cluster.ask("d0", "d")
    cluster.ask("d1", "d")
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)

    cluster.work_until(1, lambda: len(builds(cluster, 1)) == 3)

    assert builds(cluster, 1) == ["a", "b", "d"]
    cluster.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_instances_that_lay_weights_out_differently() -> None:
    """They cannot share a master image: the model is given up rather than served wrongly."""
    cluster = cluster_of("a", instances=2)
    cluster.start()
    cluster.tell(
        ModelBuilt(instance=0, model="a", weight_slabs=4, host_slabs=4, kv=shape(), layout="one")
    )
    cluster.tell(
        ModelBuilt(
            instance=1, model="a", weight_slabs=4, host_slabs=4, kv=shape(), layout="another"
        )
    )

    life = cluster.ask("r", "a")

    assert life.outcome == "model_failed"
    assert "lie otherwise" in cluster.machine.failed["a"]
