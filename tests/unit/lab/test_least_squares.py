"""Fitting step times: laws are found again through noise, and noise is told from laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from appliance.lab.calibration.least_squares import (
    Floats,
    PromptSamples,
    Steps,
    attainable_r2,
    consistent,
    fit,
    fit_prefill,
    fit_steps,
    r_squared,
)

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 30, 40, 50, 60, 70, 90, 110, 130, 150, 200)


def noise(rows: int, share: float, seed: int = 1) -> Floats:
    return 1 + share * np.random.default_rng(seed).standard_normal(rows)


def prompts(share: float = 0.0) -> PromptSamples:
    """10 ms up to 256 tokens, then 0.05 ms a token more; the square of lengths; 0.2 ms for every
    sequence but the first."""
    rows = [(length, n) for length in LENGTHS for n in BATCHES if length * n <= 4096]
    length, n = np.array(rows, dtype=np.float64).T
    tokens, squares = length * n, length * length * n
    seconds = 0.01 + 5e-5 * np.maximum(0, tokens - 256) + 1e-9 * squares + 2e-4 * (n - 1)
    return PromptSamples(tokens, squares, n, seconds * noise(len(rows), share))


def steps(share: float = 0.0) -> Steps:
    """8 ms and 5 ms for each tile of 64; 0.1 ms a request, 0.2 more past 96; 0.2 µs a KV token."""
    rows = [(length, n) for length in LENGTHS for n in BATCHES if length * n <= 4096]
    length, n = np.array(rows, dtype=np.float64).T
    kv = (length + 5) * n
    seconds = 0.008 + 0.005 * np.ceil(n / 64) + 1e-4 * n + 2e-4 * np.maximum(0, n - 96) + 2e-7 * kv
    return Steps(n, kv, seconds * noise(len(rows), share))


def test_a_law_of_prompts_is_found_again() -> None:
    """Its knee, too; a prompt computed alone is one sequence."""
    found = fit_prefill(prompts())

    assert found.r2 == pytest.approx(1.0)
    assert found.attainable_r2 == pytest.approx(1.0, abs=1e-3)
    assert found.coefficients["prefill_knee_tokens"] == 256
    assert found.coefficients["prefill_base_seconds"] == pytest.approx(0.01, rel=1e-3)
    past = found.coefficients["prefill_seconds_per_token_past_knee"]
    assert past == pytest.approx(5e-5, rel=1e-2)
    assert found.coefficients["prefill_seconds_per_token2"] == pytest.approx(1e-9, rel=1e-2)


def test_a_law_of_steps_is_found_again() -> None:
    """Its tiles and its knee, too."""
    found = fit_steps(steps())

    assert found.r2 == pytest.approx(1.0)
    assert found.coefficients["step_tile_sequences"] == 64
    assert found.coefficients["step_seconds_per_tile"] == pytest.approx(0.005, rel=1e-3)
    assert found.coefficients["step_knee_sequences"] == 96
    assert found.coefficients["step_seconds_per_kv_token"] == pytest.approx(2e-7, rel=1e-3)


def test_noise_of_a_few_percent_is_seen_through() -> None:
    """Held-out rows are predicted about as well as they repeat."""
    prefill, step = fit_prefill(prompts(0.03)), fit_steps(steps(0.03))

    assert prefill.r2 > 0.98
    assert step.r2 > 0.98
    assert prefill.relative_error < 0.04
    assert step.relative_error < 0.04
    assert step.r2 < step.attainable_r2


def test_noise_alone_is_no_law() -> None:
    """Seconds that have nothing to do with the size are not predicted, and the bound says that no
    law could."""
    measured = steps()
    seconds = 0.02 * np.abs(noise(len(measured.seconds), 0.3))
    found = fit_steps(Steps(measured.requests, measured.kv_tokens, seconds))

    assert found.r2 < 0.2
    assert found.attainable_r2 < 0.7


def test_no_coefficient_is_negative() -> None:
    """Where more work seems to take less time, it takes as long."""
    measured = steps()
    falling = Steps(measured.requests, measured.kv_tokens, 0.03 - 1e-7 * measured.kv_tokens)

    found = fit_steps(falling)

    assert min(found.coefficients.values()) >= 0


def test_kv_is_read_no_faster_than_the_memory_can() -> None:
    """Where the rows say nothing of KV, the memory's rate does."""
    measured = steps()
    flat = Steps(measured.requests, measured.kv_tokens, 0.01 + 1e-4 * measured.requests)

    assert fit_steps(flat).coefficients["step_seconds_per_kv_token"] < 1e-9
    assert fit_steps(flat, 1e-7).coefficients["step_seconds_per_kv_token"] >= 1e-7


def test_kv_is_read_no_slower_than_a_bound() -> None:
    """Where the rows say more, the rest of the step is fitted to what the bound leaves."""
    measured = steps()
    seconds = 0.01 + 1e-4 * measured.requests + 1e-6 * measured.kv_tokens
    slow = Steps(measured.requests, measured.kv_tokens, seconds)

    free, bounded = fit_steps(slow), fit_steps(slow, 1e-7, 2e-7)

    assert free.coefficients["step_seconds_per_kv_token"] == pytest.approx(1e-6, rel=0.01)
    assert bounded.coefficients["step_seconds_per_kv_token"] == 2e-7
    assert bounded.r2 < free.r2


def test_few_rows_are_fitted_by_straight_lines() -> None:
    """Bends would follow their noise; and with very few nothing can be held out."""
    rows = steps(0.05)
    ten = Steps(rows.requests[:10], rows.kv_tokens[:10], rows.seconds[:10])
    three = PromptSamples(*(np.array([1.0, 2.0, 3.0]) for _ in range(4)))

    assert fit_steps(ten).coefficients["step_knee_sequences"] == 0
    assert fit_steps(ten).coefficients["step_tile_sequences"] == 1
    assert np.isnan(fit_prefill(three).r2)


def test_a_row_that_the_others_contradict_is_left_out() -> None:
    """One that took far less than less work did, and one that took far more than more did."""
    sizes = np.arange(1.0, 11.0)[:, None]
    seconds = np.arange(1.0, 11.0)
    assert consistent(sizes, seconds).all()
    seconds[8] = 0.5
    seconds[0] = 50.0

    assert list(np.flatnonzero(~consistent(sizes, seconds))) == [0, 8]


def test_the_best_curve_never_falls() -> None:
    """What it explains is all of a rising curve of any form, and only the mean of a falling one."""
    sizes = np.repeat(np.arange(1.0, 9.0), 2)
    other = np.tile([0.0, 1.0], 8)[:, None]

    assert attainable_r2(sizes, other, np.exp(sizes) + 7 * other[:, 0]) == pytest.approx(1.0)
    assert attainable_r2(sizes, 0 * other, 10 - sizes) == pytest.approx(0.0)


def test_least_squares_of_plain_columns() -> None:
    """Coefficients, and R² of the same rows; nothing is explained where nothing varies."""
    features = np.array([[1.0, a, b] for a, b in itertools.product(range(4), range(3))])

    coefficients, r2 = fit(features, features @ np.array([2.0, 0.5, 0.0]))

    assert coefficients == pytest.approx([2.0, 0.5, 0.0], abs=1e-6)
    assert r2 == pytest.approx(1.0)
    assert np.isnan(r_squared(np.ones(3), np.ones(3)))
