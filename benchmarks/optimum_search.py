"""The most tokens in time that any policy can reach on a tiny box: a best-first search.

A state is a slot, the tokens of every request, and what each instance is at. Decisions are made
where something ends or arrives: compute the prompts of a model, decode it, load it, or wait. The
search counts tokens that are too late. It goes on from the state that has lost the least, together
with what each request will lose even if it has the box to itself. So the first state in which no
token is left to be due has lost the least of all.

It is a bound for the lab, as every job there takes at least as long and everything arrives at whole
slots: moved to the left, the schedule of any policy begins its jobs at ends and arrivals. Where the
search has it easier than the lab, that can only make the bound higher:

- A step has all requests of its model, wherever their KV is. KV moves in no time and takes no room.
- The length of each answer and all arrivals are known.
- A prompt that is computed under its own load ends with the load (in the lab, a layer later), and
  if it ends after the load, those that had arrived before it end with it.
- A request may be in jobs of two instances at once, but gets one token per slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from benchmarks.tiny_boxes import TinyBox

Tokens = tuple[int, ...]
NONE = -1


class Instance(NamedTuple):
    """What an instance is at; models by number. Times are slots at which something ends."""

    here: frozenset[int] = frozenset()
    """Models whose weights are there."""
    loads: int = NONE
    loaded_at: int = 0
    runs: int = NONE
    """The model of its job."""
    prompts: bool = False
    """Whether the job computes prompts, too."""
    done_at: int = 0


class State(NamedTuple):
    """At a slot, after what ended there."""

    slot: int
    tokens: Tokens
    instances: tuple[Instance, ...]


@dataclass(frozen=True)
class Optimum:
    """What a search found."""

    lost: int
    """Tokens that are too late, or never come, whatever is decided."""
    states: int
    """That were gone through."""
    is_exact: bool
    """Whether decisions that lose no more were found; else no policy loses less, perhaps none so
    little."""


def least_lost(box: TinyBox, most_states: int = 200_000) -> Optimum:
    """Search the box, through `most_states` states at most."""
    search = _Search(box)
    begin = State(0, (0,) * len(box.requests), (Instance(),) * box.instances)
    heap = [(search.will_lose(begin), 0, 0, begin)]
    best = {begin: 0}
    entries = states = 0
    while heap:
        bound, _, lost, state = heapq.heappop(heap)
        if best[state] < lost:
            continue
        states += 1
        if search.is_over(state):
            return Optimum(lost, states, is_exact=True)
        if states == most_states:
            return Optimum(bound, states, is_exact=False)
        for following in search.after(state):
            more = lost + search.loses(state, following.slot)
            if more < best.get(following, more + 1):
                best[following] = more
                entries -= 1
                heapq.heappush(heap, (more + search.will_lose(following), entries, more, following))
    raise AssertionError("a state in which nothing is left to be due is always reached")


class _Search:
    def __init__(self, box: TinyBox) -> None:
        self._box = box
        self._requests = box.requests
        self._models = box.models
        self._arrivals = sorted({request.arrives for request in box.requests})
        self._end = 1 + max(box.due(one, one.tokens - 1) for one in box.requests)

    def is_over(self, state: State) -> bool:
        """Whether no token is left that could be in time."""
        return state.slot >= self._end or all(
            done == one.tokens for done, one in zip(state.tokens, self._requests, strict=True)
        )

    def loses(self, state: State, slot: int) -> int:
        """Tokens whose due slots pass from the state's slot to this one, with nothing done."""
        lost = 0
        for number, done in enumerate(state.tokens):
            before = max(done, self._due_before(number, state.slot))
            lost += max(0, self._due_before(number, slot) - before)
        return lost

    def _due_before(self, number: int, slot: int) -> int:
        """How many of the request's tokens have due slots before this one."""
        one = self._requests[number]
        first, between = self._box.due(one, 0), self._models[one.model].tbt
        if slot <= first:
            return 0
        return min(one.tokens, (slot - 1 - first) // between + 1)

    def will_lose(self, state: State) -> int:
        """The least that is still lost: of each request, if it has a box of its own."""
        lost = 0
        for number, done in enumerate(state.tokens):
            one = self._requests[number]
            if done == one.tokens:
                continue
            at = self._next_token(state, number, done)
            first, between = self._box.due(one, 0), self._models[one.model].tbt
            passed = max(done, self._due_before(number, state.slot))
            # Token k comes at `at + k - done` at best, and is late after `first + k * between`.
            behind = at - done - first
            late = -(-behind // (between - 1)) if behind > 0 else 0
            lost += max(0, min(one.tokens, late) - passed)
        return lost

    def _next_token(self, state: State, number: int, done: int) -> int:
        """When the request's next token comes at the earliest."""
        one = self._requests[number]
        model, now = self._models[one.model], max(state.slot, one.arrives)
        found = []
        for at in state.instances:
            if at.runs == one.model:
                found.append(max(now, at.done_at))
            if one.model in at.here:
                free = max(now, at.done_at) if at.runs != NONE else now
                found.append(free + (1 if done else model.prompt))
            elif at.loads == one.model:
                found.append(max(now, at.loaded_at + (1 if done else 0)))
            else:
                found.append(max(now, state.slot + model.load + (1 if done else 0)))
        return min(found)

    # --- what follows ----------------------------------------------------------------------------

    def after(self, state: State) -> Iterator[State]:
        """The states that decisions lead to, each at the next slot at which something ends, or
        arrives while an instance waits."""
        choices = [list(self._choices(state, at)) for at in state.instances]
        for chosen in product(*choices):
            times = [at.done_at for at in chosen if at.runs != NONE]
            times += [at.loaded_at for at in chosen if at.loads != NONE]
            if any(at.runs == NONE for at in chosen):
                times += [slot for slot in self._arrivals if slot > state.slot][:1]
            yield from self._ended(state, chosen, min(times, default=self._end))

    def _choices(self, state: State, at: Instance) -> Iterator[Instance]:
        """What an instance may begin with now."""
        if self._box.all_fit and at.loads == NONE and len(at.here) < len(self._models):
            # Weights that are there never hurt: the link goes on until all are.
            for model in range(len(self._models)):
                if model not in at.here:
                    ends = state.slot + self._models[model].load
                    yield from self._jobs(state, at._replace(loads=model, loaded_at=ends))
            return
        yield from self._jobs(state, at)
        if not self._box.all_fit and at.runs == NONE and at.loads == NONE:
            for model, times in enumerate(self._models):
                if model not in at.here and self._asked(state, model):
                    ends = state.slot + times.load
                    yield Instance(loads=model, loaded_at=ends)

    def _jobs(self, state: State, at: Instance) -> Iterator[Instance]:
        yield at  # the job goes on, or the instance waits
        if at.runs != NONE:
            return
        for model in at.here:
            waiting = active = False
            for one, done in zip(self._requests, state.tokens, strict=True):
                if one.model == model and done < one.tokens and one.arrives <= state.slot:
                    waiting, active = waiting or not done, active or done > 0
            if active:
                yield at._replace(runs=model, prompts=False, done_at=state.slot + 1)
            if waiting:
                ends = state.slot + self._models[model].prompt
                yield at._replace(runs=model, prompts=True, done_at=ends)

    def _asked(self, state: State, model: int) -> bool:
        """Whether the model has requests that are not done, or will have."""
        return any(
            one.model == model and done < one.tokens
            for one, done in zip(self._requests, state.tokens, strict=True)
        )

    def _ended(self, state: State, chosen: tuple[Instance, ...], slot: int) -> Iterator[State]:
        """What ends at the slot; of the prompts that wait for a load, one may be under way."""
        tokens = list(state.tokens)
        ways = []
        for at in chosen:
            was_free = at.runs == NONE
            if not was_free and at.done_at == slot:
                self._compute(state, at, tokens)
                at = at._replace(runs=NONE, prompts=False, done_at=0)
            if at.loads != NONE and at.loaded_at == slot:
                model = at.loads
                at = at._replace(here=at.here | {model}, loads=NONE, loaded_at=0)
                ways.append(
                    [(at, NONE), *(self._under_load(state, at, model, slot) if was_free else ())]
                )
            else:
                ways.append([(at, NONE)])
        for way in product(*ways):
            then = list(tokens)
            for _, number in way:
                if number != NONE:
                    then[number] = 1
            instances = sorted((at for at, _ in way), key=lambda at: (sorted(at.here), *at[1:]))
            yield State(slot, tuple(then), tuple(instances))

    def _under_load(
        self, state: State, at: Instance, model: int, slot: int
    ) -> Iterator[tuple[Instance, int]]:
        """With which prompt the instance may have begun while its weights came: it is done now,
        or the instance goes on with it."""
        for number, one in enumerate(self._requests):
            if one.model == model and not state.tokens[number] and one.arrives <= slot:
                ends = one.arrives + self._models[model].prompt
                if ends <= slot:
                    yield at, number
                else:
                    yield at._replace(runs=model, prompts=True, done_at=ends), NONE

    def _compute(self, state: State, at: Instance, tokens: list[int]) -> None:
        """A token for each request of the job: those that decode, and prompts that had arrived
        when it began."""
        began = at.done_at - self._models[at.runs].prompt
        for number, one in enumerate(self._requests):
            done = state.tokens[number]
            if one.model != at.runs or done == one.tokens:
                continue
            if done or (at.prompts and one.arrives <= began):
                tokens[number] = done + 1
