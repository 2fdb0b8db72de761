"""Chiron: the corrected algorithms against brute force and by their claims; the policy whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.plugins.chiron import Chiron
from appliance.plugins.chiron_formulas import (
    BatchSize,
    Queued,
    Yield,
    batch_pressure,
    instances_for_batch,
    instances_needed,
    interactive_pressure,
    next_batch_size,
    pool_size,
    request_groups,
    throughput_pressure,
    waiting_seconds,
)
from appliance.policies.loader import PolicyStack
from appliance.scheduling.policy_api import Fleet, InstanceView, Phase, PrefillChoice, TurnView
from appliance.vocabulary import InstanceClass, Preempt, RequestClass, RunTurn, Ticked, TurnEnded
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

BAND = 0.05
BATCH = RequestClass.BATCH
COSTS = FixedCosts()


# --- local: Alg. 1 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency", "throughput", "size"),
    [(0.5, 0.5, 96), (0.1, 0.1, 352), (0.1, 0.8, 72), (0.96, 0.5, 64), (1.04, 0.5, 64)],
)
def test_growth_is_proportional_to_what_is_left(
    latency: float, throughput: float, size: int
) -> None:
    """Alg. 1: 1.5 times at a backpressure of a half, 5.5 times at a tenth; the larger of the two
    pressures counts, and near 1 nothing changes."""
    assert next_batch_size(64, latency, throughput, BAND, 4096) == size


@pytest.mark.parametrize(("latency", "throughput"), [(1.06, 0.5), (0.1, 1.06), (9.0, 9.0)])
def test_too_much_pressure_halves(latency: float, throughput: float) -> None:
    """However far above 1 either pressure is."""
    assert next_batch_size(64, latency, throughput, BAND, 4096) == 32


@given(size=st.integers(1, 4096), pressure=st.floats(0, 100), largest=st.integers(1, 4096))
def test_a_batch_size_has_bounds(size: int, pressure: float, largest: int) -> None:
    """Neither an idle instance nor a hopeless one makes a size that is none."""
    assert 1 <= next_batch_size(min(size, largest), pressure, 0.0, BAND, largest) <= largest


@pytest.mark.parametrize("step", [1.1, 1.5, 4.0])
@pytest.mark.parametrize(("gain", "pressure"), [(1.0, 0.5), (0.0, 1.0), (-0.5, 2**0.5)])
def test_throughput_pressure_does_not_depend_on_the_step(
    step: float, gain: float, pressure: float
) -> None:
    """A half where throughput is proportional to size, 1 at the inflection, more beyond."""
    before = Yield(size=1000, itl_seconds=0.1, tokens_per_second=50.0)
    after = Yield(
        size=int(1000 * step), itl_seconds=0.1, tokens_per_second=50.0 * float(step**gain)
    )

    assert throughput_pressure(before, after) == pytest.approx(pressure, rel=1e-6)


Curve = Callable[[int], float]


def steady(size: int) -> float:
    """Seconds of a step that grows with the batch: 0.2 s at 360 requests."""
    return 0.02 + 0.0005 * size


def thrashing(peak: int) -> Curve:
    """Throughput has its maximum at `peak`; beyond, preemptions make steps longer and longer."""

    def itl(size: int) -> float:
        return (0.02 + 0.0002 * size) * max(1.0, size / peak) ** 3

    return itl


def turn_of(size: int, itl: float, *, requests: int | None = None, left_out: int = 1) -> TurnView:
    return TurnView(
        model="a",
        requests=size if requests is None else requests,
        limit=size,
        left_out=left_out,
        steps=50,
        tokens=50 * (size if requests is None else requests),
        seconds=50 * itl,
        tbt_seconds=0.1,
    )


def sizes(
    batch: BatchSize, itl: Curve, slo: float, turns: int, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """The batch size of each of so many turns."""
    dice = random.Random(seed)
    ran = []
    for _ in range(turns):
        ran.append(batch.size)
        seconds = itl(batch.size) * (1 + dice.gauss(0, noise))
        batch.observe(turn_of(batch.size, seconds), slo, BAND, settle=3, forget=10_000)
    return ran


@pytest.mark.parametrize("start", [1, 64, 1000])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_size_converges_to_the_latency_that_is_promised(start: int, noise: float) -> None:
    """An interactive instance: the promise is kept, throughput ends up within 10 % of the best that
    keeps it, and stays."""
    tail = sizes(BatchSize(start, 4096), steady, 0.2, 300, noise)[150:]

    assert all([steady(size) <= (1 + BAND) * 0.2 for size in tail])
    assert all([size / steady(size) >= 0.9 * 360 / steady(360) for size in tail])
    assert max(tail) <= 1.05 * min(tail)


@pytest.mark.parametrize("start", [1, 64, 1000])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_size_converges_to_the_inflection(start: int, noise: float) -> None:
    """A batch instance, whose latency does not matter: from below and from beyond, the size ends up
    within 8 % of the one with the highest throughput, and stays."""
    tail = sizes(BatchSize(start, 4096), thrashing(200), 2.0, 300, noise)[150:]

    assert all([abs(size - 200) <= 16 for size in tail])
    assert max(tail) == min(tail)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_collapse_the_batch(seed: int) -> None:
    """With turns that vary by a tenth the mean throughput stays near the best. (As printed, about
    every second update at the equilibrium halves.)"""
    itl = thrashing(200)
    tail = sizes(BatchSize(64, 4096), itl, 2.0, 600, 0.1, seed)[200:]

    assert sum([size / itl(size) for size in tail]) / len(tail) >= 0.8 * 200 / itl(200)


def test_relaxed_promises_make_large_batches() -> None:
    """The same instance runs several times more requests at once for batch work."""

    def itl(size: int) -> float:
        return 0.05 + 0.00005 * size

    interactive = sizes(BatchSize(64, 4096), itl, 0.06, 300)[-1]
    batch = sizes(BatchSize(64, 4096), itl, 2.0, 300)[-1]

    assert batch > 10 * interactive


def test_a_size_that_does_not_bind_stays() -> None:
    """An instance with few requests learns nothing about larger batches."""
    batch = BatchSize(64, 4096)
    for _ in range(20):
        batch.observe(turn_of(64, 0.01, requests=5, left_out=0), 0.1, BAND, 3, 200)

    assert batch.size == 64


def test_what_is_too_slow_already_bounds_the_size() -> None:
    """If fewer requests than allowed are too many, so many are the most, and then half of them."""
    batch = BatchSize(64, 4096)
    batch.observe(turn_of(64, 0.3, requests=40, left_out=0), 0.1, BAND, 3, 200)
    assert batch.size == 40

    batch.observe(turn_of(40, 0.3), 0.1, BAND, 3, 200)
    assert batch.size == 20


def test_the_limit_of_the_model_is_learnt() -> None:
    """A model that runs fewer requests than the policy allows is not asked for more again."""
    batch = BatchSize(64, 4096)
    for _ in range(30):
        batch.observe(turn_of(min(batch.size, 32), 0.01), 0.1, BAND, 3, 200)

    assert batch.size == 32


@pytest.mark.parametrize("nothing", [{"steps": 0}, {"tokens": 0}, {"seconds": 0.0}])
def test_a_turn_without_a_step_says_nothing(nothing: dict[str, float]) -> None:
    """What was ended before its first step is not looked at."""
    batch = BatchSize(64, 4096)
    whole = turn_of(64, 0.5)
    turn = TurnView(**{name: getattr(whole, name) for name in whole.__struct_fields__} | nothing)
    batch.observe(turn, 0.1, BAND, 3, 200)

    assert batch.size == 64


def test_where_more_gains_nothing_less_is_enough() -> None:
    """Throughput that is the same for all sizes: the batch does not grow away from where it was."""
    ran = sizes(BatchSize(64, 4096), lambda size: size / 1000, 20.0, 300)

    assert ran[0] == 64
    assert max(ran) == 96
    assert ran[-1] <= 80


def test_no_batch_is_smaller_than_one_request() -> None:
    """A model too slow for its promise still runs."""
    assert set(sizes(BatchSize(2, 4096), lambda _: 9.0, 0.1, 9)) == {1, 2}


def test_a_ceiling_is_forgotten() -> None:
    """When the work changes and more is better again, the size follows."""
    batch = BatchSize(64, 4096)
    for peak in (200, 800):
        itl = thrashing(peak)
        for _ in range(900):
            batch.observe(turn_of(batch.size, itl(batch.size)), 20.0, BAND, 3, forget=50)
        assert batch.size / itl(batch.size) >= 0.85 * peak / itl(peak)


# --- global: IBP ---------------------------------------------------------------------------------


def working(number: int, kind: InstanceClass = InstanceClass.MIXED) -> InstanceView:
    return instance_view(number, batches=(batch_view("a"),), kind=kind)


def test_interactive_pressure() -> None:
    """Batch instances, resting ones and batch work do not count."""
    views = [
        working(0, InstanceClass.INTERACTIVE),
        instance_view(1, groups=(group_view("a"),)),
        instance_view(2, batches=(batch_view("a", 5, interactive=0),)),
        instance_view(3),
        working(4, InstanceClass.BATCH),
        instance_view(5, kind=InstanceClass.PARKED),
    ]

    assert interactive_pressure(views) == 0.5


@pytest.mark.parametrize(
    ("running", "pool", "wanted"),
    [(1, 3, 3), (2, 6, 6), (2, 5, 5), (2, 4, 6), (3, 8, 8), (1, 6, 3), (0, 3, 1), (5, 5, 15)],
)
def test_the_pool_keeps_its_over_provisioning(running: int, pool: int, wanted: int) -> None:
    """Three times what runs, but nothing changes while the share is within a tenth of a third."""
    assert pool_size(running / pool, pool, 1 / 3, 0.1) == wanted


@given(running=st.integers(0, 20), idle=st.integers(0, 60), theta=st.floats(0.1, 1.0))
def test_a_pool_that_was_sized_is_not_too_small(running: int, idle: int, theta: float) -> None:
    """However it came about: the share of running instances is not above the band."""
    pool = max(1, running + idle)
    wanted = pool_size(running / pool, pool, theta, 0.1)

    assert running / wanted <= theta + 0.1 + 1e-9


def fleets(policy: Chiron, moments: Sequence[tuple[float, Sequence[InstanceView]]]) -> list[Fleet]:
    return [
        policy.scale(
            now=now, cluster=cluster_view(views, model_view("a", output=100.0)), costs=COSTS
        )
        for now, views in moments
    ]


def test_more_instances_at_once_fewer_after_a_while() -> None:
    """Arrivals are answered at once; a lull has to last before instances rest."""
    policy = Chiron(scale_in_seconds=10.0)
    rest = [instance_view(n, kind=InstanceClass.PARKED) for n in range(3, 9)]
    busy = [*(working(n) for n in range(3)), *rest]
    calm = [working(0), *(instance_view(n) for n in range(1, 9))]

    grown, *held = fleets(policy, [(0.0, busy), (1.0, calm), (10.0, calm), (11.0, calm)])

    assert grown == Fleet(interactive=3, mixed=6, batch=0)
    assert held[:2] == [Fleet(interactive=3, mixed=6, batch=0)] * 2
    assert held[2] == Fleet(interactive=1, mixed=2, batch=0)


def test_a_lull_begins_anew() -> None:
    """A moment of load in between, and the time is counted from its end."""
    policy = Chiron(scale_in_seconds=10.0)
    calm = [working(0), *(instance_view(n) for n in range(1, 9))]
    busy = [working(n) for n in range(9)]

    answers = fleets(policy, [(0.0, calm), (9.0, busy), (10.0, calm), (19.0, calm), (20.0, calm)])

    assert [fleet.interactive + fleet.mixed for fleet in answers] == [9, 9, 9, 9, 3]


def test_a_lone_instance_serves_everybody() -> None:
    """There is nothing to divide."""
    assert fleets(Chiron(), [(0.0, [working(0)])]) == [Fleet(interactive=0, mixed=1, batch=0)]


# --- global: BBP ---------------------------------------------------------------------------------


def queued(ttft: float, arrived: float = 0.0, requests: int = 1, mean: float = 1.0) -> Queued:
    return Queued(
        requests=requests,
        ttft_seconds=ttft,
        arrived=arrived,
        mean_seconds=mean,
        deviation_seconds=mean,
    )


def test_request_groups() -> None:
    """Similar SLOs together, first come first served inside, the most urgent group first."""
    waiting = [queued(3600, 5), queued(60, 1), queued(3000, 2), queued(70, 0), queued(9000, 0)]

    assert request_groups(waiting, 1.5) == [[3, 1], [2, 0], [4]]


@given(
    ttfts=st.lists(st.floats(1.0, 1e5), max_size=12),
    similarity=st.floats(1.0, 4.0),
    seed=st.integers(0, 99),
)
@example(ttfts=[2.0, 1.0], similarity=1.0, seed=0)
@example(ttfts=[2.0, 1.0], similarity=1.0, seed=1)
@example(ttfts=[2.0, 1.0], similarity=1.0, seed=2)
def test_groups_are_similar_and_do_not_depend_on_the_order(
    ttfts: list[float], similarity: float, seed: int
) -> None:
    """Everybody is in one group, SLOs of a group are within the factor, and no two groups could
    share their first members; however the queue is shuffled."""
    waiting = [queued(ttft, float(number)) for number, ttft in enumerate(ttfts)]
    groups = request_groups(waiting, similarity)
    shuffled = random.Random(seed).sample(waiting, len(waiting))

    assert sorted(number for group in groups for number in group) == list(range(len(waiting)))
    spans = sorted([sorted([ttfts[number] for number in group]) for group in groups])
    assert all([span[-1] <= similarity * span[0] for span in spans])
    assert all([b[0] > similarity * a[0] for a, b in pairwise(spans)])
    again = [[shuffled[n] for n in group] for group in request_groups(shuffled, similarity)]
    assert again == [[waiting[n] for n in group] for group in groups]


def test_waiting_seconds() -> None:
    """Eq. 1 with the distribution of the sum: 400 outputs of 100 +- 50 tokens at 1000 tokens/s."""
    mean = waiting_seconds(400 * 100, 400 * 50**2, 1000, 0.5)
    safe = waiting_seconds(400 * 100, 400 * 50**2, 1000, 0.975)

    assert mean == pytest.approx(40.0)
    assert safe == pytest.approx(40.0 + 1.96, abs=0.001)
    assert waiting_seconds(1.0, 0.0, 0.0, 0.5) == math.inf


def test_the_estimate_is_conservative_when_the_queue_is_short() -> None:
    """The safe estimate holds as often as it says for outputs that are not normal at all, and what
    it adds to the mean shrinks as the queue grows."""
    dice = random.Random(0)
    added = []
    for ahead in (20, 200, 2000):
        estimate = waiting_seconds(ahead * 100.0, ahead * 100.0**2, 1000.0, 0.9)
        waits = [
            sum([dice.expovariate(1 / 100.0) for _ in range(ahead)]) / 1000.0 for _ in range(200)
        ]
        assert 0.84 <= sum([wait <= estimate for wait in waits]) / len(waits) <= 0.96
        added.append(estimate / (ahead * 0.1) - 1)
    assert added == sorted(added, reverse=True)
    assert added[0] > 0.25
    assert added[2] < 0.03


def needed(waiting: Sequence[Queued], now: float) -> list[float]:
    return instances_needed(waiting, request_groups(waiting, 1.5), now, 0.5)


def test_time_that_has_passed_counts() -> None:
    """A group that is 50 minutes old, needs 20 and has an hour is in danger, though 20 < 60."""
    waiting = [queued(3600.0, 0.0, requests=1201)]

    assert needed(waiting, 0.0) == [1200 / 3600]
    assert needed(waiting, 3000.0) == [1200 / 600]
    assert batch_pressure(needed(waiting, 0.0), 1) == 0
    assert batch_pressure(needed(waiting, 3000.0), 1) == 1
    assert instances_for_batch(needed(waiting, 3000.0), 1, 10) == 1


def test_after_the_deadline_nothing_is_enough() -> None:
    """Who is late already gets all there is."""
    late = needed([queued(60.0, 0.0)], 60.0)

    assert late == [math.inf]
    assert instances_for_batch(late, 3, 7) == 7


def test_groups_wait_for_those_before_them() -> None:
    """Work is ahead of a part if it is of a more urgent group, or came before; the part of a group
    that is worst off counts."""
    waiting = [queued(600, 0, 10), queued(60, 0, 5), queued(600, 3, 2), queued(590, 100, 1)]

    assert needed(waiting, 0.0) == pytest.approx([4 / 60, 16 / 603])
    assert needed(waiting[:2], 0.0) == pytest.approx([4 / 60, 14 / 600])


@given(
    needs=st.lists(st.floats(0, 30) | st.just(math.inf), max_size=5),
    working_already=st.floats(0, 5),
    cap=st.integers(0, 20),
)
def test_no_more_instances_than_needed(
    needs: list[float], working_already: float, cap: int
) -> None:
    """The bisection finds what Alg. 2's loop over n finds: the first n without backpressure."""
    found = instances_for_batch(needs, working_already, cap)

    looped = [n for n in range(cap + 1) if not batch_pressure(needs, working_already + n)]
    assert found == min(looped, default=cap)


@given(
    parts=st.lists(
        st.tuples(
            st.floats(1, 1e4), st.floats(-100, 100), st.integers(1, 50), st.floats(0.01, 10.0)
        ),
        min_size=1,
        max_size=6,
    ),
    instances=st.integers(1, 20),
)
def test_pressure_is_what_waiting_times_say(
    parts: list[tuple[float, float, int, float]], instances: int
) -> None:
    """Eq. 2 by hand: a group is in danger if a request of it waits longer than its oldest may."""
    waiting = [queued(*part) for part in parts]
    groups = request_groups(waiting, 1.5)
    late, ahead = 0, 0.0
    for group in groups:
        dangers = []
        for part in [waiting[number] for number in group]:
            wait = (ahead + (part.requests - 1) * part.mean_seconds) / instances
            # At the edge either answer is right.
            dangers.append(wait > (part.deadline - 100.0) * (1 + 1e-9) or part.deadline <= 100.0)
            ahead += part.requests * part.mean_seconds
        late += any(dangers)

    found = batch_pressure(instances_needed(waiting, groups, 100.0, 0.5), instances - 1e-6)
    lower = batch_pressure(instances_needed(waiting, groups, 100.0, 0.5), instances + 1e-6)
    assert lower <= late <= found


def waiting_batch(requests: int, arrived: float = 0.0, ttft: float = 3600.0) -> InstanceView:
    """A mixed instance busy with interactive requests, with batch requests behind them."""
    group = group_view(
        "a", requests, tokens=10 * requests, arrived=arrived, deadline=arrived + ttft, interactive=0
    )
    return instance_view(0, groups=(group,), batches=(batch_view("a"),))


def test_batch_instances_come_only_when_a_deadline_is_near() -> None:
    """Queued batch work alone adds nothing (§2.3); what remains to be done in what remains does."""
    policy = Chiron(quantile=0.5)
    spare = [instance_view(n, kind=InstanceClass.MIXED) for n in (1, 2)]
    rest = [instance_view(n, kind=InstanceClass.PARKED) for n in (3, 4, 5, 6, 7)]
    # 100 tokens at 64 requests per 0.025 s, and 10 prompt tokens at 1 ms: 0.049 s for each.
    views = [waiting_batch(64_000), *spare, *rest]

    early, late, last = fleets(policy, [(0.0, views), (2800.0, views), (3500.0, views)])

    assert early == Fleet(interactive=1, mixed=2, batch=0)
    assert late.batch == 2
    assert last.batch == 5


def test_batch_instances_stay_until_there_is_no_batch_work() -> None:
    """What is added is not taken away while it works; some time after, it rests."""
    policy = Chiron(scale_in_seconds=5.0)
    mixed = [working(0), instance_view(1), instance_view(2)]
    batch = batch_view("a", 9, interactive=0)
    at_work = [*mixed, instance_view(3, batches=(batch,), kind=InstanceClass.BATCH)]
    done = [*mixed, instance_view(3, kind=InstanceClass.BATCH)]

    answers = fleets(policy, [(0.0, at_work), (50.0, at_work), (51.0, done), (56.0, done)])

    assert [fleet.batch for fleet in answers] == [1, 1, 1, 0]


def test_before_any_output_ended_what_was_asked_for_counts() -> None:
    """Without a mean of outputs the room asked for answers is taken for it."""
    policy = Chiron(quantile=0.5)
    views = [waiting_batch(64_001), *(instance_view(n, kind=InstanceClass.PARKED) for n in (1, 2))]
    model = model_view("a", output=0.0, arrivals=2.0, tokens=2.0 * (10 + 1000))

    # 1000 tokens at 2560 per second, and a prompt: 0.4 s for each, 7.1 hours in all.
    fleet = policy.scale(now=0.0, cluster=cluster_view(views, model), costs=COSTS)

    assert fleet.batch == 2 - (fleet.interactive + fleet.mixed - 1)


def test_without_any_estimate_a_prompt_is_all_the_work() -> None:
    """No output ended, and nothing came for so long that nothing is known."""
    policy = Chiron(quantile=0.5)
    views = [waiting_batch(5), instance_view(1, kind=InstanceClass.PARKED)]
    model = model_view("a", output=0.0, arrivals=0.0)

    fleet = policy.scale(now=0.0, cluster=cluster_view(views, model), costs=COSTS)

    assert (fleet.mixed, fleet.batch) == (2, 0)


def test_what_batch_work_was_seen_to_yield_counts() -> None:
    """The throughput of turns of batch work takes the place of the estimate: here half of it, so
    twice the instances are needed."""
    policy = Chiron(quantile=0.5)
    batch = batch_view("a", 999, interactive=0)
    asked = instance_view(9, batches=(batch,))
    policy.batch(model="a", instance=asked)
    policy.batch(
        model="a", instance=instance_view(9, batches=(batch,), last_turn=turn_of(64, 0.05))
    )
    views = [
        waiting_batch(16_000),
        *(instance_view(n, kind=InstanceClass.PARKED) for n in range(9)),
    ]
    model = model_view("a", output=1000.0)

    def wanted(of: Chiron) -> int:
        return of.scale(now=1000.0, cluster=cluster_view(views, model), costs=COSTS).batch

    # 16000 requests in 2600 s: of 0.4 s each (and 0.01 s for the prompt), or of 0.8 s.
    assert (wanted(Chiron(quantile=0.5)), wanted(policy)) == (3, 5)


# --- where ---------------------------------------------------------------------------------------

INTERACTIVE = InstanceClass.INTERACTIVE


def test_interactive_requests_are_packed() -> None:
    """Those with interactive requests are filled first: IBP is a measure only then (§5.2)."""
    views = [instance_view(0), working(1), instance_view(2)]

    choice = Chiron().prefill(request=request_view("a"), instances=views, costs=COSTS)

    assert choice == PrefillChoice(instance=1)


def test_own_class_first() -> None:
    """Interactive instances before mixed ones; batch instances before mixed ones."""
    views = [instance_view(0), working(1), instance_view(2, kind=INTERACTIVE)]
    assert Chiron().prefill(request=request_view("a"), instances=views, costs=COSTS).instance == 2

    views = [instance_view(0), instance_view(1, kind=InstanceClass.BATCH)]
    batch = request_view("a", kind=BATCH)
    assert Chiron().prefill(request=batch, instances=views, costs=COSTS).instance == 1


def test_a_full_instance_overflows_into_the_next() -> None:
    """Too long a queue of prompts, too many requests, or too little time for their promises."""
    queue = instance_view(0, groups=(group_view("a", 3, tokens=300),), resident="a")
    crowd = instance_view(0, batches=(batch_view("a", 64),))
    slow = instance_view(0, batches=(batch_view("b", tbt=0.03),))
    for view in (queue, crowd, slow):
        choice = Chiron().prefill(
            request=request_view("a"), instances=[view, instance_view(1)], costs=COSTS
        )
        assert choice.instance == 1


def test_when_all_are_full_the_shortest_queue() -> None:
    """Batch prompts do not count: they wait."""
    batch = group_view("a", 50, tokens=50_000, interactive=0)
    views = [
        instance_view(0, groups=(group_view("a", 5, tokens=900),), resident="a"),
        instance_view(1, groups=(batch, group_view("a", 5, tokens=500)), resident="a"),
    ]

    choice = Chiron().prefill(request=request_view("a"), instances=views, costs=COSTS)

    assert choice == PrefillChoice(instance=1, group=1)


def test_batch_work_goes_where_nothing_interactive_runs() -> None:
    """Over-provisioned instances are what batch work is for; where all is full, where least is."""
    views = [working(0), instance_view(1), instance_view(2, groups=(group_view("a"),))]
    batch = request_view("a", kind=BATCH)
    assert Chiron().prefill(request=batch, instances=views, costs=COSTS).instance == 1

    full = [instance_view(n, batches=(batch_view("a", 70 - n, interactive=0),)) for n in (0, 1, 2)]
    assert Chiron().prefill(request=batch, instances=full, costs=COSTS).instance == 2


@pytest.mark.parametrize(
    ("interactive", "ttft", "admitted", "joins"),
    [(0, 3600.0, 1, True), (0, 9000.0, 1, False), (0, 3600.0, 64, False), (1, 3600.0, 1, False)],
)
def test_whom_a_batch_request_waits_with(
    interactive: int, ttft: float, admitted: int, joins: bool
) -> None:
    """Batch requests with similar SLOs, not too many, and no interactive ones."""
    group = group_view(
        "a", arrived=5.0, deadline=5.0 + ttft, admitted=admitted, interactive=interactive
    )
    view = instance_view(groups=(group_view("b"), group))
    request = request_view("a", kind=BATCH, ttft=3000.0)

    choice = Chiron().prefill(request=request, instances=[view], costs=COSTS)

    assert choice == PrefillChoice(instance=0, group=1 if joins else None)


def test_a_request_decodes_where_its_prompt_was_computed() -> None:
    """Unless that instance is for others by now."""
    views = [instance_view(0), working(1)]
    policy = Chiron()

    stays = policy.decode(request=request_view(), prefilled_on=0, instances=views, costs=COSTS)
    goes = policy.decode(request=request_view(), prefilled_on=5, instances=views, costs=COSTS)

    assert (stays, goes) == (0, 1)


# --- what next on an instance --------------------------------------------------------------------


def test_interactive_prompts_first_then_batch_work_by_group() -> None:
    """Interactive prompts as they came; batch prompts by request group."""
    view = instance_view(
        groups=(
            group_view("a", deadline=9000.0, interactive=0),
            group_view("b"),
            group_view("c", deadline=60.0, interactive=0),
            group_view("a", arrived=1.0),
            group_view("d", deadline=8000.0, arrived=-100.0, interactive=0),
        )
    )

    assert list(Chiron().admit(now=0.0, instance=view)) == [1, 3, 2, 4, 0]


def test_batch_prompts_join_what_runs_until_others_have_waited_long() -> None:
    """Of similar prompts those of the model that runs go first; when others have waited for half
    their TTFT, what was begun is finished and then the oldest is next."""
    view = instance_view(
        groups=(
            group_view("a", deadline=100.0, interactive=0),
            group_view("c", 1, admitted=5, arrived=2.0, deadline=102.0, interactive=0),
            group_view("b", arrived=3.0, deadline=103.0, interactive=0),
        ),
        current="b",
    )

    assert list(Chiron().admit(now=50.0, instance=view)) == [2, 0, 1]
    assert list(Chiron().admit(now=51.0, instance=view)) == [1, 0, 2]


def phase_of(view: InstanceView, now: float = 0.0) -> Phase:
    return Chiron().phase(now=now, instance=view, costs=COSTS)


BATCH_PROMPT = group_view("a", tokens=1000, interactive=0)


def test_interactive_prompts_do_not_wait() -> None:
    """Except for those who decode, when a group's worth went before them."""
    groups, batches = (group_view("b"),), (batch_view("a"),)

    assert phase_of(instance_view(groups=groups, batches=batches, prefills=7)) is Phase.PREFILL
    assert phase_of(instance_view(groups=groups, batches=batches, prefills=8)) is Phase.DECODE
    batch = (batch_view("a", interactive=0),)
    assert phase_of(instance_view(groups=groups, batches=batch, prefills=8)) is Phase.PREFILL


@pytest.mark.parametrize(("deadline", "phase"), [(1.5, Phase.PREFILL), (1.0, Phase.DECODE)])
def test_a_batch_prompt_takes_the_time_that_readers_can_spare(
    deadline: float, phase: Phase
) -> None:
    """A prompt of a second, with everything in place: if no interactive token is late by it."""
    view = instance_view(
        groups=(BATCH_PROMPT,), batches=(batch_view("b", deadline=deadline),), resident="ab"
    )

    assert phase_of(view) is phase


def test_the_way_there_and_back_counts() -> None:
    """A model that has to be brought in may cost the interactive one its place."""
    view = instance_view(groups=(BATCH_PROMPT,), batches=(batch_view("b", deadline=3.0),))

    assert phase_of(view) is Phase.DECODE
    assert phase_of(view, now=-1.0) is Phase.PREFILL


def test_a_batch_is_filled_before_it_runs_on() -> None:
    """Prompts join batch work of their model while there is room; another model's wait until
    the one that runs has less than half as many left."""
    mine = batch_view("a", 63, interactive=0)
    full = batch_view("a", 64, interactive=0)
    other = batch_view("b", 9, interactive=0)

    assert phase_of(instance_view(groups=(BATCH_PROMPT,), batches=(mine,))) is Phase.PREFILL
    assert phase_of(instance_view(groups=(BATCH_PROMPT,), batches=(full,))) is Phase.DECODE
    view = instance_view(groups=(BATCH_PROMPT,), batches=(mine, other), current="b")
    assert phase_of(view) is Phase.DECODE
    crowd = group_view("a", 18, tokens=1800, interactive=0)
    assert phase_of(instance_view(groups=(crowd,), batches=(other,), current="b")) is Phase.PREFILL


def test_a_round_serves_readers_first() -> None:
    """Models with interactive requests have turns; batch work gets what they can spare."""
    reader = batch_view("a", deadline=3.0)
    late = batch_view("b", 9, interactive=0, arrived=1.0)
    early = batch_view("c", 9, interactive=0)

    def planned(now: float) -> list[tuple[str, float]]:
        view = instance_view(batches=(reader, late, early), resident="abc")
        turns = Chiron().round(now=now, instance=view, costs=COSTS)
        return [(turn.model, round(turn.quota_seconds, 6)) for turn in turns]

    assert planned(0.0) == [("a", 0.25), ("c", 2.975)]
    assert planned(2.96) == [("a", 0.25)]


def test_without_readers_the_oldest_work_runs() -> None:
    """One model at a time: every switch costs throughput."""
    view = instance_view(
        batches=(
            batch_view("a", interactive=0, arrived=3.0),
            batch_view("b", runnable=0, interactive=0),
            batch_view("c", interactive=0, arrived=2.0),
        )
    )

    (turn,) = Chiron().round(now=9.0, instance=view, costs=COSTS)

    assert (turn.model, turn.quota_seconds) == ("c", 4.0)


@pytest.mark.parametrize(
    ("running", "waiting", "seconds"),
    [
        (0, group_view("a"), 0.0),
        (0, group_view("b"), 0.0),
        (0, group_view("b", interactive=0), math.inf),
        (1, group_view("a"), 0.0),
        (1, group_view("b"), 0.25),
        (1, group_view("b", interactive=0), math.inf),
    ],
)
def test_whom_a_turn_is_ended_for(running: int, waiting: object, seconds: float) -> None:
    """A turn of batch work for any interactive request, at once; batch requests wait."""
    view = instance_view(
        groups=(waiting,),  # type: ignore[arg-type]
        batches=(batch_view("a", 5, interactive=running),),
        turn="a",
    )

    assert Chiron().preempt(instance=view) == seconds


def test_a_size_for_each_promise() -> None:
    """What is learnt from turns of batch work does not change the size beside readers, and one
    turn is one observation however often the policy is asked."""
    policy = Chiron(settle_turns=1)
    batch = batch_view("a", 200, interactive=0, tbt=2.0)
    reader = batch_view("a", 200, interactive=1, tbt=0.1)

    def limit(view_of: object, turn: TurnView | None) -> int:
        view = instance_view(batches=(view_of,), last_turn=turn)  # type: ignore[arg-type]
        return policy.batch(model="a", instance=view).requests

    assert limit(batch, None) == 64
    turn = turn_of(64, 0.02)
    assert [limit(batch, turn), limit(batch, turn)] == [96, 96]
    assert limit(reader, turn) == 64
    slow = turn_of(64, 0.3)
    assert [limit(reader, slow), limit(batch, slow)] == [32, 96]


def test_turns_that_were_not_asked_about_are_not_learnt_from() -> None:
    """A turn that ran before the policy was in place says nothing of the sizes it gives."""
    policy = Chiron(settle_turns=1)
    stranger, own = turn_of(64, 0.01), turn_of(64, 0.01)

    for turn, size in [(stranger, 64), (own, 96)]:
        view = instance_view(batches=(batch_view("a", 200),), last_turn=turn)
        assert policy.batch(model="a", instance=view).requests == size
    other = instance_view(batches=(batch_view("b", 200),), last_turn=own)
    assert policy.batch(model="b", instance=other).requests == 64
    again = instance_view(batches=(batch_view("b", 200),), last_turn=turn_of(96, 0.01))
    assert policy.batch(model="b", instance=again).requests == 64


def test_a_model_without_requests_has_the_first_size() -> None:
    """A prompt that comes first of its model."""
    assert Chiron(first_batch=7).batch(model="a", instance=instance_view()).requests == 7


# --- the whole -----------------------------------------------------------------------------------


def models(count: int) -> dict[str, ModelDouble]:
    return {f"m{n}": ModelDouble(4 + n % 3, shape(3 + n % 3, 1 + n % 2)) for n in range(count)}


def faultless(cluster: ClusterDouble) -> bool:
    stack = cluster.machine._context.policy.stack  # type: ignore[attr-defined]
    assert isinstance(stack, PolicyStack)
    return not stack.faults


@given(seed=st.integers(0, 2**32), instances=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_every_request_of_either_class_ends(seed: int, instances: int) -> None:
    """Whatever comes, with instances that come and go and time that passes, and no answer of the
    policy is refused; a replay by a policy that knows nothing gives the same commands."""
    dice = random.Random(seed)

    def make() -> ClusterDouble:
        policy = Chiron(first_batch=2, settle_turns=1, scale_in_seconds=1.0)
        return ClusterDouble(models(4), instances=instances, slabs=24, stranger=policy)

    cluster = make()
    cluster.start()
    for index in range(40):
        kind = dice.choice(list(RequestClass))
        prompt, output = dice.randint(1, 60), dice.randint(1, 40)
        cluster.ask(f"r{index}", f"m{dice.randrange(4)}", prompt=prompt, output=output, kind=kind)
        for _ in range(dice.randrange(4)):
            cluster.work(dice.randrange(instances))
        if dice.random() < 0.2:
            cluster.now += dice.choice([0.3, 2.0])
            cluster.tell(Ticked())
    cluster.settle()

    assert not cluster.machine.requests
    assert {life.outcome for life in cluster.world.lives.values()} == {"length"}
    assert all([life.prefills == 1 for life in cluster.world.lives.values()])
    assert faultless(cluster)
    again = make().machine
    replayed = [again.handle(event, now) for now, event, _ in cluster.journal]
    assert replayed == [commands for _, _, commands in cluster.journal]


def test_an_interactive_request_interrupts_batch_work() -> None:
    """The turn is ended, the prompt is next, and batch work goes on with the KV it had."""
    cluster = ClusterDouble(models(2), slabs=24, stranger=Chiron())
    cluster.start()
    for index in range(3):
        cluster.ask(f"b{index}", "m0", output=40, kind=BATCH)
    cluster.work_until(0, lambda: bool(cluster.turns()) and cluster.up[0].turn is not None)
    cluster.ask("i", "m1", output=3)
    assert len(cluster.commands(Preempt)) == 1

    cluster.work_until(0, lambda: cluster.world.lives["i"].outcome is not None)
    assert all([cluster.world.lives[f"b{n}"].outcome is None for n in range(3)])
    cluster.settle()

    lives = cluster.world.lives.values()
    assert all([life.outcome == "length" and life.prefills == 1 for life in lives])
    preempted = next(e for _, e, _ in cluster.journal if isinstance(e, TurnEnded))
    assert preempted.model == "m0"
    first = [command.requests for command in cluster.commands(RunTurn) if command.model == "m1"]
    assert first[0] == ("i",)


def test_interactive_requests_come_first_within_a_batch() -> None:
    """Of one model: the size that was found for readers keeps batch requests out, not readers."""
    cluster = ClusterDouble(models(1), slabs=24, stranger=Chiron(first_batch=2))
    cluster.start()
    for index in range(4):
        cluster.ask(f"b{index}", "m0", output=30, kind=BATCH)
    for index in range(2):
        cluster.ask(f"i{index}", "m0", output=6)
    cluster.settle()

    ends = list(cluster.world.lives)
    order = {name: cluster.world.lives[name].outcome for name in ends}
    assert set(order.values()) == {"length"}
    turns = [set(c.requests) for c in cluster.commands(RunTurn)]
    both = next(n for n, turn in enumerate(turns) if {"i0", "i1"} <= turn)
    assert turns[both] == {"i0", "i1"}


def test_batch_work_moves_to_an_instance_that_is_added_for_it() -> None:
    """Near its deadline queued batch work gets an instance of its own, and goes there."""
    policy = Chiron(scale_in_seconds=0.5, quantile=0.5)
    cluster = ClusterDouble(models(1), instances=2, slabs=24, stranger=policy)
    cluster.start()
    cluster.ask("i", "m0")
    cluster.settle()
    cluster.now += 1.5
    cluster.tell(Ticked())
    cluster.now += 1.5
    cluster.tell(Ticked())
    kinds = {n: state.instance_class for n, state in cluster.machine.instances.items()}
    assert kinds == {0: InstanceClass.MIXED, 1: InstanceClass.PARKED}
    for index in range(4):
        cluster.ask(f"b{index}", "m0", prompt=100, output=60, kind=BATCH)

    cluster.now += 9.99  # the deadline is 10 s after arrival
    cluster.tell(Ticked())

    assert cluster.machine.instances[1].instance_class is InstanceClass.BATCH
    assert cluster.machine.requests["b3"].instance == 1
    cluster.settle()
    assert {life.outcome for life in cluster.world.lives.values()} == {"length"}
