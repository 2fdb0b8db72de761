"""Homes of models: each has as many as its share of the demand is instances, and keeps them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from appliance.plugins.homes import PERIOD_SECONDS, Homes, HomeSeeker, find_homes, is_better
from appliance.scheduling.policy_api import InstanceView, Migration
from tests.unit.plugins.policy_views import batch_view, decoding_view, instance_view

GB = 1 << 30

seekers = st.lists(
    st.builds(
        HomeSeeker,
        model=st.text("abcdef", min_size=1, max_size=4),
        demand=st.floats(1e-3, 20),
        weight_bytes=st.integers(1, 90 * GB),
        instances=st.none() | st.frozensets(st.integers(0, 3), min_size=1),
    ),
    max_size=12,
    unique_by=lambda one: one.model,
)


@given(seekers, st.integers(4, 9))
def test_every_model_has_homes_where_it_can_be_served(
    given_: list[HomeSeeker], instances: int
) -> None:
    capacity = dict.fromkeys(range(instances), 80 * GB)

    homes = find_homes(given_, capacity, {}, 0.2)

    assert homes.keys() == {one.model for one in given_}
    total = sum([one.demand for one in given_])
    for one in given_:
        able = capacity.keys() if one.instances is None else one.instances & capacity.keys()
        share = math.ceil(one.demand / total * instances - 1e-9)
        assert homes[one.model] <= set(able)
        assert 1 <= len(homes[one.model]) <= min(len(able), max(2, share))
        if sum([other.weight_bytes for other in given_]) < 64 * GB:  # KV has its room, too
            assert len(homes[one.model]) >= min(len(able), max(1, share))


def test_a_further_home_needs_room_next_to_the_others() -> None:
    """Each has one before any has several: with two of 50 GB on two instances of 80 there is no
    room for another one, on a third instance there is."""
    hot, other = HomeSeeker("hot", 2.0, 50 * GB), HomeSeeker("other", 1.0, 50 * GB)

    def homes_of_hot(instances: int) -> int:
        capacity = dict.fromkeys(range(instances), 80 * GB)
        return len(find_homes([hot, other], capacity, {}, 0.2)["hot"])

    assert [homes_of_hot(count) for count in (2, 3)] == [1, 2]


def test_an_instance_that_is_full_has_no_room_for_further_homes() -> None:
    """Two of 60 GB are more than the 80 of either; a small one with most of the demand gets one
    home all the same."""
    large = [HomeSeeker(f"m{n}", 0.1, 60 * GB) for n in range(4)]
    hot = HomeSeeker("hot", 9.0, 10 * GB)

    assert len(find_homes([hot, *large], {0: 80 * GB, 1: 80 * GB}, {}, 0.2)["hot"]) == 1


def test_models_that_fit_nowhere_stay_where_they_are() -> None:
    """Their homes do not follow small changes of demand."""
    capacity = dict.fromkeys(range(2), 80 * GB)

    def plan(demands: list[float], known: dict[str, frozenset[int]]) -> dict[str, frozenset[int]]:
        models = [HomeSeeker(f"m{n}", demand, 50 * GB) for n, demand in enumerate(demands)]
        return find_homes(models, capacity, known, 0.2)

    before = plan([1.0, 0.9, 0.8, 0.7], {})
    assert plan([0.9, 1.0, 0.7, 0.8], before) == before


def test_a_model_leaves_a_home_for_much_less_pressure_only() -> None:
    """Of two models on one instance, one moves to an empty one if the pressure there is lower by
    more than 60 %."""
    known = {"a": frozenset({0}), "b": frozenset({0}), "d": frozenset({2}), "e": frozenset({3})}

    def home_of_b(**demands: float) -> frozenset[int]:
        homes = Homes()
        homes.of = known
        homes.plan(
            dict.fromkeys(range(4), 80 * GB),
            [HomeSeeker(model, demand, GB) for model, demand in demands.items()],
        )
        return homes.of["b"]

    assert home_of_b(a=1.0, b=0.9, c=0.5, d=1.05, e=1.05) == {0}
    assert home_of_b(a=0.99, b=0.4, c=0.3, d=0.99, e=0.99, f=0.3) == {1}


@given(seekers)
def test_homes_stay_while_demand_does(given_: list[HomeSeeker]) -> None:
    capacity = dict.fromkeys(range(4), 80 * GB)
    homes = find_homes(given_, capacity, {}, 0.2)

    assert find_homes(given_, capacity, homes, 0.2) == homes


def test_alike_models_are_dealt_out_evenly() -> None:
    alike = [HomeSeeker(f"m{n}", 0.3, 2 * GB) for n in range(12)]

    homes = find_homes(alike, dict.fromkeys(range(4), 80 * GB), {}, 0.2)

    assert [sum([i in mine for mine in homes.values()]) for i in range(4)] == [3, 3, 3, 3]


def test_a_second_home_where_memory_and_time_are_to_spare() -> None:
    """Four models on four instances have one more home each while an instance is asked for no more
    than half of its time, and three fifths of its memory stay free with it."""

    def homes_of_each(demand: float, weight_bytes: int) -> list[int]:
        alike = [HomeSeeker(f"m{n}", demand, weight_bytes) for n in range(4)]
        homes = find_homes(alike, dict.fromkeys(range(4), 80 * GB), {}, 0.2)
        return [len(mine) for mine in homes.values()]

    assert homes_of_each(0.3, 16 * GB) == [2, 2, 2, 2]
    assert homes_of_each(0.3, 17 * GB) == [1, 1, 1, 1]
    assert homes_of_each(0.6, 16 * GB) == [1, 1, 1, 1]


def test_a_lone_model_is_everywhere() -> None:
    assert find_homes([HomeSeeker("m", 0.2, GB)], {0: GB, 3: GB}, {}, 0.2) == {"m": {0, 3}}


def test_a_further_home_leaves_kv_room_next_to_others() -> None:
    """A third of 25 GB would fit into 80 next to two others, but leave no room for KV."""
    hot = HomeSeeker("hot", 2.0, 25 * GB)
    others = [HomeSeeker(f"m{n}", 0.6, 25 * GB) for n in range(3)]

    def homes_of_hot(size: int) -> int:
        return len(find_homes([hot, *others], {0: size * GB, 1: size * GB}, {}, 0.2)["hot"])

    assert [homes_of_hot(size) for size in (80, 100)] == [1, 2]


def test_homes_stay_where_memory_is_full_and_demands_differ_little() -> None:
    """What is left of memory is much less where three models are than where two are, whatever is
    asked of them: that moves none of them."""
    known = {name: frozenset([n >= 3]) for n, name in enumerate("abcde")}
    demands = dict(zip("abcde", (0.3, 0.25, 0.2, 0.4, 0.25), strict=True))
    five = [HomeSeeker(name, demand, 20 * GB) for name, demand in demands.items()]

    assert find_homes(five, {0: 65 * GB, 1: 65 * GB}, known, 0.6) == known


def test_a_model_leaves_an_instance_that_has_no_room_for_kv() -> None:
    """19 GB next to 60 leave 1 of 80; elsewhere, where as much is asked, 59 are free."""
    known = {"large": frozenset([0]), "tiny": frozenset([1]), "third": frozenset([0])}
    three = [
        HomeSeeker("large", 1.0, 60 * GB),
        HomeSeeker("tiny", 1.0, 2 * GB),
        HomeSeeker("third", 0.5, 19 * GB),
    ]

    assert find_homes(three, {0: 80 * GB, 1: 80 * GB}, known, 0.6)["third"] == {1}


def test_weights_that_do_not_fit_get_no_further_homes() -> None:
    huge = HomeSeeker("huge", 1.0, 90 * GB)

    assert len(find_homes([huge], {0: 80 * GB, 1: 80 * GB}, {}, 0.2)["huge"]) == 1


def test_a_plan_stays_unless_another_has_a_tenth_less_pressure() -> None:
    """Two models of one demand could change places, which gains nothing; two on one of two
    instances gain by parting."""
    pair = [HomeSeeker("a", 1.0, 20 * GB), HomeSeeker("b", 0.95, 20 * GB)]
    capacity = {0: 80 * GB, 1: 80 * GB}
    apart, swapped = (
        {"a": frozenset([0]), "b": frozenset([1])},
        {
            "a": frozenset([1]),
            "b": frozenset([0]),
        },
    )
    together = {"a": frozenset([0]), "b": frozenset([0])}

    assert not is_better(pair, capacity, swapped, apart)
    assert is_better(pair, capacity, apart, together)
    assert not is_better(pair, capacity, together, apart)


def test_no_instance_has_no_homes() -> None:
    """Nor has one that is left over."""
    homes = Homes()

    homes.plan({}, [HomeSeeker("a", 1.0, GB)])

    assert homes.of == {}


def test_models_that_do_not_fit_have_homes_all_the_same() -> None:
    large = [HomeSeeker(f"m{n}", 1.0, 100 * GB) for n in range(4)]

    homes = find_homes(large, {0: 80 * GB, 1: 80 * GB}, {}, 0.2)

    assert sorted([min(mine) for mine in homes.values()]) == [0, 0, 1, 1]


def test_homes_are_thought_over_now_and_then_and_when_an_instance_goes() -> None:
    homes = Homes()

    assert homes.are_due(0.0, "two instances")
    assert not homes.are_due(PERIOD_SECONDS / 2, "two instances")
    assert homes.are_due(PERIOD_SECONDS / 2, "one instance")
    assert not homes.are_due(PERIOD_SECONDS, "one instance")
    assert homes.are_due(1.5 * PERIOD_SECONDS, "one instance")


def test_homes_follow_demand_and_instances() -> None:
    homes, capacity = Homes(), dict.fromkeys(range(4), 80 * GB)
    alike = [HomeSeeker(name, 1.0, GB) for name in "abcd"]
    homes.plan(capacity, alike)
    assert sorted([sum([i in mine for mine in homes.of.values()]) for i in range(4)]) == [
        1,
        1,
        1,
        1,
    ]

    homes.plan(capacity, [HomeSeeker("a", 9.0, GB), *alike[1:]])
    assert len(homes.of["a"]) == 3

    del capacity[3]
    homes.plan(capacity, alike)
    assert set.union(*[set(mine) for mine in homes.of.values()]) == {0, 1, 2}


def test_models_that_too_few_instances_can_serve_have_none() -> None:
    homes, capacity = Homes(), dict.fromkeys(range(3), GB)
    homes.plan(capacity, [HomeSeeker("a", 1.0, 1, frozenset({2, 3}))])
    assert homes.of == {}
    homes.plan(dict.fromkeys(range(1), GB), [HomeSeeker("a", 1.0, 1)])
    assert homes.of == {}
    homes.plan(capacity, [HomeSeeker("a", 1.0, 1)])
    assert homes.of == {"a": {0, 1, 2}}


def test_requests_that_a_home_left_behind_go_on_at_a_home() -> None:
    """Where the weights are, then where less KV is; those of models with a home here, or without
    any, stay."""
    homes = Homes()
    homes.of = {"moved": frozenset({1, 2, 3}), "here": frozenset({0, 1})}
    requests = [decoding_view(f"of {name}", name) for name in ("moved", "here", "anywhere")]
    here = instance_view(0)
    away = instance_view(1)
    busy = instance_view(2, resident=frozenset({"moved"}), batches=(batch_view("b", kv_tokens=9),))
    idle = instance_view(3, resident=frozenset({"moved"}))

    def target(*others: InstanceView) -> list[Migration]:
        return homes.moves(here, requests, others)

    assert target(away, busy, idle) == [Migration(request="of moved", target=3)]
    assert target(away, busy) == [Migration(request="of moved", target=2)]
    assert target(away) == [Migration(request="of moved", target=1)]
    assert target(instance_view(4)) == []
