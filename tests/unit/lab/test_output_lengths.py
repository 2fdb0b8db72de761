"""The likely lengths of answers that had not ended."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.replay.output_lengths import OutputLengths

tokens = st.lists(st.integers(0, 50), max_size=30)


def test_answers_that_all_ended_have_their_mean() -> None:
    """Of those that are longer than what there is."""
    lengths = OutputLengths([10, 20, 30, 40], [])
    assert [lengths.expected(made) for made in (0, 10, 25, 39, 40, 90)] == [25, 30, 35, 40, 40, 90]


def test_an_answer_under_way_counts_as_longer() -> None:
    """The one that was open at 15 is shared by those that are longer: 10 has a quarter, 20 and 30
    have three eighths each."""
    assert OutputLengths([10, 20, 30], []).expected(0) == 20
    assert OutputLengths([10, 20, 30], [15]).expected(0) == round(10 / 4 + (3 / 8) * 50)
    assert OutputLengths([10, 20, 30], [15]).expected(15) == 25


def test_waiting_requests_say_nothing() -> None:
    """However many have no token yet."""
    alone, queued = OutputLengths([10, 30], []), OutputLengths([10, 30], [0] * 100)
    assert alone.expected(0) == queued.expected(0) == 20


def test_the_longest_counts_as_ended() -> None:
    """Nothing is known beyond it."""
    lengths = OutputLengths([10], [50])
    assert lengths.expected(0) == 30
    assert lengths.expected(20) == lengths.expected(50) == 50


def test_without_answers_nothing_is_known() -> None:
    assert OutputLengths([], []).expected(7) == 7


def test_long_answers_that_are_open_are_not_forgotten() -> None:
    """Of lengths with a mean of 100, seen while most of the long ones are under way, the mean of
    those that ended is far less, and the estimate is right."""
    draw = random.Random(1)
    lengths = [1 + int(draw.expovariate(1 / 100)) for _ in range(4000)]
    seen = [draw.randrange(1, 300) for _ in lengths]
    ended = [n for n, limit in zip(lengths, seen, strict=True) if n <= limit]
    unended = [limit for n, limit in zip(lengths, seen, strict=True) if n > limit]
    assert sum(ended) / len(ended) < 75
    assert 92 < OutputLengths(ended, unended).expected(0) < 105
    assert 185 < OutputLengths(ended, unended).expected(100) < 212


@given(tokens, tokens, st.integers(0, 60))
def test_what_is_expected_is_possible(ended: list[int], unended: list[int], made: int) -> None:
    """At least what there is, and no more than the longest."""
    found = OutputLengths(ended, unended).expected(made)
    assert made <= found <= max([made, *ended, *unended])
