"""The bound with batches that arrivals allow: by hand, never below the one with the largest
batches, and never more than a run took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.lab.experiments.lower_bound import least_busy_share
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Contender, Setting, play
from appliance.lab.experiments.window_bound import least_work_seconds
from appliance.lab.workload import Arrival
from appliance.vocabulary import Slo
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.test_simulator import arrivals, small_setting

STEPS = 16
OWN = 128 / 1024 + (STEPS * 128 + STEPS * (STEPS - 1) // 2) / 65536 + STEPS / 1024
"""A prompt of 128 tokens, and 16 steps after it without the part that all share."""
FIXED = lab_bench.profile().step_base_seconds


def setting(found: Sequence[Arrival], seconds: float = 1e4, slo: Slo = lab_bench.SLO) -> Setting:
    known = small_setting()
    return Setting(
        models=[replace(model, slo=slo) for model in known.models],
        box=known.box,
        profiles=known.profiles,
        arrivals=list(found),
        seconds=seconds,
    )


def request(seconds: float, model: str = "a") -> Arrival:
    return Arrival(seconds=seconds, model=model, prompt_tokens=128, output_tokens=STEPS + 1)


def work(*found: Arrival, seconds: float = 1e4) -> float:
    return least_work_seconds(setting(found, seconds))


def test_requests_share_the_steps_that_their_windows_have_in_common() -> None:
    """The last token of the first is due at 6 s. Of two models each has steps of its own."""
    assert work(request(0.0)) == pytest.approx(OWN + STEPS * FIXED)
    assert work(request(0.0), request(0.0)) == pytest.approx(2 * OWN + STEPS * FIXED)
    assert work(request(0.0), request(6.0)) == pytest.approx(2 * OWN + (2 * STEPS - 1) * FIXED)
    assert work(request(0.0), request(6.1)) == pytest.approx(2 * (OWN + STEPS * FIXED))
    assert work(request(0.0), request(0.0, "b")) == pytest.approx(2 * (OWN + STEPS * FIXED))


def test_company_at_different_times_is_no_company_of_three() -> None:
    """As the bound by the largest batch has it. Each request is followed by another one 5 s later,
    when 7 of its steps are due: those, and all steps of the second and the fourth, are apart."""
    chain = [request(0.0), request(5.0), request(10.0), request(15.0)]
    apart = 7 + STEPS + STEPS

    assert least_busy_share(setting(chain)) * 2e4 < work(*chain)
    assert work(*chain) == pytest.approx(4 * OWN + apart * FIXED)


def test_tokens_that_are_due_after_the_end_are_not_counted() -> None:
    """Nor requests before the time from which they are counted."""
    assert work(request(0.0), request(9e3), seconds=9e3) == pytest.approx(OWN + STEPS * FIXED)
    both = setting([request(0.0), request(50.0)])
    assert least_work_seconds(both, since_seconds=20.0) == pytest.approx(OWN + STEPS * FIXED)
    assert least_work_seconds(setting([]), 1.0) == 0.0


def test_what_may_be_late_is_what_takes_most() -> None:
    """Of three requests, the one with the longest prompt, if they count as a whole."""
    short = [request(0.0), request(100.0)]
    long = replace(request(200.0), prompt_tokens=1280)
    found = least_work_seconds(setting([*short, long]), 2 / 3, whole_requests=True)

    assert found == pytest.approx(2 * (OWN + STEPS * FIXED))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.floats(0.05, 3.0))
def test_never_below_the_bound_with_the_largest_batches(seed: int, rate: float) -> None:
    """Where all is to be in time; up to the KV of one token per step, which that counts twice."""
    random = setting(arrivals(seed=seed, rate=rate))
    tokens = sum(one.output_tokens for one in random.arrivals)
    known = least_busy_share(random) * random.box.instances * random.seconds

    assert least_work_seconds(random) >= known - tokens / 65536


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["appliance", "aegaeon", "serverlessllm", "prism"]),
    st.integers(0, 999),
    st.floats(0.05, 3.0),
    st.floats(0.25, 4.0),
)
def test_no_run_takes_less(policy: str, seed: int, rate: float, ttft: float) -> None:
    """Whatever the share of tokens, or of requests, that it had in time."""
    slo = Slo(ttft_seconds=ttft, tbt_seconds=0.0625)
    random = setting(arrivals(seed=seed, rate=rate), slo=slo)
    run = play(random, Contender(policy, (policy,))).run
    busy, metrics = sum(run.recorder.busy.values()), measure(run)

    assert least_work_seconds(random, metrics.token_attainment) <= busy
    kept = metrics.request_attainment
    assert least_work_seconds(random, kept, whole_requests=True) <= busy
