"""Separation: how many instances of a lone model mostly prefill, so that the others can decode.

A step that computes part of a prompt has to end in time, and pays the fixed time of a step each
time. Let a mean prompt take `p` seconds, an answer have `E` tokens, and a step of n requests take
`a + b n` seconds, at most `T`; let c = 1 - a/T. N instances that do both carry

    N c / (p + 1.3 b E)

requests a second, as steps that also compute prompts read KV 1.3 times as long. P instances that
only prefill carry P / p, and D that only decode D c / (b E), or less if KV has no room for
(T - a) / b requests. KV that moves takes the link k seconds, for which those wait that decode: they
carry D c / (b E + k). What is more than either carries goes to one instance that does both.
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
GAIN = 0.1
"""To separate has to carry more than to mix by this share, and another number more than the one
there is."""
WORTH_SHARE = 0.4
"""Of what mixed instances carry has to be asked, or all are in time as they are."""
KEPT_SHARE = 0.2
"""Separated instances mix again when less is asked."""
KEPT_GAIN = 0.05
"""Separated instances mix again if they carry no more than this share more than mixed ones."""
LINK_SHARE = 0.7
"""Of its time that the link of an instance may be busy with KV: it comes in bursts, and what comes
together waits for all of it."""
SLOW_SHARE = 0.05
"""If KV takes the link for more than this share of the time of its prompt, no instance is counted
on to do both: what stays, as it does not fit elsewhere, would soon have to move, too."""
LEAST_ROOM = 8.0
"""Requests that an instance has room for. With less, no P fits what chance brings: the room of
those that prefill is lost to decoding, and few share a step as it is."""
PATIENCE = 3
"""So many observations in a row have to wish the same number."""
REST_SECONDS = 10.0
"""After a change none is made for so long: what was there before has to be done first."""


class ModelLoad(NamedTuple):
    """What a mean request takes: `prompt_seconds` (above 0), `answer_tokens` (above 0);
    `step_seconds` of a step of no request and `request_seconds` (above 0) more for each. Steps
    should take `limit_seconds` at most, `room` requests have room for their KV at a time, and a
    step has at most `most` requests. Its KV takes the link `kv_seconds` to leave an instance, and
    as long to come to another one. Tokens should come each `target_seconds` in the mean."""

    prompt_seconds: float
    answer_tokens: float
    step_seconds: float
    request_seconds: float
    limit_seconds: float
    room: float
    most: float = math.inf
    kv_seconds: float = 0.0
    target_seconds: float = math.inf

    def carried_mixed(self, instances: int) -> float:
        """Requests a second if all of the instances do both."""
        return instances * self._carried_by_one(0.0, 0.0)

    def _carried_by_one(self, prefilled: float, decoded: float) -> float:
        """The largest rate of which one instance can do what is left of prompts and answers, where
        others do as much as that: steps take the longest time, and have no more requests than
        there are places."""
        places = max(1.0, min(self.room, self.most))
        reading = MIXED_FACTOR * self.request_seconds
        free = max(0.0, 1.0 - self.step_seconds / self.limit_seconds)
        by_time = self._rate(free, reading, prefilled, decoded)
        by_places = self._rate(1.0, self.step_seconds / places + reading, prefilled, decoded)
        return min(by_time, by_places)

    def _rate(self, share: float, token: float, prefilled: float, decoded: float) -> float:
        """p (rate - prefilled) + token E (rate - decoded) = share, without a part below zero."""
        prompt, answer = self.prompt_seconds, token * self.answer_tokens
        both = (share + prompt * prefilled + answer * decoded) / (prompt + answer)
        if both < prefilled:
            return decoded + share / answer
        if both < decoded:
            return prefilled + share / prompt
        return both

    @property
    def arrival_seconds(self) -> float:
        """By how much steps are longer, in the mean, for each request that decodes where steps wait
        for KV that comes."""
        return self.kv_seconds / LINK_SHARE / self.answer_tokens

    @property
    def decode_limit_seconds(self) -> float:
        """The longest step where others prefill. Before the second token of a request its KV
        leaves, which is noticed after the next prompt, and comes: other tokens make up for that."""
        away = (2 * self.kv_seconds / LINK_SHARE + self.prompt_seconds) / self.answer_tokens
        return min(self.limit_seconds, self.target_seconds - away)

    def _prefilled(self, instances: int) -> float:
        """Requests a second that so many instances prefill that do nothing else."""
        return instances / max(self.prompt_seconds, self.kv_seconds / LINK_SHARE)

    def _decoded(self, instances: int) -> float:
        """Requests a second that so many instances decode that do nothing else."""
        each = self.request_seconds + self.arrival_seconds
        many = max(0.0, (self.decode_limit_seconds - self.step_seconds) / each)
        many = min(many, self.room, self.most)
        step = self.step_seconds + each * many
        return instances * many / step / self.answer_tokens if many else 0.0

    def carried_apart(self, prefill: int, instances: int) -> float:
        """Requests a second if `prefill` of the instances prefill and the others decode; the last
        one that prefills does both if that carries more, and links are fast. 0 if no request could
        decode elsewhere in time."""
        decoded = self._decoded(instances - prefill)
        hard = min(self._prefilled(prefill), decoded)
        if not decoded or self.kv_seconds > SLOW_SHARE * self.prompt_seconds:
            return hard
        return max(hard, self._carried_by_one(self._prefilled(prefill - 1), decoded))

    def best(self, instances: int, known: int) -> int:
        """How many instances prefill; 0 if all do both. It is the `known` number unless another
        one carries more by `GAIN`; then the fewest that carry hardly less than the most, as those
        that decode can compute prompts in chunks. 0, too, if no other carries more
        than it by `KEPT_GAIN`, or there is little room. O(instances)."""
        carried = [self.carried_mixed(instances)]
        carried += [self.carried_apart(count, instances) for count in range(1, instances)]
        if known >= instances:
            known = 0
        most = max(carried)
        if self.room < LEAST_ROOM or most <= carried[0] * (1 + KEPT_GAIN):
            return 0
        if most <= carried[known] * (1 + GAIN):
            return known
        return next(count for count, rate in enumerate(carried) if rate * (1 + GAIN) >= most)


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
