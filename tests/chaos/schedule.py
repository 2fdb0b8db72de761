"""Which disturbance comes when: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LEAST, MOST = 0.5, 1.5
"""Times of the mean gap that a gap has."""


@dataclass(frozen=True)
class Disturbance:
    """One of a kind. `at_seconds` counts from the beginning; `seed` is of what is left to chance
    in it."""

    at_seconds: float
    kind: str
    seed: int


def schedule(
    seed: int, seconds: float, kinds: Sequence[str], every_seconds: float
) -> list[Disturbance]:
    """Disturbances for so long, `every_seconds` on average. Kinds come in turns, each turn in an
    order of its own: every kind has come once before one comes again. O(number of disturbances)."""
    dice = random.Random(f"{seed} schedule")
    found: list[Disturbance] = []
    left: list[str] = []
    at = 0.0
    while kinds:
        at += every_seconds * dice.uniform(LEAST, MOST)
        if at >= seconds:
            break
        if not left:
            left = dice.sample(list(kinds), len(kinds))
            if found and left[-1] == found[-1].kind:  # not twice in a row
                left.reverse()
        found.append(Disturbance(round(at, 1), left.pop(), dice.randrange(1 << 32)))
    return found
