"""Decoding in closed form: how many steps go by before anything can change.

A *stretch* is steps of one batch. Every request's KV grows by a token in each, so step times form
an arithmetic series: the first takes `first` seconds, each of the others `growth` more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.vocabulary import KvShape


def elapsed(first: float, growth: float, steps: int) -> float:
    """Seconds that the first `steps` steps take together."""
    return steps * first + growth * (steps * (steps - 1) / 2)


def steps_until(seconds: float, first: float, growth: float) -> int:
    """The least number of steps, at least one, that take `seconds` or longer."""
    if seconds <= first:
        return 1
    if growth * seconds < 1e-9 * first * first:
        guess = seconds / first
    else:
        linear = first - growth / 2
        guess = (math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth
    steps = max(1, math.ceil(guess))
    # The guess is rounded; the answer is what `elapsed` says.
    while elapsed(first, growth, steps) < seconds:
        steps += 1
    while steps > 1 and elapsed(first, growth, steps - 1) >= seconds:
        steps -= 1
    return steps


def steps_in_room(kv_tokens: Sequence[int], shape: KvShape, blocks: int, limit: int) -> int:
    """The most steps, up to `limit`, after which the requests' KV fits in `blocks` blocks.
    O(requests · log limit)."""

    def fits(steps: int) -> bool:
        return sum(shape.blocks(tokens + steps) for tokens in kv_tokens) <= blocks

    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
