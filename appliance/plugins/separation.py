"""Separation: how many instances of a lone model mostly prefill, so that the others can decode.

A step that computes part of a prompt has to end in time, and pays the fixed time of a step each
time. Let a mean prompt take `p` seconds, an answer have `E` tokens, and a step of n requests take
`a + b n` seconds, at most `T`; let c = 1 - a/T. N instances that do both carry

    N c / (p + 1.3 b E)

requests a second, as steps that also compute prompts read KV 1.3 times as long. P instances that
only prefill carry P / p, and D that only decode D c / (b E), or less if KV has no room for
(T - a) / b requests. What is more than either carries goes to one instance that does both.
docs/policies/appliance.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

MIXED_FACTOR = 1.3
"""How much longer decoding reads KV in steps that also compute prompts (docs/lab.md)."""
FEWEST_INSTANCES = 3
"""With two, one would prefill and one decode whatever is asked: too coarse for any load."""
GAIN = 0.15
"""To separate has to carry more than to mix by this share, and another number more than the one
there is."""
WORTH_SHARE = 0.4
"""Of what mixed instances carry has to be asked, or all are in time as they are."""
KEPT_SHARE = 0.2
"""Separated instances mix again when less is asked."""
PATIENCE = 3
"""So many observations in a row have to wish the same number."""
REST_SECONDS = 10.0
"""After a change none is made for so long: what was there before has to be done first."""


class ModelLoad(NamedTuple):
    """What a mean request takes: `prompt_seconds` (above 0), `answer_tokens` (above 0);
    `step_seconds` of a step of no request and `request_seconds` (above 0) more for each. Steps
    should take `limit_seconds` at most, `room` requests have room for their KV at a time, and a
    step has at most `most` requests."""

    prompt_seconds: float
    answer_tokens: float
    step_seconds: float
    request_seconds: float
    limit_seconds: float
    room: float
    most: float = math.inf

    def _free_share(self) -> float:
        return max(0.0, 1.0 - self.step_seconds / self.limit_seconds)

    def _answer_seconds(self) -> float:
        return MIXED_FACTOR * self.request_seconds * self.answer_tokens

    def carried_mixed(self, instances: int) -> float:
        """Requests a second if all of the instances do both."""
        by_time = self._free_share() / (self.prompt_seconds + self._answer_seconds())
        return instances * min(by_time, self._mixed_places())

    def _mixed_places(self) -> float:
        """Requests a second that a mixed instance has places for."""
        by_room = self.room / self.limit_seconds / self.answer_tokens
        if self.most == math.inf:
            return by_room
        step = self.step_seconds + MIXED_FACTOR * self.request_seconds * self.most
        each = self.answer_tokens * step + self.most * self.prompt_seconds
        return min(by_room, self.most / each)

    def _decoded(self, instances: int) -> float:
        """Requests a second that so many instances decode that do nothing else."""
        many = max(0.0, (self.limit_seconds - self.step_seconds) / self.request_seconds)
        many = min(many, self.room, self.most)
        step = self.step_seconds + self.request_seconds * many
        return instances * many / step / self.answer_tokens

    def carried_apart(self, prefill: int, instances: int) -> float:
        """Requests a second if `prefill` of the instances prefill and the others decode; the last
        one that prefills does both if that carries more."""
        decoded = self._decoded(instances - prefill)
        hard = min(prefill / self.prompt_seconds, decoded)
        return max(hard, self._carried_with_one_mixed(prefill - 1, decoded))

    def _carried_with_one_mixed(self, prefill: int, decoded: float) -> float:
        """The largest rate of which one mixed instance can do what is left of prompts and answers:
        p (rate - P / p) + 1.3 b E (rate - decoded) = c, without a part that is below zero."""
        prompt, answer, share = self.prompt_seconds, self._answer_seconds(), self._free_share()
        prompts = prefill / prompt
        both = (share + prefill + answer * decoded) / (prompt + answer)
        if both < prompts:
            both = decoded + share / answer
        elif both < decoded:
            both = prompts + share / prompt
        return min(both, decoded + self._mixed_places())

    def best(self, instances: int, known: int) -> int:
        """How many instances prefill so that the most is carried; 0 if all do both. It is the
        `known` number unless another one carries more by `GAIN`. O(instances)."""
        carried = [self.carried_mixed(instances)]
        carried += [self.carried_apart(count, instances) for count in range(1, instances)]
        if known >= instances:
            known = 0
        best = max(range(instances), key=lambda count: (carried[count], -count))
        return best if carried[best] > carried[known] * (1 + GAIN) else known


class Pressure(NamedTuple):
    """What is late: prompts that wait, or steps (or there is no room for KV)."""

    prompts: bool = False
    steps: bool = False


@dataclass(slots=True)
class Separation:
    """How many instances of one model prefill. The number begins with what `ModelLoad.best` says.
    Then it follows that, if it says much more is carried, or what is late, one at a time. It is
    thought over by observations; it changes once in `REST_SECONDS` at most."""

    prefill: int = 0
    _wish: int = 0
    _wished: int = 0
    _rests_until: float = field(default=-math.inf)

    def observe(
        self, now: float, load: ModelLoad, instances: int, rate: float, pressure: Pressure
    ) -> int:
        """How many of the instances prefill from now on, if `rate` requests a second are asked."""
        wish = self._think(load, instances, rate, pressure)
        self._wished = self._wished + 1 if wish == self._wish else 1
        self._wish = wish
        if wish != self.prefill and self._wished >= PATIENCE and now >= self._rests_until:
            self._change(now, wish)
        return self.prefill

    def mix(self, now: float) -> None:
        """All instances do both from now on."""
        if self.prefill:
            self._change(now, 0)

    def _change(self, now: float, prefill: int) -> None:
        self.prefill, self._wished = prefill, 0
        self._rests_until = now + REST_SECONDS

    def _think(self, load: ModelLoad, instances: int, rate: float, pressure: Pressure) -> int:
        known = self.prefill
        asked = KEPT_SHARE if known else WORTH_SHARE
        if instances < FEWEST_INSTANCES or rate < asked * load.carried_mixed(instances):
            return 0
        best = load.best(instances, known)
        if not known or best != known:
            return best if not known or not best else known + (1 if best > known else -1)
        if pressure.prompts == pressure.steps:
            return known
        other = known + (1 if pressure.prompts else -1)
        if not 0 < other < instances:
            return known
        loses = load.carried_apart(other, instances) * (1 + GAIN) < load.carried_apart(
            known, instances
        )
        return known if loses else other
