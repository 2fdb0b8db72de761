"""Metrics of runs whose token times are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.metrics import expand, measure, seconds_covered
from appliance.lab.recorder import Life, Recorder
from appliance.lab.simulator import Run
from appliance.lab.stretches import elapsed
from appliance.vocabulary import RequestClass, Slo


def life(
    recorder: Recorder, output: int, *, arrived: float = 0.0, outcome: str | None = None
) -> Life:
    """A request with TTFT 3 s and TBT 2 s."""
    made = Life(
        number=len(recorder.lives),
        id=f"r{len(recorder.lives)}",
        model="m",
        request_class=RequestClass.INTERACTIVE,
        slo=Slo(ttft_seconds=3.0, tbt_seconds=2.0),
        arrived=arrived,
        prompt_tokens=1,
        output_tokens=output,
        max_tokens=output,
        outcome=outcome,
    )
    recorder.lives.append(made)
    return made


def run(recorder: Recorder, until: float = 100.0) -> Run:
    return Run(recorder=recorder, until=until, instances=1, events=0, preemptions=0)


def request_with(
    *times: float, until: float = 100.0, outcome: str | None = "stop", output: int = 0
) -> Run:
    recorder = Recorder()
    made = life(recorder, output or len(times), outcome=outcome)
    for at in times:
        recorder.produced(made, at, 0.0, 0.0, 1)
    return run(recorder, until)


def test_tokens_at_3_6_7_8_by_both_definitions() -> None:
    """Three of four deadlines are kept; the artifact counts 5 of 8 seconds."""
    metrics = measure(request_with(3.0, 6.0, 7.0, 8.0))
    assert metrics.token_attainment == 0.75
    assert metrics.time_attainment == 0.625


def test_the_clock_of_the_artifact_starts_again_without_its_allowance() -> None:
    """After a late token even very late ones count as in time: [4 late, then 14 <= 4 + 11]."""
    times = np.array([4.0, 5.0, 6.0, 7.0, 14.0])
    assert seconds_covered(times, 3.0, 2.0, 14.0) == 10.0


def test_a_first_token_in_time_and_slow_ones_after_it() -> None:
    """The mean time between tokens is what the request is judged by."""
    metrics = measure(request_with(1.0, 4.0, 7.0))
    assert (metrics.ttft_attainment, metrics.tpot_attainment) == (1.0, 0.0)
    assert metrics.token_attainment == 1.0
    assert metrics.goodput_per_second == 0.0
    assert (metrics.ttft_p50_seconds, metrics.tbt_p50_seconds) == (1.0, 3.0)


def test_who_still_waits_counts_with_the_deadlines_that_passed() -> None:
    """One token came, in time; those due at 5, 7 and 9 did not. The one due at 11 counts not."""
    metrics = measure(request_with(2.0, until=10.0, outcome=None, output=50))
    assert metrics.token_attainment == 0.25
    assert (metrics.finished, metrics.tpot_attainment, metrics.request_attainment) == (0, 0.0, 0.0)


def test_no_deadline_is_missed_before_it_passed() -> None:
    """A request that came just now is neither good nor bad."""
    recorder = Recorder()
    life(recorder, 5, arrived=9.0)
    metrics = measure(run(recorder, 10.0))
    assert math.isnan(metrics.token_attainment)
    assert math.isnan(metrics.ttft_attainment)
    assert math.isnan(metrics.time_attainment)


def test_nothing_comes_of_a_refused_request() -> None:
    """All its tokens are missing, whatever the time."""
    recorder = Recorder()
    life(recorder, 5, outcome="kv_too_large", arrived=9.9)
    good = life(recorder, 5, outcome="length", arrived=0.0)
    recorder.produced(good, 1.0, 1.0, 0.0, 5)
    metrics = measure(run(recorder, 10.0))
    assert (metrics.rejected, metrics.token_attainment, metrics.time_attainment) == (1, 0.5, 0.5)
    assert (metrics.ttft_attainment, metrics.request_attainment) == (0.5, 0.5)


def test_the_warm_up_is_left_out() -> None:
    """Requests of before it count nowhere, neither do their tokens."""
    recorder = Recorder()
    early, later = life(recorder, 1, outcome="stop"), life(recorder, 1, arrived=5.0, outcome="stop")
    recorder.produced(early, 50.0, 0.0, 0.0, 1)
    recorder.produced(later, 6.0, 0.0, 0.0, 1)
    metrics = measure(run(recorder, 15.0), warmup_seconds=5.0)
    assert (metrics.requests, metrics.tokens, metrics.token_attainment) == (1, 1, 1.0)
    assert metrics.goodput_per_second == 0.1


def test_a_run_without_requests_has_nothing_to_measure() -> None:
    """And no error."""
    metrics = measure(run(Recorder()))
    assert (metrics.requests, metrics.tokens) == (0, 0)
    assert math.isnan(metrics.ttft_p99_seconds)


segments = st.tuples(st.integers(0, 2), st.floats(0.001, 1), st.floats(0, 0.01), st.integers(1, 50))


@given(st.lists(segments, max_size=12))
def test_segments_are_the_tokens_they_stand_for(
    given_segments: list[tuple[int, float, float, int]],
) -> None:
    """Each request's tokens, numbered and in order, at the times of the closed form."""
    recorder = Recorder()
    lives = [life(recorder, 1000) for _ in range(3)]
    expected: list[list[float]] = [[], [], []]
    for start, (owner, first, growth, count) in enumerate(given_segments):
        recorder.produced(lives[owner], float(start), first, growth, count)
        expected[owner] += [start + elapsed(first, growth, k) for k in range(1, count + 1)]

    tokens = expand(recorder, lives)

    for owner, times in enumerate(expected):
        mine = tokens.request == owner
        assert tokens.index[mine].tolist() == list(range(len(times)))
        assert tokens.seconds[mine].tolist() == pytest.approx(times)
