"""Metrics of runs whose token times are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.experiments.metrics import (
    expand,
    fragmentation_by_shape,
    measure,
    seconds_covered,
)
from appliance.lab.sim.closed_form import elapsed
from appliance.lab.sim.recorder import Life, Recorder
from appliance.lab.sim.samples import KvUse, Sample
from appliance.lab.sim.simulator import SimulationRun
from appliance.vocabulary import RequestClass, Slo


def life(
    recorder: Recorder,
    output: int,
    *,
    arrived: float = 0.0,
    outcome: str | None = None,
    request_class: RequestClass = RequestClass.INTERACTIVE,
    gap: float = 0.0,
) -> Life:
    """A request with TTFT 3 s and TBT 2 s."""
    made = Life(
        number=len(recorder.lives),
        id=f"r{len(recorder.lives)}",
        model="m",
        request_class=request_class,
        slo=Slo(ttft_seconds=3.0, tbt_seconds=2.0, gap_seconds=gap),
        arrived=arrived,
        prompt_tokens=1,
        output_tokens=output,
        max_tokens=output,
        outcome=outcome,
    )
    recorder.lives.append(made)
    return made


def run(recorder: Recorder, until: float = 100.0) -> SimulationRun:
    return SimulationRun(recorder=recorder, until=until, instances=1, events=0, preemptions=0)


def request_with(
    *times: float,
    until: float = 100.0,
    outcome: str | None = "stop",
    output: int = 0,
    gap: float = 0.0,
) -> SimulationRun:
    recorder = Recorder()
    made = life(recorder, output or len(times), outcome=outcome, gap=gap)
    for at in times:
        recorder.produced(made, at, 0.0, 0.0, 1)
    return run(recorder, until)


def test_tokens_at_3_6_7_8_by_both_definitions() -> None:
    """Three of four deadlines are kept; the artifact counts 5 of 8 seconds."""
    metrics = measure(request_with(3.0, 6.0, 7.0, 8.0))
    assert metrics.token_attainment == 0.75
    assert metrics.time_attainment == 0.625


def test_a_token_after_the_longest_gap_is_late() -> None:
    """Tokens are due at 3, 5, 7 and 9, and 2.5 s after the one before: at 3, 3.5, 6.5 and 9."""
    times = (1.0, 4.0, 6.5, 8.0)
    assert measure(request_with(*times)).token_attainment == 1.0
    assert measure(request_with(*times, gap=2.5)).token_attainment == 0.75


def test_a_gap_that_is_over_without_a_token() -> None:
    """The request goes on when the run ends: of four tokens that it will have, the third is late
    from 6.5 s on, before its schedule says so."""
    run = [request_with(1.0, 4.0, until=at, outcome=None, output=4, gap=2.5) for at in (6.5, 6.6)]
    assert [measure(one).token_attainment for one in run] == [0.5, 1 / 3]


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


@pytest.mark.parametrize(
    ("times", "ours", "vllm"),
    [
        ((0.0, 4.9, 6.8), 0.0, 1.0),
        ((1.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0), 1.0, 0.0),
        ((1.0, 3.0, 5.0), 1.0, 1.0),
        ((1.0, 4.0), 0.0, 0.0),
    ],
)
def test_the_wait_for_decoding_belongs_to_either_promise(
    times: tuple[float, ...], ours: float, vllm: float
) -> None:
    """To the time between tokens as readers feel it, or to the first token as vLLM counts."""
    metrics = measure(request_with(*times))
    assert (metrics.request_attainment, metrics.vllm_attainment) == (ours, vllm)


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
    life(recorder, 5, outcome="request_failed", arrived=9.9)
    good = life(recorder, 5, outcome="length", arrived=0.0)
    recorder.produced(good, 1.0, 1.0, 0.0, 5)
    metrics = measure(run(recorder, 10.0))
    assert (metrics.rejected, metrics.token_attainment, metrics.time_attainment) == (1, 0.5, 0.5)
    assert (metrics.ttft_attainment, metrics.request_attainment) == (0.5, 0.5)


def test_batch_work_is_done_in_time_or_not() -> None:
    """By when its last token was due, which is not asked before that; by class there is more."""
    recorder = Recorder()
    slow, late, waits, unknown = (
        life(recorder, 3, outcome=outcome, request_class=RequestClass.BATCH)
        for outcome in ("stop", "stop", None, None)
    )
    unknown.arrived = 7.0
    chat = life(recorder, 2, outcome="stop")
    # Tokens are due at 3, 5 and 7. The first one of `slow` is late, its last is not.
    recorder.produced(slow, 4.0, 1.0, 0.0, 3)
    recorder.produced(late, 1.0, 2.5, 0.0, 3)
    recorder.produced(waits, 1.0, 1.0, 0.0, 1)
    recorder.produced(chat, 1.0, 1.0, 0.0, 2)
    metrics = measure(run(recorder, 10.0))
    assert (metrics.batch_requests, metrics.batch_in_time) == (4, pytest.approx(1 / 3))
    assert (metrics.batch_done_per_second, metrics.batch_tokens_per_second) == (0.2, 0.7)
    assert (metrics.interactive_done_per_second, metrics.interactive_tokens_per_second) == (
        0.1,
        0.2,
    )
    assert (metrics.interactive_attainment, metrics.batch_attainment) == (1.0, 0.0)
    assert (metrics.interactive_ttft_p99_seconds, metrics.ttft_p50_seconds) == (2.0, 3.0)


def test_memory_and_gpus_are_means_of_looks() -> None:
    """Fragmentation is what is unused of the slabs, over the most that there were; a look before
    the warm-up is none."""
    looks = [
        sample(1.0, kv=(900,), device={64: (0, 900)}),
        sample(3.0, with_work=1, kv=(100,), device={64: (60, 100)}, host={32: (30, 40)}),
        sample(4.0, kv=(200,), device={64: (100, 100), 32: (60, 100)}),
    ]
    done = SimulationRun(
        recorder=Recorder(), until=4.0, instances=1, events=0, preemptions=0, samples=looks, tp=2
    )
    metrics = measure(done, warmup_seconds=2.0)
    assert (metrics.fragmentation, metrics.host_fragmentation) == (0.2, 0.125)
    assert (metrics.gpus_with_work, metrics.gpus_opened) == (1.0, 2.0)
    assert (metrics.kv_mean_bytes, metrics.weights_mean_bytes) == (150.0, 500.0)
    assert (metrics.host_kv_peak_bytes, metrics.host_weights_peak_bytes) == (40.0, 700.0)
    assert fragmentation_by_shape(done, 2.0) == {
        "device": {"32": 0.2, "64": 0.2},
        "host": {"32": 0.125},
    }
    assert math.isnan(measure(run(Recorder())).fragmentation)


def sample(
    at: float,
    *,
    with_work: int = 0,
    kv: tuple[int, ...],
    device: KvUse,
    host: KvUse | None = None,
) -> Sample:
    return Sample(at, with_work, 1, (500,), kv, device, 700, host or {})


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
