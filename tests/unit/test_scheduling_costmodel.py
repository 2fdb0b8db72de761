"""The cost model: a guess until something was observed, then a smoothed mean of observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.scheduling.costmodel import (
    FIRST_GUESS_LOAD_BYTES_PER_SECOND,
    FIRST_GUESS_PREFILL_SECONDS_PER_TOKEN,
    FIRST_GUESS_STEP_SECONDS,
    SMOOTHING,
    CostModel,
)

GIGABYTE = 10**9
FIRST_GUESS_OF_A_GIGABYTE = GIGABYTE / FIRST_GUESS_LOAD_BYTES_PER_SECOND


def test_the_first_guesses() -> None:
    """Before anything was observed, every model costs the same per step, token and byte."""
    costs = CostModel()

    assert costs.step_seconds("a") == FIRST_GUESS_STEP_SECONDS
    assert costs.prefill_seconds("a", 100) == 100 * FIRST_GUESS_PREFILL_SECONDS_PER_TOKEN
    assert costs.switch_seconds("a", GIGABYTE) == FIRST_GUESS_OF_A_GIGABYTE


def test_the_first_observation_replaces_the_guess() -> None:
    """What a model did is better than any guess, and says nothing about another model."""
    costs = CostModel()

    costs.observe_turn("a", 10, 1.0)
    costs.observe_prefill("a", 100, 2.0)
    costs.observe_switch("a", 3.0)

    assert costs.step_seconds("a") == pytest.approx(0.1)
    assert costs.prefill_seconds("a", 50) == pytest.approx(1.0)
    assert costs.switch_seconds("a", GIGABYTE) == 3.0
    assert costs.step_seconds("b") == FIRST_GUESS_STEP_SECONDS
    assert costs.switch_seconds("b", GIGABYTE) == FIRST_GUESS_OF_A_GIGABYTE


def test_later_observations_are_smoothed() -> None:
    """A new observation moves the estimate by its share."""
    costs = CostModel()
    costs.observe_turn("a", 1, 0.1)
    costs.observe_switch("a", 1.0)

    costs.observe_turn("a", 1, 0.5)
    costs.observe_switch("a", 2.0)

    assert costs.step_seconds("a") == pytest.approx(0.1 + SMOOTHING * 0.4)
    assert costs.switch_seconds("a", GIGABYTE) == pytest.approx(1.0 + SMOOTHING * 1.0)


def test_a_turn_without_steps_says_nothing() -> None:
    """A turn whose requests were all gone leaves the estimate as it is."""
    costs = CostModel()

    costs.observe_turn("a", 0, 1.0)

    assert costs.step_seconds("a") == FIRST_GUESS_STEP_SECONDS


@pytest.mark.parametrize(("moved_bytes", "seconds"), [(0, 1.0), (1000, 0.0)])
def test_a_load_that_took_nothing_says_nothing(moved_bytes: int, seconds: float) -> None:
    """Weights that were there already, or a clock that stood still, leave the rate as it is."""
    costs = CostModel()

    costs.observe_load(moved_bytes, seconds)

    assert costs.switch_seconds("a", GIGABYTE) == FIRST_GUESS_OF_A_GIGABYTE


@given(st.integers(10**8, 10**11))
def test_the_load_rate_converges(rate: int) -> None:
    """Loads at one speed are expected at that speed in the end, whatever the first guess was."""
    costs = CostModel()

    for _ in range(100):
        costs.observe_load(rate, 1.0)

    assert costs.switch_seconds("a", rate) == pytest.approx(1.0, rel=1e-3)
