"""How far the difference of two policies may be off that were played on the same requests.

Both replays have the same requests, and the same mistakes of the lab: what it does wrong in both is
not in their difference. What is left is that other minutes have other requests. The jackknife says
how much that is: the difference is taken again without each part of the window in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.lab.advice.window import Score, value_of
from appliance.lab.experiments.metrics import InTime

LEAST_ERROR = 0.01
"""That two replays differ in the last digit does not mean that the next minutes will."""


def difference_error(current: Sequence[Score], other: Sequence[Score], requests: int) -> float:
    """The standard error of how far the other policy is ahead in the mean of replays, but never
    less than `LEAST_ERROR`, or two of so many `requests`; replay k of both is of the same window.
    NaN if fewer than two parts of the window have anything in them."""
    parts = len(current[0].parts)
    used = [k for k in range(parts) if any(one.parts[k].requests for one in (*current, *other))]
    if len(used) < 2:
        return math.nan
    without = [
        math.fsum(
            value_of(_but(mine.parts, k)) - value_of(_but(theirs.parts, k))
            for theirs, mine in zip(current, other, strict=True)
        )
        / len(current)
        for k in used
    ]
    mean = math.fsum(without) / len(without)
    squares = math.fsum((one - mean) ** 2 for one in without)
    standard_error = math.sqrt((len(without) - 1) / len(without) * squares)
    return max(standard_error, LEAST_ERROR, 2 / requests)


def _but(parts: Sequence[InTime], left_out: int) -> list[InTime]:
    return [part for k, part in enumerate(parts) if k != left_out]
