"""What is asked of each model lately: rates that decay, and a smoothed length of outputs."""

from __future__ import annotations

import math

import pytest

from appliance.scheduling.demand import OUTPUT_SMOOTHING, WINDOW_SECONDS, Demands
from appliance.scheduling.policy_api import ClusterView, Placement
from appliance.vocabulary import RequestClass, RequestSpec, Slo
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def spec(model: str = "a", *, prompt: int = 100, limit: int = 50) -> RequestSpec:
    slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
    return RequestSpec(id="r", model=model, prompt_tokens=prompt, max_tokens=limit, slo=slo)


def test_a_steady_stream_is_measured_at_its_rate() -> None:
    """Arrivals at a steady rate are seen as that rate in the end, and so are their tokens."""
    demands, now = Demands(["a"]), 0.0
    for _ in range(1000):
        demands.arrived(spec(), now)
        now += 0.5

    demand = demands.of["a"]
    left = demand.decay(now - 0.25)

    assert demand.arrivals_per_second * left == pytest.approx(2.0, rel=1e-3)
    assert demand.tokens_per_second * left == pytest.approx(2.0 * 150, rel=1e-3)
    assert demand.requests == 1000


def test_a_rate_decays() -> None:
    """After a window without arrivals, 1/e of a rate is left; another model never had one."""
    demands = Demands(["a", "b"])
    demands.arrived(spec(), 10.0)

    demand = demands.of["a"]

    assert demand.arrivals_per_second == pytest.approx(1 / WINDOW_SECONDS)
    assert demand.decay(10.0) == 1.0
    assert demand.decay(10.0 + WINDOW_SECONDS) == pytest.approx(1 / math.e)
    assert demands.of["b"].arrivals_per_second == demands.of["b"].decay(10.0) == 0.0


def test_batch_requests_are_counted_apart_too() -> None:
    """As a part of all arrivals, that decays with them."""
    demands = Demands(["a"])
    for now, kind in enumerate([RequestClass.BATCH, RequestClass.INTERACTIVE]):
        slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
        demands.arrived(RequestSpec("r", "a", 100, 50, slo, request_class=kind), float(now))

    of, left = demands.of["a"], math.exp(-1 / WINDOW_SECONDS)
    assert of.batch_arrivals_per_second == pytest.approx(left / WINDOW_SECONDS)
    assert of.batch_tokens_per_second == pytest.approx(150 * left / WINDOW_SECONDS)
    assert of.arrivals_per_second == pytest.approx((1 + left) / WINDOW_SECONDS)


def test_outputs_are_expected_as_they_were() -> None:
    """Before an output ended, as many tokens are expected as a request may have; then the mean of
    those that ended, in which the newest has its share. One without a token says nothing."""
    demands = Demands(["a"])
    demands.arrived(spec(prompt=100, limit=50), 0.0)
    demands.ended("a", 0)
    assert demands.of["a"].output_tokens == 0.0

    demands.ended("a", 20)
    assert demands.of["a"].output_tokens == 20
    demands.ended("a", 30)
    assert demands.of["a"].output_tokens == pytest.approx(20 + OUTPUT_SMOOTHING * 10)

    before = demands.of["a"].tokens_per_second
    demands.arrived(spec(prompt=100, limit=50), 0.0)
    more = demands.of["a"].tokens_per_second - before
    assert more == pytest.approx((100 + 21) / WINDOW_SECONDS)


def test_what_placement_sees_of_demand() -> None:
    """The view of a model has its sizes, its live requests, and the rates as of now; what never
    arrived has none."""
    seen: list[ClusterView] = []

    def place(cluster: ClusterView) -> list[Placement]:
        seen.append(cluster)
        return [Placement()]

    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape()), "b": ModelDouble(3, shape())},
        stranger=Told(place=place),
        pinned=["b"],
    )
    cluster.start()
    assert {model.kv_bytes_per_token for model in seen[-1].models} == {0}
    cluster.settle()
    cluster.ask("a1", "a", prompt=20, output=40)
    asked = cluster.now
    cluster.work_until(0, lambda: cluster.world.lives["a1"].produced > 3)

    cluster.now += WINDOW_SECONDS
    cluster.settle()

    a, b = seen[-1].models
    late = math.exp(-(cluster.journal[-1][0] - asked) / WINDOW_SECONDS)
    assert (a.name, a.weight_bytes, a.pinned, a.requests) == ("a", 4000, False, 1)
    assert (b.name, b.weight_bytes, b.pinned, b.requests) == ("b", 3000, True, 0)
    assert a.kv_bytes_per_token == b.kv_bytes_per_token == 300 // 16
    assert a.arrivals_per_second == pytest.approx(late / WINDOW_SECONDS, rel=1e-2)
    assert a.last_arrival == asked
    assert (b.arrivals_per_second, b.last_arrival) == (0.0, -math.inf)
