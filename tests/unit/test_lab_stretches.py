"""Decoding in closed form against decoding step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import LabError
from appliance.lab.stretches import elapsed, steps_in_room, steps_until
from appliance.vocabulary import Direction, Preempt, TokensProduced, TurnEnd, TurnEnded
from tests.unit.lab_bench import Bench, profile

sixteenths = st.integers(1, 200).map(lambda number: number / 64)


@given(st.floats(0, 1e3), st.floats(1e-4, 1.0), st.floats(0, 1e-2))
def test_steps_until_is_the_least_number_that_takes_so_long(
    seconds: float, first: float, growth: float
) -> None:
    """One step fewer would take less."""
    steps = steps_until(seconds, first, growth)

    assert steps >= 1
    assert elapsed(first, growth, steps) >= seconds
    assert steps == 1 or elapsed(first, growth, steps - 1) < seconds


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 60), st.integers(1, 40))
def test_steps_in_room_is_the_most_that_fit(kv_tokens: list[int], blocks: int, limit: int) -> None:
    """One step more would need a block too many, or is over the limit."""

    def needed(steps: int) -> int:
        return sum(-(-(tokens + steps) // 4) for tokens in kv_tokens)

    steps = steps_in_room(kv_tokens, 4, blocks, limit)

    assert 0 <= steps <= limit
    assert steps == 0 or needed(steps) <= blocks
    assert steps == limit or needed(steps + 1) > blocks


@dataclass
class Reference:
    """A turn, one step after the other, as `appliance.worker.Worker._decode` does it."""

    end: TurnEnd
    steps: int
    seconds: float
    tokens: list[list[float]]


def step_by_step(
    prompts: list[int],
    outputs: list[int],
    start: float,
    quota: float,
    cap_blocks: int,
    preempt_at: float,
) -> Reference | None:
    """None if there is no room for the first step. Every request has one token already."""
    model = profile()
    batch = list(range(len(prompts)))
    kv = list(prompts)
    left = [output - 1 for output in outputs]
    tokens: list[list[float]] = [[] for _ in prompts]
    now, steps = start, 0
    while True:
        if sum(-(-(kv[i] + 1) // 4) for i in batch) > cap_blocks:
            return Reference(TurnEnd.KV_FULL, steps, now - start, tokens) if steps else None
        now += model.step_seconds(len(batch), sum(kv[i] for i in batch))
        steps += 1
        for i in batch:
            kv[i] += 1
            left[i] -= 1
            tokens[i].append(now)
        batch = [i for i in batch if left[i]]
        if not batch:
            return Reference(TurnEnd.DRAINED, steps, now - start, tokens)
        if preempt_at <= now:
            return Reference(TurnEnd.PREEMPTED, steps, now - start, tokens)
        if now - start >= quota:
            return Reference(TurnEnd.QUOTA, steps, now - start, tokens)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(2, 60)), min_size=1, max_size=5),
    sixteenths,
    st.integers(1, 8),
    st.one_of(st.just(1e6), sixteenths),
)
def test_a_turn_in_closed_form_is_the_turn_step_by_step(
    sizes: list[tuple[int, int]], quota: float, cap_slabs: int, preempted_after: float
) -> None:
    """Steps, end, seconds and the time of every token are the same, to the last bit."""
    bench = Bench()
    lives = [bench.life(f"r{i}", p, o, produced=1) for i, (p, o) in enumerate(sizes)]
    bench.load()
    bench.move(Direction.IN, *lives, kv_slabs=32)
    bench.run(8.0)
    expected = step_by_step(
        [p for p, _ in sizes],
        [o for _, o in sizes],
        8.0,
        quota,
        16 * cap_slabs,
        8.0 + preempted_after,
    )
    if expected is None:
        with pytest.raises(LabError, match="no room"):
            bench.turn(*lives, quota=quota, kv_slabs=cap_slabs)
        return

    bench.turn(*lives, quota=quota, kv_slabs=cap_slabs)
    bench.run(8.0 + preempted_after)
    bench.order(Preempt(instance=0, turn=1))
    bench.run()

    [(_, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps, ended.seconds) == (
        expected.end,
        expected.steps,
        expected.seconds,
    )
    assert [bench.token_times(life) for life in lives] == expected.tokens
    told = [token for _, event in bench.events(TokensProduced) for token in event.tokens]
    for life, times in zip(lives, expected.tokens, strict=True):
        assert sum(token.count for token in told if token.request == life.id) == len(times)
    going_on = [life.kv_tokens for life in lives if life.remaining_tokens]
    assert ended.kv_slabs == -(-sum(-(-tokens // 4) for tokens in going_on) // 16)
