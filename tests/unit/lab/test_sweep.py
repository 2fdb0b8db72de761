"""The search for the largest load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.experiments.sweep import search


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_it_finds_the_largest_that_is_enough(start: int, most: int, capacity: int) -> None:
    """In few tries, each of another load, none over the most."""
    tries = search(start, most, 0.9)
    tried = []
    try:
        load = next(tries)
        while True:
            tried.append(load)
            load = tries.send(0.95 if load <= capacity else 0.5)
    except StopIteration as end:
        found = end.value

    assert found == min(capacity, most)
    assert len(tried) == len(set(tried)) <= 20
    assert all(1 <= load <= most for load in tried)
