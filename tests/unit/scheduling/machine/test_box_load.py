"""What a machine says of its box to a router, as models come and requests wait, run and end."""

from __future__ import annotations

from appliance.scheduling.reports.box_load import machine_load
from appliance.vocabulary import ModelLoadRequested
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

SLABS, WEIGHTS = 12, 4


def ready() -> ClusterDouble:
    """Three models of which two fit on the device, and none is there."""
    cluster = ClusterDouble(
        {name: ModelDouble(WEIGHTS, shape()) for name in "abc"},
        slabs=SLABS,
        policy="serverlessllm",
    )
    cluster.start()
    cluster.settle()
    return cluster


def test_an_idle_box_has_images_and_free_memory() -> None:
    """Nothing waits, and all of the pool is free."""
    cluster = ready()
    found = machine_load(cluster.machine, cluster.now)

    assert (found.resident, found.coming, found.host) == (frozenset(), frozenset(), {*"abc"})
    assert (found.waiting, found.running, found.queue_age_seconds) == (0, 0, 0.0)
    assert found.pool_free_bytes == SLABS * cluster.machine.host.slab_bytes


def test_a_model_is_coming_until_it_is_resident() -> None:
    """From when a request asks for it, or an operator."""
    cluster = ready()
    cluster.ask("r", "a")
    first = machine_load(cluster.machine, cluster.now)
    assert (first.resident, first.coming, first.running) == (frozenset(), {"a"}, 1)

    cluster.tell(ModelLoadRequested(model="b"))
    wanted = machine_load(cluster.machine, cluster.now)
    assert wanted.coming == {"a", "b"}
    assert (wanted.requests_by_model, wanted.asked_models) == ({"a": 1}, 1)

    cluster.settle()
    found = machine_load(cluster.machine, cluster.now)
    assert (found.resident, found.coming) == ({"a", "b"}, frozenset())
    assert (wanted.resident_models, wanted.coming_models) == (0, 2)
    assert (found.resident_models, found.coming_models) == (2, 0)
    assert found.pool_free_bytes < SLABS * cluster.machine.host.slab_bytes


def test_a_queued_request_ages_and_brings_its_model() -> None:
    """What was never computed waits; what is computed does not."""
    cluster = ready()
    cluster.ask("first", "a")
    cluster.now += 1.0
    cluster.ask("second", "b")
    cluster.ask("third", "c")
    arrived = cluster.machine.requests["second"].arrived
    found = machine_load(cluster.machine, arrived + 2.5)

    assert (found.waiting, found.running, found.queue_age_seconds) == (2, 1, 2.5)
    assert found.coming == {"a", "b", "c"}
    assert found.waiting_by_model == {"b": 1, "c": 1}


def test_a_lost_instance_has_nothing() -> None:
    """Neither models nor memory; its request waits, and its model comes when it is back."""
    cluster = ready()
    cluster.ask("r", "a")
    cluster.settle()
    cluster.ask("s", "b")
    cluster.lose(0)
    found = machine_load(cluster.machine, cluster.now)

    assert (found.resident, found.coming, found.pool_free_bytes) == (frozenset(), {"b"}, 0)
    assert (found.waiting, found.running) == (1, 0)
    assert found.waiting_by_model == {"b": 1}
