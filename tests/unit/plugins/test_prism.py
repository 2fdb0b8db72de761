"""Prism's algorithms against exhaustive search and by hand, and its answers to the machine."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.plugins.prism import (
    GpuBudget,
    ModelDemand,
    Prism,
    kvpr,
    moore_hodgson,
    place_greedily,
)
from appliance.scheduling.policy_api import InstanceView, Migration, Phase, PlannedTurn
from tests.unit.plugins.policy_views import (
    GIB,
    FixedCosts,
    batch_view,
    cluster_view,
    decoding_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

# --- Moore-Hodgson -------------------------------------------------------------------------------


def on_time(jobs: list[tuple[int, int]]) -> bool:
    """Whether jobs (deadline, seconds) can all be on time from time 0 on."""
    ends = itertools.accumulate(seconds for _, seconds in sorted(jobs))
    return all(end <= deadline for end, (deadline, _) in zip(ends, sorted(jobs), strict=True))


@given(jobs=st.lists(st.tuples(st.integers(-2, 30), st.integers(1, 12)), max_size=7))
@settings(deadline=None)
def test_no_order_makes_fewer_late(jobs: list[tuple[int, int]]) -> None:
    """Those that are to be on time are, and exhaustive search finds no larger set that could be."""
    deadlines, seconds = [d for d, _ in jobs], [p for _, p in jobs]

    kept, late = moore_hodgson(deadlines, seconds, 0.0)

    assert sorted([*kept, *late]) == list(range(len(jobs)))
    ends = itertools.accumulate(seconds[job] for job in kept)
    assert all(end <= deadlines[job] for end, job in zip(ends, kept, strict=True))
    sizes = (
        len(some)
        for count in range(len(jobs) + 1)
        for some in itertools.combinations(jobs, count)
        if on_time(list(some))
    )
    assert len(kept) == max(sizes)


def test_the_longest_makes_way() -> None:
    """By hand: jobs 0-3 end at 4, 5, 12, ...; the third would be late, the longest so far (itself,
    7 s) goes; the fourth is on time then; the last would be late, and job 0 (4 s) goes for it."""
    deadlines, seconds = [6.0, 8.0, 9.0, 11.0, 11.5], [4.0, 1.0, 7.0, 5.0, 3.0]

    kept, late = moore_hodgson(deadlines, seconds, 0.0)

    assert (kept, late) == ([0, 1, 4], [2, 3])


def test_time_passes() -> None:
    """What could be on time at 0 cannot be at 5."""
    assert moore_hodgson([6.0], [4.0], 0.0) == ([0], [])
    assert moore_hodgson([6.0], [4.0], 5.0) == ([], [0])


# --- placement -----------------------------------------------------------------------------------

CAPACITY = 100.0


def test_pressure() -> None:
    """KVPR is the pressure over what is left for KV, infinite when nothing is."""
    assert kvpr(GpuBudget(6.0, 3.0)) == 2.0
    assert kvpr(GpuBudget(0.0, 0.0)) == math.inf


def highest_kvpr(loads: list[ModelDemand], gpus: tuple[int, ...]) -> float:
    """Of a placement: the KVPR of the GPU that is worst off."""
    totals = [
        (
            sum(load.weight for load, gpu in zip(loads, gpus, strict=True) if gpu == number),
            CAPACITY
            - sum(
                load.weight_bytes for load, gpu in zip(loads, gpus, strict=True) if gpu == number
            ),
        )
        for number in set(gpus)
    ]
    return max(kvpr(GpuBudget(weight, left)) for weight, left in totals)


@given(
    models=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 15)), min_size=1, max_size=6),
    count=st.integers(1, 3),
)
@settings(deadline=None)
def test_greedy_is_within_its_bound(models: list[tuple[int, int]], count: int) -> None:
    """No more than 1 + C / (C - all weights) times the optimum that exhaustive search finds."""
    loads = [ModelDemand(f"m{n}", weight, size) for n, (weight, size) in enumerate(models)]
    capacity = dict.fromkeys(range(count), CAPACITY)

    plan = place_greedily(loads, capacity, {}, 0.0)

    placed = tuple(plan.homes[load.model][0] for load in loads)
    greedy = highest_kvpr(loads, placed)
    assert greedy == pytest.approx(max(kvpr(gpu) for gpu in plan.gpus.values()))
    best = min(
        highest_kvpr(loads, choice) for choice in itertools.product(range(count), repeat=len(loads))
    )
    everything = sum(load.weight_bytes for load in loads)
    assert greedy <= best * (1 + CAPACITY / (CAPACITY - everything)) * (1 + 1e-9)


def test_the_heaviest_first_and_where_pressure_stays_lowest() -> None:
    """By hand: a (10) takes GPU 0, b (6) GPU 1, c (5) GPU 1 as 11/60 < 15/60."""
    loads = [ModelDemand("c", 5.0, 20.0), ModelDemand("a", 10.0, 20.0), ModelDemand("b", 6.0, 20.0)]

    plan = place_greedily(loads, {0: 100.0, 1: 100.0}, {}, 0.0)

    assert plan.homes == {"a": (0,), "b": (1,), "c": (1,)}
    assert plan.gpus == {0: GpuBudget(10.0, 80.0), 1: GpuBudget(11.0, 60.0)}


def test_pressure_is_looked_at_with_the_model_in_place() -> None:
    """A big model does not go to the emptier GPU if that would leave it nothing for KV: before it
    is there the small GPU has the lower pressure (0), with it the higher."""
    loads = [ModelDemand("hot", 10.0, 10.0), ModelDemand("big", 5.0, 39.0)]

    plan = place_greedily(loads, {0: 100.0, 1: 40.0}, {}, 0.0)

    assert plan.homes == {"hot": (0,), "big": (0,)}


@pytest.mark.parametrize("size", [40.0, 41.0])
def test_room_for_kv_is_left(size: float) -> None:
    """A model that leaves nothing for KV, or less, does not fit, whatever the pressure is."""
    loads = [ModelDemand("hot", 10.0, 10.0), ModelDemand("big", 0.1, size)]

    plan = place_greedily(loads, {0: 100.0, 1: 40.0}, {"big": (1,)}, 0.5)

    assert plan.homes["big"] == (0,)


def test_what_fits_nowhere_takes_turns() -> None:
    """It adds its pressure where that hurts least, and takes no room from the others."""
    loads = [ModelDemand("a", 10.0, 60.0), ModelDemand("b", 8.0, 60.0), ModelDemand("c", 1.0, 60.0)]

    plan = place_greedily(loads, {0: 100.0, 1: 100.0}, {}, 0.0)

    assert plan.homes == {"a": (0,), "b": (1,), "c": (1,)}
    assert plan.gpus[1] == GpuBudget(9.0, 40.0)


def test_parts_go_to_distinct_gpus() -> None:
    """Each part brings its share; the second goes to the second best."""
    loads = [ModelDemand("tp", 10.0, 60.0, parts=2), ModelDemand("b", 4.0, 10.0)]

    plan = place_greedily(loads, {0: 200.0, 1: 100.0, 2: 50.0}, {}, 0.0)

    assert plan.homes["tp"] == (0, 1)
    assert plan.gpus[0] == GpuBudget(9.0, 160.0)
    with pytest.raises(ValueError, match="4 parts for 3 GPUs"):
        place_greedily(
            [ModelDemand("tp", 1.0, 1.0, parts=4)], dict.fromkeys(range(3), 9.0), {}, 0.0
        )


@pytest.mark.parametrize(("threshold", "home"), [(0.0, 0), (0.3, 0), (0.4, 1)])
def test_small_gains_move_nobody(threshold: float, home: int) -> None:
    """By hand: b meets 10.5/84 beside a at home, and 5/60 elsewhere: lower by a third."""
    loads = [ModelDemand("a", 5.5, 0.0), ModelDemand("b", 5.0, 20.0)]
    homes = {"a": (1,), "b": (1,)}

    plan = place_greedily(loads, {0: 80.0, 1: 104.0}, homes, threshold)

    assert plan.homes == {"a": (1,), "b": (home,)}


# --- answers -------------------------------------------------------------------------------------


def policy(**parameters: object) -> Prism:
    return msgspec.convert(parameters, Prism)


def gpus(*totals_gib: int) -> list[InstanceView]:
    """Instances with this much memory each."""
    return [instance_view(n, total_bytes=total * GIB) for n, total in enumerate(totals_gib)]


def served(placements: object) -> list[set[str]]:
    """The models that each instance may serve."""
    return [set(placement.models) for placement in placements]  # type: ignore[attr-defined]


def test_demand_counts_bytes_and_rate_does_not() -> None:
    """A model that is asked less often but holds more KV weighs more, unless only rates count."""
    often = model_view("often", arrivals=2.0, tokens=200.0, kv_bytes_per_token=1000, requests=1)
    heavy = model_view("heavy", arrivals=1.0, tokens=100.0, kv_bytes_per_token=9000, requests=1)
    strict = model_view(
        "strict", arrivals=1.5, tokens=150.0, kv_bytes_per_token=1000, ttft=0.1, requests=1
    )
    cluster = cluster_view(gpus(80, 70, 60), often, heavy, strict)

    demand = policy(weighting="demand").place(now=0.0, cluster=cluster)
    rate = policy(weighting="rate").place(now=0.0, cluster=cluster)

    assert served(demand) == [{"strict"}, {"heavy"}, {"often"}]
    assert served(rate) == [{"strict"}, {"often"}, {"heavy"}]


def test_a_size_that_is_not_known_yet_is_guessed() -> None:
    """Before its engine is built a model is taken for an average one."""
    known = model_view("known", tokens=100.0, kv_bytes_per_token=1000, requests=1)
    unknown = model_view("unknown", tokens=200.0, kv_bytes_per_token=0, requests=1)

    placements = policy().place(now=0.0, cluster=cluster_view(gpus(80, 60), known, unknown))
    nobody = policy().place(
        now=0.0,
        cluster=cluster_view(gpus(80, 60), model_view("a", kv_bytes_per_token=0, requests=1)),
    )

    assert served(placements) == [{"unknown"}, {"known"}]
    assert served(nobody) == [{"a"}, set()]


def test_idle_models_are_confined_to_no_gpu() -> None:
    """After 50 s without a request, and without any that is being served."""
    idle = model_view("idle", last_arrival=10.0)
    never = model_view("never", last_arrival=-math.inf)
    recent = model_view("recent", last_arrival=11.0)
    working = model_view("working", last_arrival=-100.0, requests=1)
    cluster = cluster_view(gpus(80, 80), idle, never, recent, working)

    placements = policy().place(now=60.5, cluster=cluster)

    assert served(placements) == [{"idle", "never", "recent"}, {"idle", "never", "working"}]


def test_places_are_kept_for_a_period() -> None:
    """Demand that changes moves nobody before the period is over; a GPU that goes does."""
    prism = policy(period_seconds=10.0, migration_threshold=0.0)

    def cluster(a: float, b: float, *, second_up: bool = True) -> list[set[str]]:
        views = [instance_view(0), instance_view(1, total_bytes=60 * GIB, up=second_up)]
        models = [model_view(n, tokens=t, requests=1) for n, t in (("a", a), ("b", b))]
        return served(prism.place(now=now, cluster=cluster_view(views, *models)))

    now = 0.0
    assert cluster(100.0, 50.0) == [{"a"}, {"b"}]
    now = 9.0
    assert cluster(50.0, 100.0) == [{"a"}, {"b"}]
    now = 10.0
    assert cluster(50.0, 100.0) == [{"b"}, {"a"}]
    now = 11.0
    assert cluster(100.0, 50.0, second_up=False) == [{"a", "b"}, set()]


def test_before_anything_is_up_everything_goes_anywhere() -> None:
    """Without a GPU there is no plan."""
    views = [instance_view(n, up=False, total_bytes=0) for n in range(2)]

    placements = policy().place(now=0.0, cluster=cluster_view(views, model_view("a", requests=1)))

    assert [placement.models for placement in placements] == [None, None]


def test_an_idle_model_wakes_where_the_pressure_is_lowest() -> None:
    """And stays there: for its next request, and in the places."""
    prism = policy()
    busy = model_view("busy", requests=1)
    cluster = cluster_view(gpus(80, 79), busy, model_view("idle", last_arrival=-math.inf))
    assert served(prism.place(now=0.0, cluster=cluster)) == [{"busy", "idle"}, {"idle"}]

    first = prism.prefill(now=0.5, request=request_view("idle"), instances=cluster.instances)
    again = prism.prefill(now=0.6, request=request_view("idle"), instances=cluster.instances)

    assert (first.instance, first.group) == (again.instance, again.group) == (1, None)
    assert served(prism.place(now=1.0, cluster=cluster)) == [{"busy"}, {"idle"}]


def test_an_idle_model_that_is_in_memory_wakes_there() -> None:
    """Nothing has to be loaded for it, whatever the pressure."""
    prism = policy()
    views = [instance_view(0, resident=["idle"]), instance_view(1)]
    cluster = cluster_view(
        views, model_view("busy", requests=1), model_view("idle", last_arrival=-math.inf)
    )
    prism.place(now=0.0, cluster=cluster)

    choice = prism.prefill(now=0.5, request=request_view("idle"), instances=views)

    assert choice.instance == 0


def test_the_parts_of_a_model_wake_apart() -> None:
    """On distinct GPUs, though it is still in memory on only one of those that it needs."""
    prism = policy()
    views = [instance_view(0, resident=["tp"]), instance_view(1), instance_view(2)]
    cluster = cluster_view(views, model_view("tp", parts=2, last_arrival=-math.inf))
    prism.place(now=0.0, cluster=cluster)

    choice = prism.prefill(now=0.5, request=request_view("tp"), instances=views)

    assert choice.instance == 0
    assert served(prism.place(now=1.0, cluster=cluster)) == [{"tp"}, {"tp"}, set()]


def test_a_model_that_others_woke_is_confined_where_it_works() -> None:
    """If another policy placed its requests, the next plan finds it there."""
    prism = policy()
    idle = model_view("a", last_arrival=-math.inf)
    prism.place(now=0.0, cluster=cluster_view(2, idle))
    views = [instance_view(0), instance_view(1, groups=(group_view("a"),), resident=["a"])]

    placements = prism.place(now=1.0, cluster=cluster_view(views, model_view("a", requests=1)))

    assert served(placements) == [set(), {"a"}]


def test_without_places_the_least_loaded_serves() -> None:
    """If another policy decides places, nothing is known of pressure."""
    views = [instance_view(0, batches=(batch_view("b"),)), instance_view(1)]

    prefill = policy().prefill(now=0.0, request=request_view("a"), instances=views)
    here = policy().decode(prefilled_on=0, instances=views)
    gone = policy().decode(prefilled_on=7, instances=views)

    assert (prefill.instance, here, gone) == (1, 0, 1)


def test_the_shared_queue_is_ordered_by_moore_hodgson() -> None:
    """Those on time, then the late ones: of a's 4 s and b's 3 s one can be on time until 4."""
    groups = (
        group_view("a", tokens=4000, deadline=3.9),
        group_view("c", tokens=500, deadline=9.0),
        group_view("b", tokens=3000, deadline=4.0),
    )
    instance = instance_view(groups=groups, resident=["a", "b", "c"])

    assert list(policy().admit(now=0.0, instance=instance, costs=FixedCosts())) == [2, 1, 0]


def test_a_switch_is_part_of_the_first_prompt_of_an_absent_model() -> None:
    """It costs the model's first prompt 2 s; its second, and others', none."""
    groups = (
        group_view("a", tokens=500, deadline=2.0),
        group_view("a", tokens=500, deadline=3.1),
        group_view("b", tokens=2000, deadline=2.6),
    )
    costs = FixedCosts(switch=2.0)
    absent = instance_view(groups=groups, resident=["b"])
    present = instance_view(groups=groups, resident=["a", "b"])

    assert list(policy().admit(now=0.0, instance=absent, costs=costs)) == [2, 1, 0]
    assert list(policy().admit(now=0.0, instance=present, costs=costs)) == [0, 2, 1]


def test_no_request_waits_for_ever() -> None:
    """A prompt that is late for longer than anybody's patience goes first."""
    groups = (
        group_view("a", tokens=100, deadline=100.0),
        group_view("b", tokens=100, deadline=0.0),
    )
    instance = instance_view(groups=groups, resident=["a", "b"])

    assert list(policy().admit(now=60.0, instance=instance, costs=FixedCosts())) == [0, 1]
    assert list(policy().admit(now=60.1, instance=instance, costs=FixedCosts())) == [1, 0]


def test_resident_models_interleave() -> None:
    """Each gets a short turn; who has to be brought in comes last and stays for four times that."""
    instance = instance_view(
        batches=(batch_view("a"), batch_view("b"), batch_view("c"), batch_view("d", runnable=0)),
        resident=["b", "c"],
    )

    turns = policy(turn_seconds=0.1).round(instance=instance, costs=FixedCosts(switch=0.5))

    assert turns == [
        PlannedTurn(model="b", quota_seconds=0.1),
        PlannedTurn(model="c", quota_seconds=0.1),
        PlannedTurn(model="a", quota_seconds=2.0),
    ]


def test_a_lone_model_runs_on_until_a_request_joins() -> None:
    """Then its turn ends when a short one would, or with the step that runs."""
    prism, costs = policy(turn_seconds=0.1, alone_seconds=3.0), FixedCosts(step=0.02)
    alone = instance_view(batches=(batch_view("a"),), resident=["a"])
    joined = instance_view(batches=(batch_view("a"), batch_view("b")), turn="a", turn_began=5.0)

    turns = prism.round(instance=alone, costs=costs)

    assert turns == [PlannedTurn(model="a", quota_seconds=3.0)]
    assert prism.preempt(now=5.03, instance=joined, costs=costs) == pytest.approx(0.07)
    assert prism.preempt(now=5.5, instance=joined, costs=costs) == 0.02
    prism.round(instance=joined, costs=costs)
    assert prism.preempt(now=5.5, instance=joined, costs=costs) == math.inf


def test_prompts_and_turns_alternate() -> None:
    """Unless the prompt is computed beside the only model that decodes."""
    waiting = {"groups": (group_view("a"),), "prefills": 1}
    beside = instance_view(batches=(batch_view("a"), batch_view("b", runnable=0)), **waiting)  # type: ignore[arg-type]
    others = instance_view(batches=(batch_view("a"), batch_view("b")), **waiting)  # type: ignore[arg-type]
    fresh = instance_view(groups=(group_view("a"),), batches=(batch_view("b"),))
    alone = instance_view(groups=(group_view("a"),), batches=(batch_view("a"),), prefills=2)

    assert policy().phase(instance=beside) is Phase.PREFILL
    assert policy().phase(instance=others) is Phase.DECODE
    assert policy().phase(instance=fresh) is Phase.PREFILL
    assert policy().phase(instance=alone) is Phase.DECODE
    assert policy(chunk_tokens=0).phase(instance=beside) is Phase.DECODE
    assert policy(chunk_tokens=64).batch().chunk_tokens == 64


def test_a_prompt_without_room_waits_for_others() -> None:
    """By hand: a GPU of 80 GiB has 2 x 15 GiB of weights and a reserve of 8: 42 GiB are left. With
    38 in use a prompt of 4 GiB fits; one of 5 waits until somebody is done."""
    prism = policy(reserve_share=0.1)
    models = [model_view(n, kv_bytes_per_token=GIB // 1024, requests=1) for n in "ab"]

    def phase(model: str, tokens: int, weight_gib: int = 15) -> Phase:
        views = [
            instance_view(
                0,
                total_bytes=80 * GIB,
                kv_bytes=38 * GIB,
                groups=(group_view(model, tokens=tokens),),
                batches=(batch_view("b"),),
            )
        ]
        sized = [msgspec.structs.replace(m, weight_bytes=weight_gib * GIB) for m in models]
        prism.place(now=0.0, cluster=cluster_view(views, *sized))
        return prism.phase(instance=views[0])

    assert phase("a", 4096) is Phase.PREFILL
    assert phase("a", 5120) is Phase.DECODE
    assert phase("a", 5120, weight_gib=40) is Phase.PREFILL
    assert phase("c", 5120) is Phase.PREFILL


def test_requests_follow_their_model() -> None:
    """If it has moved, to where it is; nobody else goes, and nobody where nobody decodes."""
    prism = policy()
    models = [model_view("a", requests=1), model_view("b", requests=1)]
    views = gpus(80, 79)
    prism.place(now=0.0, cluster=cluster_view(views, *models))
    requests = [decoding_view("ra", "a"), decoding_view("rb", "b"), decoding_view("rc", "c")]

    moved = prism.flow(instance=views[0], requests=requests, others=views[1:])

    assert moved == [Migration(request="rb", target=1)]
    assert prism.flow(instance=views[0], requests=requests, others=[]) == []


def test_idle_models_go_first_and_of_them_the_most_patient() -> None:
    """When memory is short: longest SLO first; the others as the machine says."""
    prism = policy()
    models = [
        model_view("short", ttft=1.0, last_arrival=0.0),
        model_view("long", ttft=9.0, last_arrival=0.0),
        model_view("busy", ttft=20.0, last_arrival=55.0),
    ]
    prism.place(now=60.0, cluster=cluster_view(1, *models))

    order = prism.evict(now=60.0, victims=["busy", "unheard", "short", "long"])

    assert list(order) == ["long", "short", "unheard"]


def test_what_it_remembers_is_no_parameter() -> None:
    """State cannot be set from a table of parameters."""
    with pytest.raises(msgspec.ValidationError, match="_seen"):
        policy(_seen={})
