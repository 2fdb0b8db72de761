"""The cost model: a formula for each model, and a smoothed factor for what it really takes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.scheduling.cost_model import (
    FIRST_GUESS,
    FIRST_GUESS_LOAD_BYTES_PER_SECOND,
    SMOOTHING,
    CostModel,
    StepTimes,
)
from appliance.vocabulary import ModelSpec, Slo

GIGABYTE = 10**9
FIRST_GUESS_OF_A_GIGABYTE = GIGABYTE / FIRST_GUESS_LOAD_BYTES_PER_SECOND

TIMES = StepTimes(
    prefill_base=0.01,
    prefill_per_token=0.001,
    prefill_per_token_squared=1e-6,
    step_base=0.02,
    step_per_kv_token=1e-5,
    step_per_request=0.0005,
)


def spec(name: str, weight_bytes: int = GIGABYTE) -> ModelSpec:
    return ModelSpec(
        name=name,
        weight_bytes=weight_bytes,
        max_context_tokens=4096,
        max_batch=8,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.1),
    )


def cost_model(**times: StepTimes) -> CostModel:
    """Costs of the models a and b, of a gigabyte each."""
    return CostModel([spec("a"), spec("b")], times)


def test_the_first_guesses() -> None:
    """Before anything was observed, every model costs the same per step, token and byte."""
    costs = cost_model()

    assert costs.step_seconds("a") == FIRST_GUESS.step_seconds(1, 0) > 0
    assert costs.prefill_seconds("a", 100) == FIRST_GUESS.prefill_seconds(100) > 0
    assert costs.switch_seconds("a") == FIRST_GUESS_OF_A_GIGABYTE


def test_the_formulas() -> None:
    """A prompt costs a + b t + c t^2, a step a + b kv + c n, with the coefficients of its model."""
    costs = cost_model(a=TIMES)

    assert costs.prefill_seconds("a", 100) == pytest.approx(0.01 + 0.1 + 0.01)
    assert costs.step_seconds("a", 4, 1000) == pytest.approx(0.02 + 0.01 + 0.002)
    assert costs.prefill_seconds("b", 100) == FIRST_GUESS.prefill_seconds(100)


def test_a_formula_that_was_given_stays_when_its_model_goes() -> None:
    """It comes back under its name with the formula, and without what was observed."""
    costs = cost_model(a=TIMES)
    costs.observe_turn("a", 10, 1.0, 1, 0, 10)

    costs.forget("a")
    costs.add(spec("a"))

    assert costs.step_seconds("a") == pytest.approx(0.0205)


def test_the_formulas_bend() -> None:
    """Past the knee more is dearer, and every tile that has begun is paid for."""
    times = msgspec.structs.replace(
        TIMES,
        prefill_knee_tokens=60,
        prefill_per_token_past_knee=0.002,
        step_knee_requests=4,
        step_per_request_past_knee=0.001,
        step_tile_requests=8,
        step_per_tile=0.003,
    )

    assert times.prefill_seconds(60) == TIMES.prefill_seconds(60)
    assert times.prefill_seconds(100) == pytest.approx(TIMES.prefill_seconds(100) + 0.08)
    assert times.step_seconds(4, 0) == pytest.approx(TIMES.step_seconds(4, 0) + 0.003)
    assert times.step_seconds(8, 0) == pytest.approx(TIMES.step_seconds(8, 0) + 0.003 + 0.004)
    assert times.step_seconds(9, 0) == pytest.approx(TIMES.step_seconds(9, 0) + 0.006 + 0.005)


def test_the_first_observation_replaces_the_guess() -> None:
    """What a model did is better than any guess, and says nothing about another model."""
    costs = cost_model()

    costs.observe_turn("a", 10, 1.0, 1, 0)
    costs.observe_prefill("a", 100, 2.0)
    costs.observe_switch("a", 3.0)

    assert costs.step_seconds("a") == pytest.approx(0.1)
    assert costs.prefill_seconds("a", 50) == pytest.approx(1.0)
    assert costs.switch_seconds("a") == 3.0
    assert costs.step_seconds("b") == FIRST_GUESS.step_seconds(1, 0)
    assert costs.switch_seconds("b") == FIRST_GUESS_OF_A_GIGABYTE


def test_an_observation_holds_for_other_sizes() -> None:
    """A model that takes twice as long as its formula says does so for every batch and prompt."""
    costs = cost_model(a=TIMES)

    costs.observe_turn("a", 10, 10 * 2 * TIMES.step_seconds(4, 1000), 4, 1000)
    costs.observe_prefill("a", 100, 2 * TIMES.prefill_seconds(100))

    assert costs.step_seconds("a", 8, 5000) == pytest.approx(2 * TIMES.step_seconds(8, 5000))
    assert costs.prefill_seconds("a", 700) == pytest.approx(2 * TIMES.prefill_seconds(700))


def test_later_observations_are_smoothed() -> None:
    """A new observation moves the estimate by its share."""
    costs = cost_model()
    costs.observe_turn("a", 1, 0.1, 1, 0)
    costs.observe_switch("a", 1.0)

    costs.observe_turn("a", 1, 0.5, 1, 0)
    costs.observe_switch("a", 2.0)

    assert costs.step_seconds("a") == pytest.approx(0.1 + SMOOTHING * 0.4)
    assert costs.switch_seconds("a") == pytest.approx(1.0 + SMOOTHING * 1.0)


def test_a_turn_without_steps_says_nothing() -> None:
    """A turn whose requests were all gone leaves the estimate as it is."""
    costs = cost_model()

    costs.observe_turn("a", 0, 1.0, 1, 0)

    assert costs.step_seconds("a") == FIRST_GUESS.step_seconds(1, 0)


@pytest.mark.parametrize(("moved_bytes", "seconds"), [(0, 1.0), (1000, 0.0)])
def test_a_load_that_took_nothing_says_nothing(moved_bytes: int, seconds: float) -> None:
    """Weights that were there already, or a clock that stood still, leave the rate as it is."""
    costs = cost_model()

    costs.observe_load(moved_bytes, seconds)

    assert costs.switch_seconds("a") == FIRST_GUESS_OF_A_GIGABYTE


@pytest.mark.parametrize(("moved_bytes", "seconds"), [(0, 1.0), (1000, 0.0)])
def test_kv_is_expected_to_move_as_weights_load_until_it_did(
    moved_bytes: int, seconds: float
) -> None:
    """A move that moved or took nothing says nothing either."""
    costs = cost_model()

    costs.observe_move(moved_bytes, seconds)

    assert costs.move_seconds(GIGABYTE) == FIRST_GUESS_OF_A_GIGABYTE


def test_small_moves_of_kv_say_little() -> None:
    """Bytes and seconds are smoothed apart, and what moves says nothing about weights."""
    costs = cost_model()
    costs.observe_move(GIGABYTE, 0.1)
    assert costs.move_seconds(GIGABYTE) == pytest.approx(0.1)

    costs.observe_move(10**6, 0.001)

    assert 0.1 < costs.move_seconds(GIGABYTE) < 0.101
    assert costs.switch_seconds("a") == FIRST_GUESS_OF_A_GIGABYTE


@given(st.integers(10**8, 10**11))
def test_the_load_rate_converges(rate: int) -> None:
    """Loads at one speed are expected at that speed in the end, whatever the first guess was."""
    costs = CostModel([spec("a", rate)])

    for _ in range(100):
        costs.observe_load(rate, 1.0)

    assert costs.switch_seconds("a") == pytest.approx(1.0, rel=1e-3)
