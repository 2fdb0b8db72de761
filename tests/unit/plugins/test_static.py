"""A fixed partition: who is placed where, and that it stays so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plugins.static import Static, partition
from appliance.scheduling.policy_api import ClusterView
from tests.unit.plugins.policy_views import GIB, cluster_view, instance_view, model_view

GB = 10**9
CAPACITY = [80 * GB] * 2


def cluster_of(
    *weights: int, up: tuple[bool, ...] = (True, True), size: int = 100 * GIB
) -> ClusterView:
    """Models a, b, c… of so many GiB on instances of `size` bytes."""
    models = [
        model_view(name, weight_bytes=weight * GIB)
        for name, weight in zip("abcdefgh", weights, strict=False)
    ]
    instances = [
        instance_view(number, up=is_up, total_bytes=size if is_up else 0)
        for number, is_up in enumerate(up)
    ]
    return cluster_view(instances, *models)


def test_the_busiest_models_are_apart() -> None:
    """By expected rate, each where the least rate is; not by the sizes."""
    models = [model_view(name, weight_bytes=10 * GB) for name in "abcd"]

    made = partition(models, CAPACITY, 0.1, {"a": 8.0, "b": 5.0, "c": 2.0, "d": 2.0})

    assert made.models == (frozenset("a"), frozenset("bcd"))
    assert not made.unfit


def test_of_equal_rates_the_largest_is_placed_first() -> None:
    """So that what is left over is small."""
    sizes = {"small": 10, "middle": 20, "large": 50, "huge": 60}
    models = [model_view(name, weight_bytes=size * GB) for name, size in sizes.items()]

    made = partition(models, CAPACITY, 0.05, {})

    assert made.models == (frozenset({"huge", "small"}), frozenset({"large", "middle"}))


def test_what_has_the_fewest_instances_is_placed_first() -> None:
    """A busier, larger model that can be anywhere leaves room where another has to be."""
    anywhere = model_view("anywhere", weight_bytes=60 * GB)
    bound = model_view("bound", weight_bytes=50 * GB, instances=frozenset({0}))

    made = partition([anywhere, bound], CAPACITY, 0.1, {"anywhere": 9.0})

    assert made.models == (frozenset({"bound"}), frozenset({"anywhere"}))
    assert not made.unfit


@pytest.mark.parametrize(("gigabytes", "served"), [(14, 6), (15, 4), (28, 4), (29, 2), (69, 0)])
def test_how_many_fit(gigabytes: int, served: int) -> None:
    """Weights and KV room have to be there: two models of 14B in FP16 fit a GPU of 80 GB (Aegaeon
    §7.2), and three only if they are smaller than 15 GB."""
    models = [model_view(name, weight_bytes=gigabytes * GB) for name in "abcdef"]

    made = partition(models, CAPACITY, 0.15, {})

    assert len(models) - len(made.unfit) == served


def test_sixteen_gpus_take_thirty_two_models() -> None:
    """The mix of Aegaeon's evaluation on 16 GPUs of 80 GB: two models each, no more."""
    weights = [15.2] * 6 + [17.7] * 2 + [26.0] * 2
    models = [model_view(f"m{n:02}", weight_bytes=int(weights[n % 10] * GB)) for n in range(80)]

    made = partition(models, [80 * GB] * 16, 0.15, {})

    assert len(models) - len(made.unfit) == 32


def test_the_parts_of_a_model_are_on_as_many_gpus() -> None:
    """A model that two GPUs share takes half of its weights on each."""
    large = model_view("large", weight_bytes=100 * GB, parts=2)

    assert not partition([large], CAPACITY, 0.15, {}).unfit


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    rates=st.lists(st.floats(0, 10), min_size=12, max_size=12),
    instances=st.integers(1, 5),
)
def test_every_model_has_one_place(sizes: list[int], rates: list[float], instances: int) -> None:
    """Also what fits nowhere; the others fit with their room for KV."""
    models = [model_view(f"m{n}", weight_bytes=size * GB) for n, size in enumerate(sizes)]
    of = {model.name: model for model in models}

    made = partition(
        models,
        [80 * GB] * instances,
        0.15,
        dict(zip(of, rates, strict=False)),
    )

    placed = [name for names in made.models for name in names]
    assert sorted(placed) == sorted(of)
    for names in made.models:
        fitting = names - made.unfit
        needed = sum([of[name].weight_bytes for name in fitting]) + len(fitting) * 12 * GB
        assert needed <= 80 * GB


def test_the_partition_stays_when_an_instance_is_lost() -> None:
    """Whose memory is then unknown: its models wait, and others are not moved."""
    policy = Static()
    before = policy.place(cluster=cluster_of(50, 40, 30, 20))

    lost = policy.place(cluster=cluster_of(50, 40, 30, 20, up=(True, False)))

    assert lost == before
    assert [placement.models for placement in before] == [frozenset("ad"), frozenset("bc")]


def test_a_partition_is_fixed_when_all_instances_are_there() -> None:
    """Until then models are placed where it can be seen that they fit."""
    policy = Static()

    early = policy.place(cluster=cluster_of(20, 10, up=(True, False)))
    later = policy.place(cluster=cluster_of(20, 10))

    assert [placement.models for placement in early] == [frozenset("ab"), frozenset()]
    assert [placement.models for placement in later] == [frozenset("a"), frozenset("b")]


def test_other_models_or_instances_are_placed_anew() -> None:
    """What is known is of the models and instances that there were."""
    policy = Static()
    policy.place(cluster=cluster_of(20, 10))

    assert policy.place(cluster=cluster_of(20, 10, 5))[1].models == frozenset("bc")
    assert len(policy.place(cluster=cluster_of(20, 10, 5, up=(True, True, True)))) == 3
