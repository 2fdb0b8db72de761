"""Master images in the host tier: who fills one, who gives way, what happens without."""

from __future__ import annotations

from typing import Any

from appliance.vocabulary import (
    FinishReason,
    InstanceLost,
    LoadModel,
    ModelFailed,
    PrefetchModel,
    RunTurn,
    StoreWeights,
)
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def floor_of(names: str, weight_slabs: int = 4, **options: Any) -> FloorDouble:
    """The pool holds one model and its KV; the host tier is as given."""
    models = {name: ModelDouble(weight_slabs, shape()) for name in names}
    floor = FloorDouble(models, **{"slabs": 9, "max_context": 128, **options})
    floor.start()
    floor.settle()
    return floor


def serve(floor: FloorDouble, *names: str) -> None:
    for name in names:
        life = floor.ask(f"{name}-{floor.now}", name)
        floor.settle()
        assert life.outcome == FinishReason.LENGTH


def stores(floor: FloorDouble, since: int = 0) -> list[tuple[str, str]]:
    """What instances were told of images, from the given event on: fill, adopt, or use files."""
    return [
        (c.model, "fill" if c.fill else "adopt" if c.host_offsets else "files")
        for _, _, commands in floor.journal[since:]
        for c in commands
        if isinstance(c, StoreWeights)
    ]


def test_what_does_not_fit_is_loaded_from_files() -> None:
    """The images that fit are filled in the order of the catalogue; the rest has none at first."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3)

    assert stores(floor) == [("a", "fill"), ("b", "fill"), ("c", "files")]


def test_the_least_recently_used_image_gives_way() -> None:
    """A model that runs without an image gets the place of the one that ran longest ago."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3)
    start = len(floor.journal)

    serve(floor, "a", "b", "a", "c", "b")

    assert stores(floor, start) == [("c", "fill"), ("b", "fill")]
    assert floor.machine.masters.get("a") is None


def test_a_pinned_image_stays() -> None:
    """Pinned models keep their images, and get them first, wherever the catalogue has them."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["c"])
    assert stores(floor) == [("a", "fill"), ("b", "files"), ("c", "fill")]
    start = len(floor.journal)

    serve(floor, "a", "c", "b", "a")

    assert stores(floor, start) == [("b", "fill"), ("a", "fill")]


def test_no_image_goes_if_it_would_not_be_enough() -> None:
    """A model too large for what all others could give leaves them alone and reads its files."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a"], slabs=12)
    floor.world.models["c"].weight_slabs = 8
    floor.lose(0)
    floor.start(0)
    floor.settle()
    start = len(floor.journal)

    serve(floor, "b", "c")

    assert stores(floor, start) == []
    assert floor.commands(LoadModel)[-1].model == "c"


def test_an_image_that_is_being_read_stays() -> None:
    """While another instance loads a model, its image is not given away."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, instances=2, pinned=["b"])
    floor.ask("a1", "a", output=30)
    (job,) = [i.job for i in floor.machine.instances.values() if i.job is not None]
    assert job.model == "a"
    start = len(floor.journal)

    floor.ask("b1", "b", output=30)
    floor.ask("c1", "c", output=30)

    assert stores(floor, start) == []
    floor.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_nobody_waits_for_an_image_that_another_fills() -> None:
    """While one instance fills, the other reads the files; later it adopts the image."""
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())}, instances=2, slabs=12, max_context=128, host_slabs=20
    )
    floor.start()
    assert floor.work(0)
    assert floor.work(1)
    floor.settle()
    assert stores(floor) == [("a", "fill"), ("a", "files")]

    for number in range(4):
        floor.ask(f"a{number}", "a")
    floor.settle()

    assert stores(floor)[2:] == [("a", "adopt")]


def test_an_image_half_written_by_a_lost_instance_is_given_back() -> None:
    """What a dead worker was writing is dropped, and written again by who needs it."""
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())}, instances=1, slabs=12, max_context=128, host_slabs=20
    )
    floor.start()
    floor.work(0)
    assert floor.machine.masters.get("a") is not None

    floor.lose(0)

    assert floor.machine.masters.get("a") is None
    floor.machine.check_integrity()
    floor.start(0)
    floor.settle()
    assert stores(floor) == [("a", "fill"), ("a", "fill")]


def test_a_whole_image_outlives_its_writer() -> None:
    """Once whole, an image needs no reading of files after a loss."""
    floor = floor_of("a", host_slabs=20)

    floor.lose(0)
    floor.start(0)
    floor.settle()

    assert stores(floor) == [("a", "fill"), ("a", "adopt")]


def test_files_that_cannot_be_read_fail_one_model() -> None:
    """A model whose files are gone fails by name, with its requests; others are served."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a", "b"])
    floor.world.unreadable.add("c")

    lost = floor.ask("c1", "c")
    kept = floor.ask("a1", "a")
    floor.settle()

    assert lost.outcome == "model_failed"
    assert kept.outcome == FinishReason.LENGTH
    assert floor.machine.failed == {"c": "its files are gone"}
    floor.machine.check_integrity()
    assert floor.machine.instances[0].ledger.weights.keys() == {"a"}


def test_a_failed_fill_gives_its_place_back() -> None:
    """An image that cannot be written frees its slabs, and whoever ran on them goes on."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3)
    floor.world.unreadable.add("c")

    lost = floor.ask("c1", "c")
    floor.settle()

    assert lost.outcome == "model_failed"
    assert floor.machine.masters.get("c") is None
    serve(floor, "a", "b", "a")


def test_a_failed_prefetch_is_not_in_the_way() -> None:
    """The turn beside which a prefetch failed goes on, and its slabs are free again."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a", "b"], slabs=20)
    floor.world.unreadable.add("c")
    served = floor.ask("a1", "a", output=40)
    floor.work_until(0, lambda: bool(floor.commands(RunTurn)))
    lost = floor.ask("c1", "c")

    floor.settle()

    assert (served.outcome, lost.outcome) == (FinishReason.LENGTH, "model_failed")
    assert "c" not in floor.machine.instances[0].ledger.weights


def test_a_failure_of_what_is_not_on_its_way_is_only_told() -> None:
    """A report that comes late, when the weights are gone again, harms nothing."""
    floor = floor_of("ab", host_slabs=20)

    floor.tell(ModelFailed(instance=0, model="a", reason="its files are gone"))

    assert floor.ask("a1", "a").outcome == "model_failed"
    serve(floor, "b")


def test_a_prefetch_fills_no_image() -> None:
    """Filling takes the worker's time; a prefetch without an image reads the files beside."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, slabs=24)
    for name in "abc":
        floor.ask(f"{name}1", name, output=40)
    start = len(floor.journal)

    floor.work_until(0, lambda: any(p.model == "c" for p in floor.commands(PrefetchModel)))

    assert ("c", "fill") not in stores(floor, start)
    floor.settle()


def test_a_lost_instance_reads_nothing() -> None:
    """A worker that dies while it loads does not keep the image from giving way."""
    floor = floor_of("abc", host_slabs=11, kv_floor_slabs=3, instances=2, policy="serverlessllm")
    floor.ask("a1", "a", output=30)
    (loading,) = [i.id for i in floor.machine.instances.values() if i.job is not None]
    del floor.up[loading]
    floor.tell(InstanceLost(instance=loading))
    floor.ask("b1", "b", output=30)
    floor.ask("c1", "c", output=30)

    floor.settle()

    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_what_another_instance_writes_is_not_given_away() -> None:
    """A model that fails on one instance keeps slabs that another one fills until that is done."""
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())}, instances=2, slabs=12, max_context=128, host_slabs=20
    )
    floor.start()
    floor.work(0)
    floor.up[1].queue.clear()

    floor.tell(ModelFailed(instance=1, model="a", reason="its files are gone"))

    assert floor.machine.host.weight_slabs == 4
    floor.settle()
    assert floor.machine.host.weight_slabs == 0
    assert floor.ask("a1", "a").outcome == "model_failed"
