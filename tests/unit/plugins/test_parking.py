"""Parking: as many instances are open as what is asked needs; one opens at once and rests late."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from appliance.plugins.parking import (
    BURST_WINDOW_SECONDS,
    BURST_WINDOWS,
    FULL,
    UNKNOWN_VARIATION,
    Asked,
    Bursts,
    LastHour,
    Parking,
    RecentMost,
    Trend,
    fleet,
    interactive,
    may_park,
    read,
)
from appliance.scheduling.demand import WINDOW_SECONDS, Demands
from appliance.scheduling.policy_api import Fleet
from appliance.vocabulary import RequestClass, RequestSpec, Slo
from tests.unit.plugins.policy_views import (
    GIB,
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    model_view,
)

LOAD, IDLE, BOX = 0.5, 30.0, 16


def asked(
    expected: float = 0.0,
    *,
    begun: float = 0.0,
    memory: float = 0.0,
    loads: float = 0.0,
    weights: float = 1.0,
    tokens: float | None = None,
    lead: float = 2.0,
) -> Asked:
    """Tokens come at a rate that follows what is expected, unless told otherwise."""
    rate = 1000 * expected if tokens is None else tokens
    return Asked(expected, begun, memory, loads, weights, rate, lead)


def opened(parking: Parking, seconds: Iterable[float], what: Asked, box: int = BOX) -> list[int]:
    return [parking.open_instances(now, what, box) for now in seconds]


def after_calm(what: Asked, seconds: int = 1000) -> Parking:
    """Parking that has seen the same for long."""
    parking = Parking(LOAD, IDLE)
    opened(parking, range(seconds), what)
    return parking


amounts = st.floats(0, 40)
moments = st.lists(
    st.builds(
        asked, amounts, begun=amounts, memory=amounts, loads=amounts, weights=st.floats(0.01, 50)
    ),
    min_size=1,
    max_size=200,
)


# --- how many are open ---------------------------------------------------------------------------


@given(moments, st.integers(1, 32), st.floats(0.1, 1), st.lists(st.floats(0.01, 100), min_size=1))
def test_never_fewer_are_open_than_needed(
    told: list[Asked], box: int, load: float, gaps: list[float]
) -> None:
    """Whatever came before: what is expected, what is there and its memory are carried, with each
    instance busy for no more than its share, or all are open."""
    parking, now = Parking(load, IDLE), 0.0
    for what, gap in zip(told, itertools.cycle(gaps), strict=False):
        now += gap
        count = parking.open_instances(now, what, box)
        assert 1 <= count <= box
        if count < box:
            assert count * load >= max(what.expected, what.begun) - 1e-6
            assert count >= what.memory - 1e-6
            away = max(0.0, 1 - count / what.weights)
            assert what.loads * away <= load * count + 1e-6


@given(st.lists(st.floats(0, 8), min_size=2, max_size=400))
def test_an_instance_that_opened_stays_open_for_the_while(demand: list[float]) -> None:
    """So however demand jumps, an instance opens at most once in that time: no thrash."""
    parking, wakes = Parking(LOAD, IDLE), []
    before = BOX
    for now, expected in enumerate(demand):
        count = parking.open_instances(now, asked(expected), BOX)
        wakes += [now] * max(0, count - before)
        recent = sum([now - IDLE < wake for wake in wakes])
        assert count >= min(recent, BOX)
        before = count
    assert len(wakes) <= BOX * (1 + len(demand) / IDLE)


@pytest.mark.parametrize(("per_second", "most"), [(0.02, 20), (0.5, 60), (6.0, 100)])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_constant_load_wakes_rarely(per_second: float, most: int, seed: int) -> None:
    """Two hours of Poisson arrivals at one rate, seen as the machine sees them, a second of an
    instance each: `most` wakes in the second hour, and not many more open than busy ones ask."""
    draw, demands = random.Random(seed), Demands(["a"])
    slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
    parking, due, counts = Parking(LOAD, IDLE), 0.0, []
    for now in range(7200):
        while due < now:
            demands.arrived(RequestSpec("r", "a", 100, 100, slo), due)
            due += draw.expovariate(per_second)
        of = demands.of["a"]
        left = of.decay(now) if of.requests else 0.0
        rate = of.arrivals_per_second * left
        what = asked(rate, tokens=of.tokens_per_second * left)
        counts.append(parking.open_instances(now, what, 1000))
    settled = counts[3600:]
    wakes = sum([after > before for before, after in itertools.pairwise(settled)])
    assert wakes <= most
    assert sum(settled) / len(settled) < 2 + 1.5 * per_second / LOAD


@given(st.floats(0, 1), st.floats(0.5, 100))
def test_all_that_a_burst_needs_open_at_once(before: float, burst: float) -> None:
    parking = after_calm(asked(before), 200)

    count = parking.open_instances(200, asked(before, begun=burst), BOX)

    assert count >= min(BOX, burst / LOAD) - 1e-6


def test_all_are_open_until_the_first_while_is_over() -> None:
    counts = opened(Parking(LOAD, IDLE), [0, 10, 29, 31], asked(0.1))

    assert counts == [BOX, BOX, BOX, 1]


def test_what_was_needed_a_moment_ago_stays_open() -> None:
    parking = after_calm(asked(0.2))
    assert parking.open_instances(1000, asked(begun=4.0), BOX) == 8

    assert opened(parking, [1001, 1029], asked(0.2)) == [8, 8]
    assert parking.open_instances(1031, asked(0.2), BOX) == 1


def test_bursts_are_reserved_for() -> None:
    """The same mean, in tokens that come evenly, or all in one window of ten."""
    even, uneven = Parking(LOAD, IDLE), Parking(LOAD, IDLE)
    rate = 0.0
    for now in range(600):
        rate = rate * math.exp(-1 / WINDOW_SECONDS) + (now % 100 < 10) * 1000 / WINDOW_SECONDS
        steady = even.open_instances(now, asked(1.0, tokens=100.0), BOX)
        bursty = uneven.open_instances(now, asked(1.0, tokens=rate), BOX)
    assert steady == 2
    assert bursty >= 8


def test_a_rise_is_followed_ahead() -> None:
    """While demand rises by one instance in a minute, those of a load's time later are open."""
    parking = Parking(1.0, IDLE)
    for now in range(300):
        count = parking.open_instances(now, asked(now / 60, lead=60, tokens=1.0), 100)
    assert count >= (299 + 60) / 60


def test_the_same_minute_of_the_hour_before_is_ahead() -> None:
    """A burst at 10:15 has instances open at 11:15, a load's time before; and again an hour
    later, if it came again, not for having been expected."""
    parking = Parking(LOAD, IDLE)
    counts = {}
    for now in range(3 * 3600):
        busy = now // 60 == 15
        counts[now] = parking.open_instances(now, asked(0.2, begun=3.0 * busy), BOX)
    assert counts[14 * 60] == 1
    assert counts[15 * 60] == counts[75 * 60] == counts[75 * 60 - 2] == 6
    assert counts[74 * 60] == 1
    assert counts[135 * 60 + 30] == 1


def test_links_bound_it_where_weights_are_away() -> None:
    """Loads for a whole link, and weights for eight instances: on four, half of the loads remain,
    an eighth of each link."""
    parking = after_calm(asked(0.1, loads=1.0, weights=8.0, tokens=10.0))

    (count,) = opened(parking, [1001], asked(0.1, loads=1.0, weights=8.0, tokens=10.0))

    assert count == 2  # 0.75 of a link on two, where one may be busy


def test_memory_is_reserved_for_bursts() -> None:
    """As `test_bursts_are_reserved_for`, of KV: tokens that come evenly need three instances for
    three, and more if all come in one window of ten."""
    even, uneven = Parking(LOAD, IDLE), Parking(LOAD, IDLE)
    rate = 0.0
    for now in range(600):
        rate = rate * math.exp(-1 / WINDOW_SECONDS) + (now % 100 < 10) * 1000 / WINDOW_SECONDS
        steady = even.open_instances(now, asked(memory=3.0, tokens=100.0), 100)
        bursty = uneven.open_instances(now, asked(memory=3.0, tokens=rate), 100)
    assert steady == 3
    assert bursty >= 3 * (1 + 2 * 1.4)


def test_models_without_weights_need_no_links() -> None:
    (count,) = opened(after_calm(asked(0.1)), [1001], asked(0.1, loads=0.1, weights=0.0))

    assert count == 1


def test_a_box_of_none_that_is_up_keeps_one() -> None:
    assert opened(Parking(LOAD, IDLE), [0, 100], asked(), box=1) == [1, 1]


# --- what it goes by -----------------------------------------------------------------------------


def test_a_trend_is_what_the_smoothed_rate_is_behind() -> None:
    trend = Trend()
    for now in range(600):
        trend.look(now, 0.5 * now)
        trend.look(now, 0.5 * now)  # twice at the same time says nothing new
    assert trend.growth(0.0) == pytest.approx(0.5 * WINDOW_SECONDS, rel=1e-3)
    for now in range(600, 900):
        trend.look(now, 300 - 0.5 * (now - 600))
    assert trend.growth(10.0) == 0.0


def test_even_arrivals_do_not_vary() -> None:
    bursts = Bursts()
    assert bursts.variation == UNKNOWN_VARIATION
    for now in range(200):
        bursts.look(now, 100.0)
    assert bursts.variation < 1e-6


def test_a_silence_of_any_length_is_counted_in_windows() -> None:
    """A day without a look costs no more than the windows that count, and then nothing came."""
    bursts = Bursts()
    for now in range(100):
        bursts.look(now, 100.0)
    bursts.look(86400.0, 0.0)
    assert bursts.variation == UNKNOWN_VARIATION
    bursts.look(86400.0 + BURST_WINDOW_SECONDS, 10.0)
    assert bursts.variation == pytest.approx(math.sqrt(BURST_WINDOWS - 1))


def test_an_hour_is_remembered() -> None:
    hour = LastHour()
    hour.look(30.0, 3.0)
    hour.look(40.0, 2.0)
    assert hour.busy(3600.0 + 59.0) == 3.0
    assert hour.busy(3600.0 + 61.0) == 0.0
    hour.look(2 * 3600.0, 1.0)
    assert hour.busy(3600.0) == 0.0


def test_the_most_of_the_last_seconds() -> None:
    most = RecentMost(10.0)
    seen = [most.look(now, number, 5) for now, number in enumerate([1, 4, 2, 3])]
    assert seen == [5, 5, 5, 5]
    assert [most.look(now, 1, 5) for now in (10, 11, 12, 13, 20)] == [4, 3, 3, 1, 1]


# --- reading views -------------------------------------------------------------------------------

COSTS = FixedCosts(step=0.05, per_token=0.001, switch=2.0)


def test_what_decodes_and_what_waits_is_begun() -> None:
    """A step of 50 ms in each 100, prompts of 1 s and the load of their model in 6 s."""
    views = [
        instance_view(0, batches=(batch_view("a", 3),)),
        instance_view(1, groups=(group_view("b", 2, tokens=1000, deadline=16.0),)),
        instance_view(2, groups=(group_view("b", 2, tokens=1000, deadline=0.0),), resident="b"),
        instance_view(3, batches=(batch_view("a", 3),), up=False),
    ]
    cluster = cluster_view(views, model_view("a"), model_view("b"))

    found = read(10.0, cluster, COSTS, {"a": 0.25, "b": 0.0})

    assert found.begun == pytest.approx(0.5 + 3.0 / 6.0 + 1.0)
    assert found.expected == 0.25
    assert found.lead_seconds == 3.0


def test_a_target_that_none_can_keep_opens_one_instance_at_most() -> None:
    view = instance_view(0, batches=(batch_view("a", tbt=1e-6),))

    found = read(10.0, cluster_view([view], model_view("a")), COSTS, {"a": 0.0})

    assert found.begun == 1.0


def test_batch_requests_have_their_answers_by_their_deadline() -> None:
    """A hundred answers of 40 tokens, 64 at a time."""
    group = group_view("a", 100, tokens=1000, interactive=0, deadline=50.0)
    view = instance_view(0, groups=(group,), resident="a")
    cluster = cluster_view([view], model_view("a", output=40.0))

    found = read(0.0, cluster, COSTS, {"a": 0.0})

    assert found.begun == pytest.approx((1.0 + 100 / 64 * 40 * 0.05) / 50.0)
    assert found.memory == 0.0


def test_kv_of_interactive_requests_needs_memory() -> None:
    """As far as the weights of the largest model that is asked for leave some."""
    batches = (batch_view("a", 4, interactive=1, kv_tokens=4000),)
    views = [instance_view(0, batches=batches, groups=(group_view("a", 1, tokens=500),))]
    model = model_view("a", weight_bytes=15 * GIB, requests=5)

    (found, full) = [
        read(0.0, cluster_view(views, one), COSTS, {"a": 0.0})
        for one in (model, model_view("a", weight_bytes=70 * GIB, requests=5))
    ]

    assert found.memory == pytest.approx(1500 * (128 << 10) / (FULL * 80 * GIB - 15 * GIB))
    assert full.memory == math.inf


def test_models_that_are_asked_for_have_weights_and_loads() -> None:
    """Requests that come within a TTFT of ten seconds share a load; idle models count nothing."""
    models = [
        model_view("a", arrivals=0.05, ttft=10.0, requests=1),
        model_view("b", arrivals=3.0, ttft=10.0, requests=1),
        model_view("idle", arrivals=0.0, weight_bytes=60 * GIB),
    ]

    found = read(0.0, cluster_view(2, *models), COSTS, {"a": 0.1, "b": 0.2, "idle": 0.0})

    assert found.loads == pytest.approx((0.05 + 0.1) * 2.0)
    assert found.weights == pytest.approx(30 / 64)


def test_without_an_instance_that_is_up_there_is_no_room() -> None:
    down = [instance_view(0, up=False)]

    found = read(0.0, cluster_view(down, model_view("a", requests=1)), COSTS, {"a": 0.1})

    assert found.weights == math.inf


def test_interactive_arrivals_are_those_that_are_no_batch() -> None:
    """As the machine counts both."""
    demands, slo = Demands(["a"]), Slo(ttft_seconds=1.0, tbt_seconds=0.1)
    for kind, prompt in ((RequestClass.BATCH, 900), (RequestClass.INTERACTIVE, 100)):
        spec = RequestSpec("r", "a", prompt, 50, slo, request_class=kind)
        demands.arrived(spec, 0.0)
    of = demands.of["a"]
    model = structs.replace(
        model_view("a", arrivals=of.arrivals_per_second, tokens=of.tokens_per_second),
        batch_arrivals_per_second=of.batch_arrivals_per_second,
        batch_tokens_per_second=of.batch_tokens_per_second,
    )

    assert interactive(model).arrivals_per_second == pytest.approx(1 / WINDOW_SECONDS)
    assert interactive(model).tokens_per_second == pytest.approx(150 / WINDOW_SECONDS)


def test_instances_that_are_down_count_as_open() -> None:
    """Which instances rest is the machine's: those that are up may be the ones."""
    views = [instance_view(n, up=n > 0) for n in range(4)]

    assert fleet(cluster_view(views, model_view("a")), 2) == Fleet(interactive=0, mixed=3, batch=0)
    assert fleet(cluster_view(views, model_view("a")), 4) == Fleet(interactive=0, mixed=4, batch=0)


def test_instances_that_cannot_serve_all_models_stay_open() -> None:
    assert may_park(cluster_view(2, model_view("a")))
    assert not may_park(cluster_view(2, model_view("a"), model_view("b", instances=frozenset({1}))))
