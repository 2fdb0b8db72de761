"""What the cost model learns of a model that came without a formula: lines of steps and prompts."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.calibration.least_squares import Steps, fit_steps
from appliance.scheduling.cost_model import (
    FIRST_GUESS,
    SMOOTHING,
    UNSEEN_TURNS,
    CostModel,
    StepTimes,
)
from appliance.vocabulary import ModelSpec, Slo

CONTEXT = 800
"""Tokens of KV of a request, about."""
TURNS = 600

TRUTH = StepTimes(step_base=0.02, step_per_kv_token=1e-7, step_per_request=0.0005)

Pace = Callable[[int], float]
"""What a turn takes, over what it should: by its number."""


def unknown() -> CostModel:
    """Costs of the model a, of which nothing is known."""
    spec = ModelSpec(
        name="a",
        weight_bytes=10**9,
        max_context_tokens=4096,
        max_batch=256,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.1),
    )
    return CostModel([spec])


def batches(seed: int, most: int) -> Iterator[tuple[int, int]]:
    """Requests and tokens of KV, turn after turn, as a load goes up and down."""
    dice = random.Random(seed)
    for turn in range(TURNS):
        requests = 1 + round((most - 1) * (0.5 + 0.5 * math.sin(turn / 20)) * dice.random())
        yield requests, sum(dice.randrange(CONTEXT // 2, 2 * CONTEXT) for _ in range(requests))


def show(costs: CostModel, truth: StepTimes, seed: int, most: int, pace: Pace) -> None:
    """Turns of twenty steps."""
    for turn, (requests, kv_tokens) in enumerate(batches(seed, most)):
        seconds = truth.step_seconds(requests, kv_tokens) * pace(turn)
        costs.observe_turn("a", 20, 20 * seconds, requests, kv_tokens)


def noise(seed: int, variation: float) -> Pace:
    dice = random.Random(seed)
    return lambda _turn: dice.lognormvariate(0.0, variation)


def added(times: CostModel | StepTimes) -> float:
    """What a request more adds to a step, over what a step of one takes."""
    if isinstance(times, CostModel):
        one, many = times.step_seconds("a", 1, CONTEXT), times.step_seconds("a", 33, 33 * CONTEXT)
    else:
        one, many = times.step_seconds(1, CONTEXT), times.step_seconds(33, 33 * CONTEXT)
    return (many - one) / 32 / one


@given(
    seed=st.integers(0, 10**6),
    base=st.floats(0.001, 0.1),
    request_share=st.floats(0.02, 1.0),
    kv_share=st.floats(0.0, 0.01),
    variation=st.floats(0.0, 0.1),
)
def test_what_a_request_adds_is_found_in_noise(
    seed: int, base: float, request_share: float, kv_share: float, variation: float
) -> None:
    """However fast the model is, and however much of a step is its batch."""
    truth = StepTimes(
        step_base=base,
        step_per_request=base * request_share,
        step_per_kv_token=base * kv_share / CONTEXT,
    )
    costs = unknown()

    show(costs, truth, seed, 48, noise(seed, variation))

    assert added(costs) == pytest.approx(added(truth), rel=0.3)


def test_exact_turns_give_the_line_that_calibration_fits() -> None:
    """Of turns without noise, the same as the lab's least squares."""
    costs = unknown()
    show(costs, TRUTH, 1, 20, lambda _turn: 1.0)
    rows = np.array(list(batches(1, 20)), dtype=np.float64)
    seconds = np.array([TRUTH.step_seconds(int(n), int(k)) for n, k in rows])

    fitted = fit_steps(Steps(rows[:, 0], rows[:, 1], seconds)).coefficients

    assert fitted["step_seconds_per_sequence"] == pytest.approx(TRUTH.step_per_request, rel=1e-3)
    for n, k in [(1, 500), (8, 10000), (200, 100)]:
        assert costs.step_seconds("a", n, k) == pytest.approx(TRUTH.step_seconds(n, k), rel=1e-3)


@given(st.integers(1, 200), st.integers(0, 10**6))
def test_a_batch_that_stays_the_same_teaches_nothing(requests: int, seed: int) -> None:
    """A step of any size takes what a step took last, smoothed, as before anything is learned."""
    costs, dice = unknown(), random.Random(seed)
    expected = None

    for turn in range(TURNS):
        seconds = dice.uniform(0.01, 0.03)
        expected = seconds if expected is None else expected + SMOOTHING * (seconds - expected)
        costs.observe_turn("a", 20, 20 * seconds, requests, 1000 + turn)

    for n, k in [(1, 0), (requests, 1000), (256, 10**6)]:
        assert costs.step_seconds("a", n, k) == pytest.approx(expected)


@given(st.integers(0, 10**6), st.floats(0.0, 0.3))
def test_steps_that_do_not_grow_stay_flat(seed: int, variation: float) -> None:
    """Noise is not taken for growth, however the batch varies."""
    flat = StepTimes(step_base=0.02)
    costs = unknown()

    show(costs, flat, seed, 48, noise(seed, variation))

    assert added(costs) == 0.0


def test_few_turns_of_a_size_teach_nothing() -> None:
    """One busy moment does not say how steps grow."""
    costs = unknown()
    for _ in range(TURNS):
        costs.observe_turn("a", 20, 20 * TRUTH.step_seconds(1, CONTEXT), 1, CONTEXT)
    for _ in range(3):
        costs.observe_turn("a", 20, 20 * TRUTH.step_seconds(30, 30 * CONTEXT), 30, 30 * CONTEXT)

    assert added(costs) == 0.0


def test_a_line_that_is_known_is_kept_while_the_batch_stays_the_same() -> None:
    """Turns are forgotten as others of their size come, and not as time passes."""
    costs = unknown()
    show(costs, TRUTH, 1, 48, noise(1, 0.05))
    for _ in range(20):
        show(costs, TRUTH, 1, 1, noise(2, 0.05))

    assert added(costs) == pytest.approx(added(TRUTH), rel=0.3)


def test_a_model_that_becomes_slower_is_followed_at_once_and_learned_anew() -> None:
    """The level in a few turns, the rest of the line as turns of each size come."""
    costs, slow = unknown(), StepTimes(step_base=0.02, step_per_request=0.002)
    show(costs, TRUTH, 1, 48, lambda _turn: 1.0)
    for _ in range(16):
        costs.observe_turn("a", 20, 20 * slow.step_seconds(20, 20 * CONTEXT), 20, 20 * CONTEXT)
    assert costs.step_seconds("a", 20, 20 * CONTEXT) == pytest.approx(0.06, rel=0.05)

    for seed in range(3):
        show(costs, slow, seed, 48, lambda _turn: 1.0)
    assert added(costs) == pytest.approx(added(slow), rel=0.1)


@pytest.mark.parametrize("factor", [30.0, 1 / 30])
def test_turns_that_are_far_off_count_little(factor: float) -> None:
    """One of twenty takes thirty times as long, or as short, as it should."""
    costs = unknown()

    show(costs, TRUTH, 3, 48, lambda turn: factor if turn % 20 == 19 else 1.0)
    for _ in range(20):  # the level is that of the last turns
        costs.observe_turn("a", 20, 20 * TRUTH.step_seconds(9, 9 * CONTEXT), 9, 9 * CONTEXT)

    assert added(costs) == pytest.approx(added(TRUTH), rel=0.3)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 100),
            st.floats(0.0, 1e4),
            st.integers(0, 5000),
            st.integers(0, 10**7),
            st.integers(0, 10**5),
        ),
        max_size=200,
    )
)
def test_no_estimate_is_negative_or_shrinks(turns: list[tuple[int, float, int, int, int]]) -> None:
    """Whatever is shown, a larger step takes no less, and every step takes some time."""
    costs = unknown()
    for _ in range(3):
        for steps, seconds, requests, kv_tokens, tokens in turns:
            costs.observe_turn("a", steps, seconds, requests, kv_tokens, tokens)

        found = [costs.step_seconds("a", n, 100 * n) for n in (1, 2, 10, 5000)]
        assert found == sorted(found)
        assert costs.step_seconds("a", 1, 10**6) >= found[0] >= 0.0
        assert math.isfinite(found[-1])


def test_what_is_kept_does_not_grow() -> None:
    """However many turns are shown."""
    costs = unknown()
    sizes = []
    for seed in range(4):
        show(costs, TRUTH, seed, 5000, noise(seed, 0.1))
        sizes.append(len(pickle.dumps(costs)))

    assert sizes[-1] <= sizes[1] + 100 < 3000


def test_requests_that_end_in_a_turn_count_as_long_as_they_were_there() -> None:
    """A batch that shrinks is as large as it was in the mean."""
    costs = unknown()
    for requests, kv_tokens in batches(5, 48):
        mean = max(1, requests // 2)
        seconds = 20 * TRUTH.step_seconds(mean, kv_tokens * mean // requests)
        costs.observe_turn("a", 20, seconds, requests, kv_tokens, 20 * mean)

    assert added(costs) == pytest.approx(added(TRUTH), rel=0.05)


def test_given_times_are_not_learned() -> None:
    """Their factor is: a model that comes with a formula keeps its form."""
    spec = ModelSpec(
        name="a",
        weight_bytes=10**9,
        max_context_tokens=4096,
        max_batch=256,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.1),
    )
    flat = StepTimes(step_base=0.01)
    costs = CostModel([spec], {"a": flat})

    show(costs, TRUTH, 1, 48, lambda _turn: 1.0)

    assert added(costs) == 0.0


def test_another_model_of_the_name_is_learned_anew() -> None:
    costs = unknown()
    show(costs, TRUTH, 1, 48, lambda _turn: 1.0)

    costs.forget("a")

    assert costs.step_seconds("a", 40, 10000) == FIRST_GUESS.step_seconds(40, 10000)


PROMPTS = StepTimes(prefill_base=0.02, prefill_per_token=1e-4, prefill_per_token_squared=1e-8)


def test_short_and_long_prompts_are_on_a_line() -> None:
    """What every prompt takes at least is not spread over its tokens: a short one does not make
    long ones look slow."""
    costs, dice = unknown(), random.Random(1)
    for _ in range(200):
        tokens = dice.randrange(1000, 9000)
        seconds = PROMPTS.prefill_seconds(tokens) * dice.lognormvariate(0.0, 0.05)
        costs.observe_prefill("a", tokens, seconds)

    for _ in range(2):
        costs.observe_prefill("a", 3, PROMPTS.prefill_seconds(3))

    assert costs.prefill_seconds("a", 6500) == pytest.approx(PROMPTS.prefill_seconds(6500), rel=0.3)


def test_prompts_of_one_length_teach_nothing() -> None:
    """Others take in proportion to their tokens, as before anything is learned."""
    costs = unknown()

    for _ in range(TURNS):
        costs.observe_prefill("a", 1000, 0.1)

    assert costs.prefill_seconds("a", 200) == pytest.approx(0.02)
    assert costs.prefill_seconds("a", 5000) == pytest.approx(0.5)


def test_steps_that_compute_prompts_too_say_the_rest() -> None:
    """A box that computes prompts in all its turns learns from these, once it has seen some
    prompts alone: what is left is the steps'."""
    costs, dice = unknown(), random.Random(1)
    turns = list(batches(7, 40))

    def computes(requests: int, kv_tokens: int) -> None:
        prompt = dice.randrange(500, 1500)
        seconds = 5 * TRUTH.step_seconds(requests, kv_tokens) + 1e-4 * prompt
        seconds *= dice.lognormvariate(0.0, 0.05)
        made = 5 * requests
        costs.observe_mixed_turn("a", 5, seconds, requests, kv_tokens, made, 1, prompt)

    for requests, kv_tokens in turns:
        computes(requests, kv_tokens)
    assert added(costs) == 0.0

    for _ in range(4):
        costs.observe_prefill("a", 1000, 0.1)
    for requests, kv_tokens in turns:
        computes(requests, kv_tokens)
    assert added(costs) == pytest.approx(added(TRUTH), rel=0.3)
    assert costs.step_seconds("a", 20, 20 * CONTEXT) == pytest.approx(
        TRUTH.step_seconds(20, 20 * CONTEXT), rel=0.2
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_that_grow_no_more_become_flat_at_their_level(mixed: bool) -> None:
    """A line that explains nothing any more is given up, whatever turns show that."""
    costs, flat = unknown(), StepTimes(step_base=0.05)
    show(costs, TRUTH, 1, 48, noise(1, 0.05))
    costs.observe_prefill("a", 1000, 0.1)

    for seed in range(10):
        for requests, kv_tokens in batches(seed, 48):
            seconds = 20 * flat.step_seconds(requests, kv_tokens)
            made = 20 * requests
            if mixed:
                seconds += 0.1
                costs.observe_mixed_turn("a", 20, seconds, requests, kv_tokens, made, 1, 1000)
            else:
                costs.observe_turn("a", 20, seconds, requests, kv_tokens, made)

    assert added(costs) == 0.0
    assert costs.step_seconds("a", 9, 9 * CONTEXT) == pytest.approx(0.05, rel=0.05)


def test_turns_with_prompts_alone_ask_for_a_prompt_alone() -> None:
    """Where all prompts are computed in steps, nothing is known of either until one is seen alone.
    From then on such turns say what a step takes."""
    costs = unknown()
    for _ in range(UNSEEN_TURNS):
        assert not costs.lacks_prompt("a")
        costs.observe_mixed_turn("a", 4, 0.3, 3, 1000, 12, 1, 1000)
    assert costs.lacks_prompt("a")
    assert costs.step_seconds("a") == FIRST_GUESS.step_seconds(1, 0)

    costs.observe_prefill("a", 1000, 0.1)
    costs.observe_mixed_turn("a", 4, 0.3, 3, 1000, 12, 1, 1000)

    assert not costs.lacks_prompt("a")
    assert costs.step_seconds("a", 3, 1000) == pytest.approx(0.05, rel=0.01)
