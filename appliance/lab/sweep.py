"""The largest load under which a policy still keeps its promises, by bisection.

A load is a whole number of steps. That more load is never better is assumed, as it is wherever a
"maximum load" is named: where attainment is not monotone, the answer is one crossing of it.
"""

from __future__ import annotations

from collections.abc import Generator

Search = Generator[int, float, int]
"""Yields loads to try, is sent what each attained, and returns the largest that was enough."""


def search(start: int, most: int, target: float) -> Search:
    """From `start` steps of load up or down to the largest, at most `most`, that attains `target`;
    0 if none does. O(log) tries."""
    good, bad = 0, most + 1
    load = min(start, most)
    while bad - good > 1:
        attained = yield load
        if attained >= target:
            good = load
        else:
            bad = load
        # Double until something is too much; then halve what is left.
        load = min(2 * good, most) if bad > most else (good + bad) // 2
    return good
