"""Which engines are built, when, and what happens if one cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.scheduling.machine import MAX_BUILD_LOSSES
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
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def floor_of(names: str = "abc", **options: Any) -> FloorDouble:
    return FloorDouble({name: ModelDouble(4, shape()) for name in names}, **options)


def builds(floor: FloorDouble, instance: int = 0) -> list[str]:
    return [c.model for c in floor.commands(BuildModel) if c.instance == instance]


def test_engines_are_built_in_the_order_of_the_catalogue() -> None:
    """An instance with nothing to do builds one engine after the other."""
    floor = floor_of("cab")
    floor.start()
    assert builds(floor) == ["c"]

    floor.settle()

    assert builds(floor) == ["c", "a", "b"]


def test_an_engine_somebody_waits_for_is_built_next() -> None:
    """The engine of a waiting request goes before the order of the catalogue."""
    floor = floor_of("abcd")
    floor.start()

    life = floor.ask("r", "d")
    floor.settle()

    assert builds(floor) == ["a", "d", "b", "c"]
    assert life.outcome == FinishReason.LENGTH


def test_serving_goes_before_building() -> None:
    """A request for an engine that is there is not kept waiting by engines nobody asked for."""
    floor = floor_of("abc")
    floor.start()
    life = floor.ask("r", "a")

    floor.work_until(0, lambda: life.outcome is not None)

    assert builds(floor) == ["a"]
    floor.settle()
    assert builds(floor) == ["a", "b", "c"]


def test_the_master_image_is_written_once() -> None:
    """The first instance that built a model fills its place in the host tier, others adopt it."""
    floor = floor_of("a", instances=2)
    floor.start()
    floor.work_until(0, lambda: not floor.up[0].busy)
    floor.settle()

    stores = floor.commands(StoreWeights)
    assert [store.fill for store in stores] == [True, False]
    assert stores[0].host_offsets == stores[1].host_offsets
    assert len(stores[0].host_offsets) == 4


def test_a_model_that_cannot_be_built_is_not_served() -> None:
    """Requests that wait for the model and those that come later hear why; others are served."""
    floor = floor_of("ab")
    floor.start()
    waiting = floor.ask("r1", "a")
    other = floor.ask("r2", "b")
    floor.up[0].queue.clear()

    commands = floor.tell(ModelFailed(instance=0, model="a", reason="no such architecture"))

    assert Reject(request="r1", code="model_failed", message="no such architecture") in commands
    assert waiting.outcome == "model_failed"
    assert floor.ask("r3", "a").outcome == "model_failed"
    floor.settle()
    assert other.outcome == FinishReason.LENGTH
    assert builds(floor) == ["a", "b"]


def test_a_pool_too_small_for_one_request() -> None:
    """A model that could not serve one request of full length fails and says what to change."""
    floor = floor_of("ab", slabs=11)
    floor.start()
    floor.ask("r1", "a")

    floor.settle()

    (reject,) = floor.commands(Reject)
    assert reject.code == "model_failed"
    assert "need 12 slabs, the pool has 11" in reject.message
    assert "devices.memory" in reject.message


def test_a_model_that_can_never_run_keeps_no_place_in_the_host_tier() -> None:
    """The host slabs of a model that failed for the size of the pool are free for KV."""
    floor = floor_of("a", slabs=11)
    floor.start()

    floor.settle()

    assert floor.machine.host.weight_slabs == 0


def test_a_model_that_kills_its_builders_is_given_up() -> None:
    """After so many workers died over one build the model fails; a build in between forgives."""
    floor = floor_of("a")
    life = floor.ask("r", "a")
    for _ in range(MAX_BUILD_LOSSES - 1):
        floor.start()
        floor.lose(0)
    assert life.outcome is None
    floor.start()
    floor.settle()
    assert life.outcome == FinishReason.LENGTH
    floor.lose(0)
    second = floor.ask("s", "a")

    for _ in range(MAX_BUILD_LOSSES):
        assert second.outcome is None
        floor.start()
        floor.lose(0)

    assert second.outcome == "model_failed"
    floor.start()
    assert builds(floor).count("a") == 2 * MAX_BUILD_LOSSES
    assert not floor.up[0].busy


def test_a_loss_without_a_build_is_not_counted() -> None:
    """Workers that die over anything but a build cost no model its place."""
    floor = floor_of("a")
    floor.start()
    floor.settle()

    for index in range(MAX_BUILD_LOSSES + 1):
        floor.ask(f"r{index}", "a", output=30)
        floor.work_until(0, lambda: floor.up[0].turn is not None)
        floor.lose(0)
        floor.start()
        floor.settle()

    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_a_late_report_of_a_load_changes_nothing() -> None:
    """Weights that were evicted before their arrival was reported are loaded again when needed."""
    floor = floor_of("ab", slabs=12)
    floor.start()
    floor.settle()
    floor.ask("r1", "a")
    floor.settle()
    stale = ModelLoaded(instance=0, model="b", moved_bytes=4000, seconds=1.0, prefetched=True)

    floor.tell(stale)
    life = floor.ask("r2", "b")
    floor.settle()

    assert [command.model for command in floor.commands(LoadModel)] == ["a", "b"]
    assert life.outcome == FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon"])
def test_a_request_for_an_unbuilt_engine_is_served(policy: str) -> None:
    """Whatever is built already, a model is built when its request is the one to run."""
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in "ab"}, policy=policy)
    floor.start()
    floor.work_until(0, lambda: builds(floor) == ["a", "b"])
    first = floor.ask("r1", "b")
    second = floor.ask("r2", "a")

    floor.settle()

    assert [first.outcome, second.outcome] == [FinishReason.LENGTH] * 2
    assert len(floor.commands(RunPrefill)) == 2
    assert sum(isinstance(event, ModelBuilt) for _, event, _ in floor.journal) == 2


def test_what_waits_behind_a_full_host_tier_is_built_next() -> None:
    """While the first in line waits for memory, the engine of the one behind it is built before
    those that nobody asked for."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "abcd"},
        policy="serverlessllm",
        instances=2,
        host_slabs=16 + 6,
    )
    floor.start()
    floor.work_until(0, lambda: builds(floor, 0) == ["a", "b"])
    floor.work_until(1, lambda: builds(floor, 1) == ["a", "b"])
    floor.ask("first", "a", prompt=200, output=40)
    floor.ask("waits", "a", prompt=200, output=40)
    floor.ask("d0", "d")
    floor.ask("d1", "d")
    floor.work_until(0, lambda: floor.up[0].turn is not None)

    floor.work_until(1, lambda: len(builds(floor, 1)) == 3)

    assert builds(floor, 1) == ["a", "b", "d"]
    floor.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_instances_that_lay_weights_out_differently() -> None:
    """They cannot share a master image: the model is given up rather than served wrongly."""
    floor = floor_of("a", instances=2)
    floor.start()
    floor.tell(
        ModelBuilt(instance=0, model="a", weight_slabs=4, host_slabs=4, kv=shape(), layout="one")
    )
    floor.tell(
        ModelBuilt(
            instance=1, model="a", weight_slabs=4, host_slabs=4, kv=shape(), layout="another"
        )
    )

    life = floor.ask("r", "a")

    assert life.outcome == "model_failed"
    assert "lie otherwise" in floor.machine.failed["a"]
