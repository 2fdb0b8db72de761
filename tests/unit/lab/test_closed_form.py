"""Decoding in closed form against decoding step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from appliance.errors import LabError
from appliance.lab.sim.closed_form import elapsed, steps_in_room, steps_until
from appliance.vocabulary import (
    Direction,
    KvShape,
    Preempt,
    PrefillDeferred,
    PrefillDone,
    TokensProduced,
    TurnEnd,
    TurnEnded,
)
from tests.unit.lab.bench import Bench, profile

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


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(1, 40),
    st.sampled_from([(1, 0), (2, 0), (1, 3), (0, 1)]),
)
def test_steps_in_room_is_the_most_that_fit(
    kv_tokens: list[int], blocks: int, limit: int, tables: tuple[int, int]
) -> None:
    """One step more would need a block too many, or is over the limit."""
    shape = KvShape(
        block_tokens=4,
        block_bytes=100,
        group_blocks=1,
        group_slabs=1,
        tables=tables[0],
        state_blocks=tables[1],
    )

    def needed(steps: int) -> int:
        each = [-(-(tokens + steps) // 4) * tables[0] for tokens in kv_tokens]
        return sum(each) + tables[1] * sum(tokens + steps > 0 for tokens in kv_tokens)

    steps = steps_in_room(kv_tokens, shape, blocks, limit)

    assert 0 <= steps <= limit
    assert steps == 0 or needed(steps) <= blocks
    assert steps == limit or needed(steps + 1) > blocks


@dataclass
class Prompt:
    """One that is computed beside the steps."""

    tokens: int
    done: int = 0
    over: float | None = None
    """When it produced its token; None while it has not, for ever if it is deferred."""


@dataclass
class Reference:
    """A turn, one step after the other, as `appliance.worker.worker.Worker._decode` does it."""

    kv: list[int]
    left: list[int]
    prompts: list[Prompt]
    chunk: int
    cap_blocks: int
    quota: float
    preempt_at: float
    now: float = 8.0
    steps: int = 0
    end: TurnEnd | None = None
    tokens: list[list[float]] = field(default_factory=list)

    def run(self) -> bool:
        """False if there is no room for the first step."""
        batch = list(range(len(self.kv)))
        waiting, begun = list(self.prompts), list[Prompt]()
        self.tokens = [[] for _ in batch]
        began, step = self.now, profile(**QUADRATIC).mixed_step_seconds
        while True:
            if self.end is None and self.preempt_at > self.now:
                while waiting and sum(p.tokens - p.done for p in begun) < self.chunk:
                    prompt = waiting.pop(0)
                    if self.held(batch, begun) + -(-prompt.tokens // 4) <= self.cap_blocks:
                        begun.append(prompt)
            if not begun and (self.end is not None or not batch):
                self.end = self.end or TurnEnd.DRAINED
                self.seconds = self.now - began
                return True
            if batch and self.held(batch, begun, 1) > self.cap_blocks:
                if not self.steps:
                    return False
                self.end, batch = TurnEnd.KV_FULL, []
                continue
            room, chunks = self.chunk, []
            for prompt in begun:
                piece = min(room, prompt.tokens - prompt.done)
                if piece:
                    chunks.append((piece, prompt.done))
                prompt.done += piece
                room -= piece
            if chunks:
                self.now += step(len(batch), sum(self.kv[i] for i in batch), chunks)
            else:
                self.now += profile().step_seconds(len(batch), sum(self.kv[i] for i in batch))
            self.steps += 1
            for i in batch:
                self.kv[i] += 1
                self.left[i] -= 1
                self.tokens[i].append(self.now)
            for prompt in begun:
                if prompt.done == prompt.tokens:
                    prompt.over = self.now
                    self.cap_blocks -= -(-prompt.tokens // 4)
            begun = [prompt for prompt in begun if prompt.over is None]
            batch = [i for i in batch if self.left[i]]
            if self.end is None and (batch or begun or waiting):
                if self.preempt_at <= self.now:
                    self.end = TurnEnd.PREEMPTED
                elif not begun and not waiting and self.now - began >= self.quota:
                    self.end = TurnEnd.QUOTA

    def held(self, batch: list[int], begun: list[Prompt], more: int = 0) -> int:
        """Blocks of the turn, after so many steps more."""
        return sum(-(-(self.kv[i] + more) // 4) for i in batch) + sum(
            -(-prompt.tokens // 4) for prompt in begun
        )


QUADRATIC = {"prefill_seconds_per_token2": 2.0**-20, "mixed_step_kv_factor": 1.5}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(2, 60)), max_size=5),
    st.lists(st.integers(1, 90), max_size=3),
    st.integers(1, 40),
    sixteenths,
    st.integers(1, 8),
    st.one_of(st.just(1e6), sixteenths),
)
def test_a_turn_in_closed_form_is_the_turn_step_by_step(
    sizes: list[tuple[int, int]],
    prompts: list[int],
    chunk: int,
    quota: float,
    cap_slabs: int,
    preempted_after: float,
) -> None:
    """Steps, end, seconds and the time of every token are the same, to the last bit; with prompts
    beside the steps and without."""
    bench = Bench([profile(**QUADRATIC)])
    lives = [bench.life(f"r{i}", p, o, produced=1) for i, (p, o) in enumerate(sizes)]
    beside = [bench.life(f"p{i}", tokens, 5) for i, tokens in enumerate(prompts)]
    bench.load()
    if lives:
        bench.move(Direction.IN, *lives, kv_slabs=32)
    bench.run(8.0)
    expected = Reference(
        kv=[p for p, _ in sizes],
        left=[o - 1 for _, o in sizes],
        prompts=[Prompt(tokens) for tokens in prompts],
        chunk=chunk,
        cap_blocks=16 * cap_slabs,
        quota=quota,
        preempt_at=8.0 + preempted_after,
    )
    order = partial(
        bench.turn, *lives, quota=quota, kv_slabs=cap_slabs, prompts=beside, chunk_tokens=chunk
    )
    assume(lives or beside)
    if not expected.run():
        with pytest.raises(LabError, match="no room"):
            order()
        return

    order()
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
    done = {event.request: at for at, event in bench.events(PrefillDone)}
    deferred = {event.request for _, event in bench.events(PrefillDeferred)}
    for life, prompt in zip(beside, expected.prompts, strict=True):
        assert done.get(life.id) == prompt.over
        assert bench.token_times(life) == ([] if prompt.over is None else [prompt.over])
        assert (life.id in deferred) == (prompt.over is None)
    held = [life.kv_tokens for life in [*lives, *beside] if life.produced and life.remaining_tokens]
    assert ended.kv_slabs == -(-sum(-(-tokens // 4) for tokens in held) // 16)
