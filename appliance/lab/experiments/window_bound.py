"""A bound for every policy, with batches as large as arrivals allow: the least time that GPUs need.

A linear program: a step at some moment serves a token of each request of its model at most, each
token in time has a step of its own between its request's arrival and its due time, and the share
that has to be in time is chosen. As in `lower_bound`, prompts are computed in steps that run
anyway, weights are in place, memory never ends, and GPUs are never in each other's way.

The program is bounded by its dual. A step of n requests takes at least `fixed + n * each` seconds.
The fixed part is divided among tokens by prices, such that prices of tokens that could be in the
same step add up to one at most. Then the tokens that are in time take at least what their prices
add up to, so at least what the cheapest tokens of that number take. Any such prices give a bound.
Good ones are averages of *chains*: requests one after the other, each with its tokens up to some
due time before the next one arrives, have the price 1. The next chain is the one that adds most
to the tokens that are the cheapest by the average so far (Frank and Wolfe's algorithm). Where
batches are as large as a model may have them, the same price for all tokens is better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.lab.experiments.run import Setting
from appliance.lab.hardware import ModelProfile
from appliance.lab.workload import Arrival
from appliance.vocabulary import ModelSpec

Floats = NDArray[np.float64]

ROUNDS = 20
"""Chains that are averaged; more of them make the bound tighter by less and less."""


def least_work_seconds(
    setting: Setting,
    share: float = 1.0,
    *,
    since_seconds: float = 0.0,
    whole_requests: bool = False,
) -> float:
    """Seconds that instances compute at least, all together, so that `share` of the tokens are in
    time; of the requests that arrive from `since_seconds` on, those tokens that are due by the end.

    With `whole_requests` it is a share of the requests whose last token is due by the end: first
    token and mean time between tokens. O(rounds · tokens log tokens).
    """
    specs = {spec.name: spec for spec in setting.models}
    asked: dict[str, list[Arrival]] = defaultdict(list)
    for one in setting.arrivals:
        if one.seconds >= since_seconds:
            asked[one.model].append(one)
    found = [
        _Model(its, specs[name], setting.profiles[name], setting.seconds, whole_requests)
        for name, its in asked.items()
    ]
    found = [model for model in found if len(model.company)]
    if not found:
        return 0.0
    chains = [model.company / model.max_batch for model in found]  # no step has more than that
    best = 0.0
    for done in range(ROUNDS):
        prices = np.concatenate([m.prices(chain) for m, chain in zip(found, chains, strict=True)])
        counted = math.ceil(share * len(prices) - 1e-9)
        cheapest = np.argsort(prices, kind="stable")[:counted]
        best = max(best, float(prices[cheapest].sum()))
        counts = np.zeros(len(prices))
        counts[cheapest] = 1.0
        ends = np.cumsum([model.units for model in found])
        parts = np.split(counts, ends[:-1])
        for number, (model, part) in enumerate(zip(found, parts, strict=True)):
            chains[number] += (model.best_chain(part) - chains[number]) / (done + 1)
    return best


class _Model:
    """The requests of one model, and their tokens in a row that are due by the end.

    A *unit* is what may be left out: a token, or a request.
    """

    def __init__(
        self,
        requests: Sequence[Arrival],
        spec: ModelSpec,
        profile: ModelProfile,
        until: float,
        whole_requests: bool,
    ) -> None:
        self._whole = whole_requests
        self.max_batch = spec.max_batch
        dues = [_dues(one, spec) for one in requests]
        if whole_requests:
            kept = [n for n, due in enumerate(dues) if due[-1] <= until]
            requests, dues = [requests[n] for n in kept], [dues[n] for n in kept]
        begins = np.array([one.seconds for one in requests])
        works, self._ends, self._nexts = [], [], []
        lengths = []
        for number, (one, due) in enumerate(zip(requests, dues, strict=True)):
            works.append(_own_work(one, profile)[: np.searchsorted(due, until, side="right")])
            due = due[: len(works[-1])]
            lengths.append(len(due))
            last = due[-1] if len(due) else one.seconds
            after = int(np.searchsorted(begins, last, side="right"))
            # Tokens due before the next ones arrive, and all of them.
            before = np.searchsorted(due, begins[number + 1 : after], side="left")
            self._ends.append(np.append(before, len(due)))
            self._nexts.append(np.arange(number + 1, max(after, number + 1) + 1))
        self._offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.company = np.ones(int(self._offsets[-1]))
        """1 of each token that needs a step; the first comes with the prompt."""
        self.company[self._offsets[:-1][np.array(lengths, dtype=np.int64) > 0]] = 0.0
        self._work = np.concatenate([*works, np.zeros(0)])
        self._fixed_seconds = profile.step_base_seconds
        self.units = len(lengths) if whole_requests else len(self.company)

    def prices(self, chain: Floats) -> Floats:
        """The least work of each unit, at these prices of the fixed part of steps."""
        each = self._work + self._fixed_seconds * chain * self.company
        return np.add.reduceat(each, self._offsets[:-1]) if self._whole else each

    def best_chain(self, counts: Floats) -> Floats:
        """The chain whose tokens are worth most, where a unit counts so much. O(requests at once ·
        requests)."""
        each = np.repeat(counts, np.diff(self._offsets)) if self._whole else counts
        worth = np.concatenate([[0.0], np.cumsum(each * self.company)])
        requests = len(self._ends)
        best, chosen = np.zeros(requests + 1), np.full(requests, -1)
        for number in range(requests - 1, -1, -1):
            offset = self._offsets[number]
            # Of a request that counts as a whole, a token may be late: its window is the whole.
            begin = -1 if self._whole else 0
            ends, nexts = self._ends[number][begin:], self._nexts[number][begin:]
            values = worth[offset + ends] - worth[offset] + best[nexts]
            way = int(values.argmax())
            best[number] = best[number + 1]
            if values[way] > best[number]:
                best[number], chosen[number] = values[way], way
        chain, number = np.zeros(len(self.company)), 0
        while number < requests:
            if chosen[number] < 0:
                number += 1
                continue
            begin = -1 if self._whole else 0
            offset, way = self._offsets[number], chosen[number]
            chain[offset : offset + self._ends[number][begin:][way]] = 1.0
            number = int(self._nexts[number][begin:][way])
        return chain


def _dues(one: Arrival, spec: ModelSpec) -> Floats:
    """When each of the request's tokens is due."""
    slo = one.slo or spec.slo_for(one.request_class)
    first = one.seconds + slo.ttft_seconds
    return np.asarray(first + slo.tbt_seconds * np.arange(one.output_tokens), dtype=np.float64)


def _own_work(one: Arrival, profile: ModelProfile) -> Floats:
    """What each token takes whatever else is in its step: its row, its KV, a part of the prompt,
    which is computed in chunks too small for a knee."""
    token = np.arange(one.output_tokens)
    row = profile.step_seconds_per_sequence
    row += profile.step_seconds_per_tile / profile.step_tile_sequences
    reading = profile.step_seconds_per_kv_token * (one.prompt_tokens + token - 1)
    prompt = profile.prefill_seconds_per_token * one.prompt_tokens
    prompt += profile.prefill_seconds_per_token2 * one.prompt_tokens**2
    work = np.where(token > 0, row + reading, 0.0) + prompt / one.output_tokens
    return np.asarray(work, dtype=np.float64)
