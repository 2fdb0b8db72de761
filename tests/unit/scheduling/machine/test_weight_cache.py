"""Master images in the host tier: who fills one, who gives way, what happens without."""

from __future__ import annotations

from typing import Any

from appliance.vocabulary import (
    FinishReason,
    ImageHeld,
    InstanceLost,
    LoadModel,
    ModelFailed,
    PrefetchModel,
    RunTurn,
    StoreWeights,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def cluster_of(names: str, weight_slabs: int = 4, **options: Any) -> ClusterDouble:
    """The pool holds one model and its KV; the host tier is as given."""
    models = {name: ModelDouble(weight_slabs, shape()) for name in names}
    cluster = ClusterDouble(models, **{"slabs": 9, "max_context": 128, **options})
    cluster.start()
    cluster.settle()
    return cluster


def serve(cluster: ClusterDouble, *names: str) -> None:
    for name in names:
        life = cluster.ask(f"{name}-{cluster.now}", name)
        cluster.settle()
        assert life.outcome == FinishReason.LENGTH


def stores(cluster: ClusterDouble, since: int = 0) -> list[tuple[str, str]]:
    """What instances were told of images, from the given event on: fill, adopt, or use files."""
    return [
        (c.model, "fill" if c.fill else "adopt" if c.host_offsets else "files")
        for _, _, commands in cluster.journal[since:]
        for c in commands
        if isinstance(c, StoreWeights)
    ]


def test_what_does_not_fit_is_loaded_from_files() -> None:
    """The images that fit are filled in the order of the catalogue; the rest has none at first."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3)

    assert stores(cluster) == [("a", "fill"), ("b", "fill"), ("c", "files")]


def test_the_least_recently_used_image_gives_way() -> None:
    """A model that runs without an image gets the place of the one that ran longest ago."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3)
    start = len(cluster.journal)

    serve(cluster, "a", "b", "a", "c", "b")

    assert stores(cluster, start) == [("c", "fill"), ("b", "fill")]
    assert cluster.machine.weight_cache.get("a") is None


def test_whole_images_are_known() -> None:
    """One that an instance still fills is none of them."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    cluster = ClusterDouble(models, slabs=9, max_context=128, host_slabs=11, kv_floor_slabs=3)
    cache = cluster.machine.weight_cache

    cache.take("b", 4, filler=0, now=0.0)
    assert cache.whole == set()
    cache.filled("b", 1)
    assert cache.whole == {"b"}


def test_an_encoded_image_gives_slabs_back() -> None:
    """What an image does not take any more is another model's room; instances that come later
    adopt what is left of it."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    cluster = ClusterDouble(models, slabs=9, max_context=128, host_slabs=11, kv_floor_slabs=3)
    cluster.world.encoded = dict.fromkeys("abc", 2)
    cluster.start()
    cluster.settle()

    assert stores(cluster) == [("a", "fill"), ("b", "fill"), ("c", "fill")]
    assert cluster.machine.host.weights == {"a": 2, "b": 2, "c": 2}
    cluster.lose(0)
    cluster.start(0)
    serve(cluster, "a", "b", "c")
    assert stores(cluster)[3:] == [("a", "adopt"), ("b", "adopt"), ("c", "adopt")]


def test_an_image_that_is_gone_gives_no_slabs_back() -> None:
    """A report of an image that was written anew, elsewhere, meanwhile changes nothing."""
    cluster = cluster_of("a", host_slabs=20)
    cluster.machine.weight_cache.filled("a", 99, 1)

    assert cluster.machine.host.weights == {"a": 4}


def test_a_pinned_image_stays() -> None:
    """Pinned models keep their images, and get them first, wherever the catalogue has them."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["c"])
    assert stores(cluster) == [("a", "fill"), ("b", "files"), ("c", "fill")]
    start = len(cluster.journal)

    serve(cluster, "a", "c", "b", "a")

    assert stores(cluster, start) == [("b", "fill"), ("a", "fill")]


def test_no_image_goes_if_it_would_not_be_enough() -> None:
    """A model too large for what all others could give leaves them alone and reads its files."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a"], slabs=12)
    cluster.world.models["c"].weight_slabs = 8
    cluster.lose(0)
    cluster.start(0)
    cluster.settle()
    start = len(cluster.journal)

    serve(cluster, "b", "c")

    assert stores(cluster, start) == []
    assert cluster.commands(LoadModel)[-1].model == "c"


def test_an_image_that_is_being_read_stays() -> None:
    """While another instance loads a model, its image is not given away."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, instances=2, pinned=["b"])
    cluster.ask("a1", "a", output=30)
    (job,) = [i.job for i in cluster.machine.instances.values() if i.job is not None]
    assert job.model == "a"
    start = len(cluster.journal)

    cluster.ask("b1", "b", output=30)
    cluster.ask("c1", "c", output=30)

    assert stores(cluster, start) == []
    cluster.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_no_request_waits_for_an_image_that_another_fills() -> None:
    """While one instance fills, the other reads the files; later it adopts the image."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, instances=2, slabs=12, max_context=128, host_slabs=20
    )
    cluster.start()
    assert cluster.work(0)
    assert cluster.work(1)
    cluster.settle()
    assert stores(cluster) == [("a", "fill"), ("a", "files")]

    for number in range(4):
        cluster.ask(f"a{number}", "a")
    cluster.settle()

    assert stores(cluster)[2:] == [("a", "adopt")]


def test_an_image_half_written_by_a_lost_instance_is_given_back() -> None:
    """What a dead worker was writing is dropped, and written again by who needs it."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, instances=1, slabs=12, max_context=128, host_slabs=20
    )
    cluster.start()
    cluster.work(0)
    assert cluster.machine.weight_cache.get("a") is not None

    cluster.lose(0)

    assert cluster.machine.weight_cache.get("a") is None
    cluster.machine.check_integrity()
    cluster.start(0)
    cluster.settle()
    assert stores(cluster) == [("a", "fill"), ("a", "fill")]


def test_a_whole_image_outlives_its_writer() -> None:
    """Once whole, an image needs no reading of files after a loss."""
    cluster = cluster_of("a", host_slabs=20)

    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert stores(cluster) == [("a", "fill"), ("a", "adopt")]


def test_files_that_cannot_be_read_fail_one_model() -> None:
    """A model whose files are gone fails by name, with its requests; others are served."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a", "b"])
    cluster.world.unreadable.add("c")

    lost = cluster.ask("c1", "c")
    kept = cluster.ask("a1", "a")
    cluster.settle()

    assert lost.outcome == "model_failed"
    assert kept.outcome == FinishReason.LENGTH
    assert cluster.machine.failed == {"c": "its files are gone"}
    cluster.machine.check_integrity()
    assert cluster.machine.instances[0].ledger.weights.keys() == {"a"}


def test_a_failed_fill_gives_its_place_back() -> None:
    """An image that cannot be written frees its slabs, and requests that ran on them go on."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3)
    cluster.world.unreadable.add("c")

    lost = cluster.ask("c1", "c")
    cluster.settle()

    assert lost.outcome == "model_failed"
    assert cluster.machine.weight_cache.get("c") is None
    serve(cluster, "a", "b", "a")


def test_a_failed_prefetch_is_not_in_the_way() -> None:
    """The turn beside which a prefetch failed goes on, and its slabs are free again."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, pinned=["a", "b"], slabs=20)
    cluster.world.unreadable.add("c")
    served = cluster.ask("a1", "a", output=40)
    cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    lost = cluster.ask("c1", "c")

    cluster.settle()

    assert (served.outcome, lost.outcome) == (FinishReason.LENGTH, "model_failed")
    assert "c" not in cluster.machine.instances[0].ledger.weights


def test_a_failure_of_what_is_not_on_its_way_is_only_reported() -> None:
    """A report that comes late, when the weights are gone again, harms nothing."""
    cluster = cluster_of("ab", host_slabs=20)

    cluster.tell(ModelFailed(instance=0, model="a", reason="its files are gone"))

    assert cluster.ask("a1", "a").outcome == "model_failed"
    serve(cluster, "b")


def test_a_prefetch_fills_no_image() -> None:
    """Filling takes the worker's time; a prefetch without an image reads the files beside."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3, slabs=24)
    for name in "abc":
        cluster.ask(f"{name}1", name, output=40)
    start = len(cluster.journal)

    cluster.work_until(0, lambda: any(p.model == "c" for p in cluster.commands(PrefetchModel)))

    assert ("c", "fill") not in stores(cluster, start)
    cluster.settle()


def test_a_lost_instance_reads_nothing() -> None:
    """A worker that dies while it loads does not keep the image from giving way."""
    cluster = cluster_of(
        "abc", host_slabs=11, kv_floor_slabs=3, instances=2, policy="serverlessllm"
    )
    cluster.ask("a1", "a", output=30)
    (loading,) = [i.id for i in cluster.machine.instances.values() if i.job is not None]
    del cluster.up[loading]
    cluster.tell(InstanceLost(instance=loading))
    cluster.ask("b1", "b", output=30)
    cluster.ask("c1", "c", output=30)

    cluster.settle()

    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_what_another_instance_writes_is_not_given_away() -> None:
    """A model that fails on one instance keeps slabs that another one fills until that is done."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, instances=2, slabs=12, max_context=128, host_slabs=20
    )
    cluster.start()
    cluster.work(0)
    cluster.up[1].queue.clear()

    cluster.tell(ModelFailed(instance=1, model="a", reason="its files are gone"))

    assert cluster.machine.host.weight_slabs == 4
    cluster.settle()
    assert cluster.machine.host.weight_slabs == 0
    assert cluster.ask("a1", "a").outcome == "model_failed"


def test_an_image_that_is_held_stays() -> None:
    """Workers write to it: it gives way neither to another model nor when its own fails, until
    that is over."""
    cluster = cluster_of("abc", host_slabs=11, kv_floor_slabs=3)
    start = len(cluster.journal)

    cluster.tell(ImageHeld(model="a", held=True))
    serve(cluster, "a", "b", "c", "b")
    assert stores(cluster, start) == [("c", "fill"), ("b", "fill")]
    assert cluster.machine.weight_cache.get("a") is not None

    cluster.tell(ModelFailed(instance=0, model="a", reason="its files are gone"))
    cluster.settle()
    assert cluster.machine.weight_cache.get("a") is not None
    cluster.tell(ImageHeld(model="a", held=False))
    assert cluster.machine.weight_cache.get("a") is None
    cluster.machine.check_integrity()


def test_a_stale_image_is_filled_anew() -> None:
    """Nothing could write to it. Where there is none, or one that is not whole, nothing goes."""
    cluster = cluster_of("a", host_slabs=20)
    cluster.lose(0)

    for _ in range(2):
        cluster.tell(ImageHeld(model="a", held=True))
        cluster.tell(ImageHeld(model="a", held=False, stale=True))
        assert cluster.machine.weight_cache.get("a") is None
    cluster.start(0)
    cluster.work(0)
    cluster.tell(ImageHeld(model="a", held=False, stale=True))
    assert cluster.machine.weight_cache.get("a") is not None
    cluster.settle()

    assert stores(cluster) == [("a", "fill"), ("a", "fill")]
