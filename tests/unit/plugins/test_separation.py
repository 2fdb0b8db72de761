"""How many instances of a lone model prefill: within bounds, by the load, and without thrash."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plugins.separation import (
    FEWEST_INSTANCES,
    GAIN,
    LEAST_ROOM,
    PATIENCE,
    REST_SECONDS,
    ModelLoad,
    Pressure,
    Separation,
)

SUMMARIES = ModelLoad(
    prompt_seconds=0.78,
    answer_tokens=300.0,
    step_seconds=0.0234,
    request_seconds=0.00078,
    limit_seconds=0.045,
    room=30.0,
)
"""Of 14 B parameters: prompts of 6,500 tokens, with 50 ms for a token."""

loads = st.builds(
    ModelLoad,
    prompt_seconds=st.floats(1e-3, 10),
    answer_tokens=st.floats(1, 1e4),
    step_seconds=st.floats(0, 0.2),
    request_seconds=st.floats(1e-6, 0.01),
    limit_seconds=st.floats(1e-3, 0.5),
    room=st.floats(0.1, 1e4) | st.just(math.inf),
    most=st.integers(1, 1024) | st.just(math.inf),
    kv_seconds=st.floats(0, 1),
    target_seconds=st.floats(1e-3, 0.5) | st.just(math.inf),
)
pressures = st.builds(Pressure, st.booleans(), st.booleans())
observations = st.lists(st.tuples(loads, st.floats(0, 1e3), pressures), max_size=80)


def settled(
    load: ModelLoad, instances: int, rate: float, separation: Separation | None = None
) -> int:
    """What comes of the same observation for so long that nothing rests."""
    separation = separation or Separation()
    for second in range(100):
        separation.observe(float(second), load, instances, rate, Pressure())
    return separation.prefill


@given(loads, st.integers(1, 12), st.integers(0, 12))
def test_some_instances_always_decode(load: ModelLoad, instances: int, known: int) -> None:
    assert 0 <= load.best(instances, known) < instances


def test_where_steps_are_full_before_they_are_long_nothing_is_apart() -> None:
    """Chats, of which a step could have 200, and has 32."""
    chats = ModelLoad(0.04, 250.0, 0.0225, 0.0002, 0.063, math.inf)
    few = chats._replace(most=32.0)

    assert chats._replace(most=1e6).carried_mixed(4) == pytest.approx(chats.carried_mixed(4))
    assert few.carried_apart(2, 4) < few.carried_mixed(4) < 0.8 * chats.carried_mixed(4)
    assert settled(chats, 4, chats.carried_mixed(4)) > 0
    assert settled(few, 4, few.carried_mixed(4)) == 0


@given(loads, st.integers(3, 12))
def test_only_what_carries_more_is_chosen(load: ModelLoad, instances: int) -> None:
    if chosen := load.best(instances, 0):
        assert load.carried_apart(chosen, instances) > load.carried_mixed(instances)


@given(loads, st.integers(2, 8), st.integers(1, 7), st.floats(1, 10))
def test_longer_prompts_carry_less(
    load: ModelLoad, instances: int, prefill: int, times: float
) -> None:
    longer = load._replace(
        prompt_seconds=load.prompt_seconds * times, kv_seconds=load.kv_seconds * times
    )
    prefill = min(prefill, instances - 1)

    assert longer.carried_mixed(instances) <= load.carried_mixed(instances) * (1 + 1e-9)
    before = load.carried_apart(prefill, instances)
    assert longer.carried_apart(prefill, instances) <= before * (1 + 1e-9)


def test_more_prefill_if_prompts_are_longer_and_fewer_if_answers_are() -> None:
    long_prompts = SUMMARIES._replace(prompt_seconds=3.0)
    long_answers = SUMMARIES._replace(answer_tokens=1000.0)

    counts = [load.best(8, 0) for load in (long_answers, SUMMARIES, long_prompts)]

    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_kv_that_has_no_room_leaves_more_to_decode() -> None:
    short = SUMMARIES._replace(room=8.0)

    assert 0 < short.best(8, 0) < SUMMARIES.best(8, 0)


@given(loads, st.integers(3, 12))
def test_the_fewest_prefill_of_those_that_carry_hardly_less(
    load: ModelLoad, instances: int
) -> None:
    if chosen := load.best(instances, 0):
        carried = [load.carried_apart(count, instances) for count in range(1, instances)]
        assert carried[chosen - 1] * (1 + GAIN) >= max(carried)
        assert all([rate * (1 + GAIN) < max(carried) for rate in carried[: chosen - 1]])


@given(loads)
def test_where_there_is_little_room_nothing_is_apart(load: ModelLoad) -> None:
    little = load._replace(room=0.99 * LEAST_ROOM)

    assert [little.best(8, known) for known in range(8)] == [0] * 8


@given(loads, st.integers(3, 9), st.floats(1, 100))
def test_slower_links_carry_less(load: ModelLoad, instances: int, times: float) -> None:
    slower = load._replace(kv_seconds=load.kv_seconds * times)

    assert slower.carried_mixed(instances) == load.carried_mixed(instances)
    for count in range(1, instances):
        before = load.carried_apart(count, instances)
        assert slower.carried_apart(count, instances) <= before * (1 + 1e-9)


def test_a_link_bounds_what_is_prefilled() -> None:
    """KV that takes a link longer than its prompt takes the instance."""
    quick = SUMMARIES._replace(answer_tokens=3000.0, room=1e6, limit_seconds=0.5)
    slow = quick._replace(kv_seconds=2 * quick.prompt_seconds)

    assert quick._replace(answer_tokens=1.0).carried_apart(1, 4) >= 1 / quick.prompt_seconds
    assert slow._replace(answer_tokens=30.0).carried_apart(1, 4) < 0.5 / quick.prompt_seconds


def test_answers_too_short_for_what_a_move_takes_are_not_apart() -> None:
    """The mean time between their tokens would be over the target, however short steps are."""
    load = SUMMARIES._replace(target_seconds=0.05)

    assert load.best(4, 0) > 0
    for short in (
        load._replace(answer_tokens=5.0),
        load._replace(answer_tokens=20.0, kv_seconds=0.3),
    ):
        assert [short.carried_apart(count, 4) for count in (1, 2, 3)] == [0.0] * 3
        assert short.best(4, 2) == 0


def test_a_link_that_turns_slow_mixes_what_was_apart() -> None:
    separation = Separation()
    assert settled(SUMMARIES._replace(kv_seconds=0.004), 4, 2.0, separation) > 0

    slow = SUMMARIES._replace(kv_seconds=0.5)
    for second in range(100, 150):
        separation.observe(float(second), slow, 4, 2.0, Pressure())

    assert separation.prefill == 0


def test_what_one_instance_does_besides_is_counted() -> None:
    """Two that only prefill carry 2.56/s, one that only decodes less than two: a mixed one
    between them makes use of what is left of both."""
    free = 1 - SUMMARIES.step_seconds / SUMMARIES.limit_seconds
    answer = 1.3 * SUMMARIES.request_seconds * SUMMARIES.answer_tokens
    decoded = free / (SUMMARIES.request_seconds * SUMMARIES.answer_tokens)
    rate = SUMMARIES.carried_apart(3, 4)

    assert rate > max(2 / SUMMARIES.prompt_seconds, decoded)
    prompts = SUMMARIES.prompt_seconds * (rate - 2 / SUMMARIES.prompt_seconds)
    assert prompts + answer * (rate - decoded) == pytest.approx(free)


@given(observations, st.integers(1, 9))
def test_the_number_is_in_bounds_and_seldom_changes(
    seen: list[tuple[ModelLoad, float, Pressure]], instances: int
) -> None:
    """Under any noise: once in `REST_SECONDS` at most."""
    separation, before, changes = Separation(), 0, 0
    for second, (load, rate, pressure) in enumerate(seen):
        prefill = separation.observe(float(second), load, instances, rate, pressure)
        assert 0 <= prefill < max(2, instances)
        assert not prefill or instances >= FEWEST_INSTANCES
        changes += prefill != before
        before = prefill

    assert changes <= 1 + len(seen) / REST_SECONDS


@given(loads, st.integers(3, 9), st.floats(0, 1e3))
def test_one_load_settles_one_number(load: ModelLoad, instances: int, rate: float) -> None:
    separation = Separation()
    first = settled(load, instances, rate, separation)
    for second in range(100, 200):
        assert separation.observe(float(second), load, instances, rate, Pressure()) == first


def test_little_work_stays_mixed_and_some_is_kept_apart() -> None:
    carried = SUMMARIES.carried_mixed(4)
    separation = Separation()

    assert settled(SUMMARIES, 4, 0.3 * carried) == 0
    assert settled(SUMMARIES, 4, carried, separation) > 0

    for second in range(100, 200):
        separation.observe(float(second), SUMMARIES, 4, 0.3 * carried, Pressure())
    assert separation.prefill > 0
    for second in range(200, 300):
        separation.observe(float(second), SUMMARIES, 4, 0.1 * carried, Pressure())
    assert separation.prefill == 0


def test_one_observation_changes_nothing() -> None:
    separation = Separation()

    counts = [
        separation.observe(float(second), SUMMARIES, 4, 2.0, Pressure())
        for second in range(PATIENCE)
    ]

    assert counts[:-1] == [0] * (PATIENCE - 1)
    assert counts[-1] > 0


EVEN = ModelLoad(0.5, 300.0, 0.02, 0.0005, 0.05, math.inf)
"""A load with which one instance more or less hardly matters to what thirty carry."""


@pytest.mark.parametrize(
    ("pressure", "step"),
    [
        (Pressure(prompts=True), 1),
        (Pressure(steps=True), -1),
        (Pressure(prompts=True, steps=True), 0),
    ],
)
def test_what_is_late_moves_one_instance_at_a_time(pressure: Pressure, step: int) -> None:
    separation = Separation()
    began = settled(EVEN, 30, 30.0, separation)
    assert 1 < began < 29

    counts = [
        separation.observe(100.0 + second, EVEN, 30, 30.0, pressure) for second in range(PATIENCE)
    ]

    assert counts == [began] * (PATIENCE - 1) + [began + step]


def test_what_is_late_moves_none_where_far_less_would_be_carried() -> None:
    """With three, one fewer prefills half of the prompts."""
    separation = Separation()
    began = settled(SUMMARIES._replace(answer_tokens=50.0), 3, 3.0, separation)

    for second in range(100, 150):
        separation.observe(
            float(second), SUMMARIES._replace(answer_tokens=50.0), 3, 3.0, Pressure(steps=True)
        )

    assert (began, separation.prefill) == (2, 2)


def test_one_that_decodes_is_left() -> None:
    separation = Separation()
    few = SUMMARIES._replace(answer_tokens=50.0)
    began = settled(few, 3, 3.0, separation)

    for second in range(100, 150):
        separation.observe(float(second), few, 3, 3.0, Pressure(prompts=True))

    assert (began, separation.prefill) == (2, 2)


def test_another_load_moves_one_instance_after_another() -> None:
    separation = Separation()
    before = settled(SUMMARIES._replace(answer_tokens=1000.0), 8, 5.0, separation)
    counts = [before]
    for second in range(100, 200):
        counts.append(
            separation.observe(
                float(second), SUMMARIES._replace(prompt_seconds=3.0), 8, 5.0, Pressure()
            )
        )

    assert counts[-1] > before + 1
    assert {after - known for known, after in itertools.pairwise(counts)} <= {0, 1}


def test_all_mix_at_once_and_rest_then() -> None:
    separation = Separation()
    settled(SUMMARIES, 4, 2.0, separation)

    separation.mix(100.0)

    assert separation.prefill == 0
    for second in range(9):
        assert not separation.observe(101.0 + second, SUMMARIES, 4, 2.0, Pressure())
    assert separation.observe(110.0, SUMMARIES, 4, 2.0, Pressure())


def test_to_mix_what_is_mixed_is_no_change() -> None:
    separation = Separation()
    separation.mix(0.0)

    counts = [
        separation.observe(1.0 + second, SUMMARIES, 4, 2.0, Pressure())
        for second in range(PATIENCE)
    ]

    assert counts[-1] > 0
