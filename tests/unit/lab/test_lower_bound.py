"""The least time that GPUs need: by hand, and never more than a run took that kept its promises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.lab.experiments.lower_bound import least_busy_share, most_at_once
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Contender, Setting, play
from appliance.lab.workload import Arrival
from appliance.vocabulary import Slo
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.test_simulator import small_setting

PROMPT_SECONDS = 128 / 1024
KV_SECONDS = (16 * 128 + 16 * 17 // 2) / 65536
"""What 16 steps after a prompt of 128 tokens read."""


def setting(arrivals: Sequence[Arrival]) -> Setting:
    """One instance, ten seconds."""
    known = small_setting(instances=1)
    models = [replace(model, slo=lab_bench.SLO) for model in known.models]
    return Setting(
        models=models,
        box=known.box,
        profiles=known.profiles,
        arrivals=list(arrivals),
        seconds=10.0,
    )


def request(seconds: float, model: str = "a") -> Arrival:
    return Arrival(seconds=seconds, model=model, prompt_tokens=128, output_tokens=17)


def busy(arrivals: Sequence[Arrival]) -> float:
    return least_busy_share(setting(arrivals)) * 10


def step(requests: int) -> float:
    return lab_bench.profile().step_seconds(requests, 0)


def test_a_request_alone() -> None:
    """Its prompt without the weights, and a step of its own for each token but the first."""
    assert busy([request(0.0)]) == pytest.approx(PROMPT_SECONDS + KV_SECONDS + 16 * step(1))


def test_two_at_once_share_their_steps() -> None:
    """While both may still be in time, on whatever instance; of two models each has its own."""
    each = PROMPT_SECONDS + KV_SECONDS

    assert busy([request(0.0), request(6.0)]) == pytest.approx(2 * each + 16 * step(2))
    assert busy([request(0.0), request(6.5)]) == pytest.approx(2 * (each + 16 * step(1)))
    assert busy([request(0.0), request(0.0, "b")]) == pytest.approx(2 * (each + 16 * step(1)))


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=30))
def test_the_most_that_have_a_moment_in_common(found: list[tuple[float, float]]) -> None:
    """It is the most that any of them sees where it begins."""
    windows = [(begin, begin + length) for begin, length in found]

    expected = max((sum(b <= x <= e for b, e in windows) for x, _ in windows), default=0)

    assert most_at_once(windows) == expected


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(["appliance", "serverlessllm", "aegaeon"]))
def test_no_run_that_keeps_its_promises_takes_less(seed: int, policy: str) -> None:
    """Whatever policy decides."""
    known = small_setting()
    late = Slo(ttft_seconds=500.0, tbt_seconds=5.0)
    few = Setting(
        models=[replace(model, slo=late) for model in known.models],
        box=known.box,
        profiles=known.profiles,
        arrivals=[replace(one, seconds=one.seconds + seed % 7) for one in known.arrivals[:20]],
        seconds=2000.0,
    )

    metrics = measure(play(few, Contender(policy, (policy,))).run, 0.0)

    assert metrics.token_attainment == 1.0
    assert metrics.busy_share >= least_busy_share(few) > 0
