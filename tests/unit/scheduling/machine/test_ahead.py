"""Weights that a policy wants on a device before requests ask for them."""

from __future__ import annotations

from typing import Any

from appliance.scheduling.lifecycle import EngineStage
from appliance.scheduling.policy_api import Placement
from appliance.vocabulary import (
    EvictModel,
    LoadModel,
    ModelEvictRequested,
    ModelLoadRequested,
    PrefetchModel,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def ready(names: str, *ahead: Placement, **options: Any) -> ClusterDouble:
    """Every engine is built, and what is wanted ahead is there."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names},
        instances=len(ahead),
        stranger=Told(place=lambda: list(ahead)),
        **options,
    )
    cluster.start()
    cluster.settle()
    return cluster


def wanted(names: str, **options: Any) -> Placement:
    return Placement(ahead=tuple(names), **options)


def where(cluster: ClusterDouble, model: str) -> list[int]:
    """The instances on whose devices the model is."""
    instances = cluster.machine.instances.values()
    return [i.id for i in instances if i.engines[model].stage is EngineStage.LOADED]


def test_weights_are_there_before_a_request() -> None:
    """On both instances that want them; the request loads nothing."""
    cluster = ready("ab", wanted("b"), wanted("b"), slabs=40)

    assert where(cluster, "b") == [0, 1]
    assert where(cluster, "a") == []
    cluster.ask("r", "b")
    cluster.settle()
    assert cluster.commands(LoadModel) == []


def test_a_fifth_of_the_memory_stays_free() -> None:
    """Of 20 slabs 4 stay free: of five models with 4 slabs each, four are loaded. `a` is built
    first, and all are built when it is there; the others come in the order that is wanted."""
    cluster = ready("abcde", wanted("edcba"), slabs=20)

    assert [prefetch.model for prefetch in cluster.commands(PrefetchModel)] == ["a", "e", "d", "c"]
    assert where(cluster, "b") == []
    assert cluster.commands(EvictModel) == []


def test_a_model_that_may_not_be_served_there_is_not_loaded() -> None:
    only_a = wanted("ba", models=frozenset("a"))
    cluster = ready("ab", only_a, Placement(), slabs=40)

    assert (where(cluster, "a"), where(cluster, "b")) == ([0], [])


def test_what_an_operator_unloads_stays_away_until_it_is_used() -> None:
    """Neither the load of another model nor its turn brings it back; its own request does."""
    cluster = ready("ab", wanted("a"), slabs=40)

    cluster.tell(ModelEvictRequested(model="a"))
    cluster.settle()
    cluster.ask("r", "b")
    cluster.settle()
    assert where(cluster, "a") == []

    cluster.ask("s", "a")
    cluster.settle()
    assert where(cluster, "a") == [0]
    assert cluster.machine.dispatcher.prefetcher.unloaded == set()


def test_what_an_operator_loads_again_is_kept_ahead_again() -> None:
    cluster = ready("a", wanted("a"), slabs=40)
    cluster.tell(ModelEvictRequested(model="a"))
    cluster.settle()

    cluster.tell(ModelLoadRequested(model="a"))
    cluster.settle()

    assert where(cluster, "a") == [0]
    assert cluster.machine.dispatcher.prefetcher.unloaded == set()


def test_a_load_ahead_goes_on_during_a_job_and_gives_way_to_one_that_is_waited_for() -> None:
    """While `c` is loaded ahead, a request of `a`, which is there, lets the load go on; one of `b`,
    which is not, takes the link."""

    def evicted_during_load(asked: str) -> list[str]:
        cluster = ClusterDouble(
            {name: ModelDouble(4, shape()) for name in "abc"},
            slabs=40,
            stranger=Told(place=lambda: [wanted("ac")]),
        )
        cluster.start()
        cluster.work_until(0, lambda: len(cluster.commands(PrefetchModel)) == 2)
        assert cluster.machine.instances[0].ledger.loading == {"c"}
        cluster.ask("r", asked)
        cluster.settle()
        assert where(cluster, "c") == [0]
        return [evict.model for evict in cluster.commands(EvictModel)]

    assert evicted_during_load("a") == []
    assert evicted_during_load("b") == ["c"]
