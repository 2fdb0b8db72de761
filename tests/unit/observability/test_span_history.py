"""Spans of the last half hour: all of them are found again, page by page, and memory is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observability.span_history import (
    BLOCK_BYTES,
    BLOCK_SPANS,
    KEPT_SECONDS,
    MOST_BYTES,
    PAGE_SPANS,
    SpanHistory,
)
from appliance.observability.timeline import MOST_REQUESTS
from appliance.service.interface import Decision, Span, SpanKind

NOW = 1_700_000_000.0


def turn(number: int, began: float, seconds: float = 0.05, requests: int = 2) -> Span:
    return Span(
        number=number,
        instance=number % 2,
        kind=SpanKind.TURN,
        model="ab"[number % 2],
        began_unix_seconds=began,
        ended_unix_seconds=began + seconds,
        outcome="quota",
        requests=tuple(f"chatcmpl-{number * 7919 + place:032x}" for place in range(requests)),
        quota_seconds=0.05,
        steps=1,
        decision=Decision(after="TurnEnded", hook="round", policy="x", plan=(("b", None),)),
    )


def read(history: SpanHistory, since: float = 0.0, until: float = math.inf) -> list[Span]:
    """All pages, the oldest span first."""
    found: list[Span] = []
    before: int | None = None
    while True:
        page = history.page(since, until, before)
        assert len(page.spans) <= PAGE_SPANS
        found = [*page.spans, *found]
        if page.before is None:
            return found
        assert before is None or page.before < before
        before = page.before


@pytest.mark.parametrize("count", [0, 1, BLOCK_SPANS, 3 * PAGE_SPANS + 1])
def test_what_was_added_is_found(count: int) -> None:
    """As it was, each once, however many pages that takes."""
    history = SpanHistory()
    spans = [turn(number, NOW + number / 100) for number in range(count)]
    for span in spans:
        history.add(span)

    assert read(history) == spans
    assert history.page(0.0, math.inf).kept_since_unix_seconds is None


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 90)), max_size=4 * BLOCK_SPANS),
    st.floats(0, 600),
    st.floats(0, 100),
)
def test_a_window_has_what_overlaps_it(
    times: list[tuple[float, float]], since: float, seconds: float
) -> None:
    """Also spans that began long before it, and those that ended long after."""
    history = SpanHistory()
    ended = sorted(times, key=sum)
    spans = [turn(number, began, length) for number, (began, length) in enumerate(ended)]
    for span in spans:
        history.add(span)
    until = since + seconds

    found = {span.number for span in read(history, since, until)}
    assert found == {
        span.number
        for span in spans
        if span.began_unix_seconds <= until and (span.ended_unix_seconds or 0.0) >= since
    }


def test_what_is_old_is_dropped() -> None:
    """After half an hour, a block at a time; the page says how far back it goes."""
    history = SpanHistory()
    for number in range(4000):
        history.add(turn(number, NOW + number))
    found = read(history)

    oldest = found[-1].began_unix_seconds - KEPT_SECONDS
    assert oldest - 2 * BLOCK_SPANS <= found[0].began_unix_seconds <= oldest
    kept_since = history.page(0.0, math.inf).kept_since_unix_seconds
    assert kept_since is not None
    assert found[0].began_unix_seconds - 1 <= kept_since <= found[0].began_unix_seconds


@pytest.mark.parametrize("most_bytes", [0, 50_000, 100_000])
def test_memory_is_bounded(most_bytes: int) -> None:
    """However large spans are; the newest are kept."""
    history = SpanHistory(most_bytes)
    count = 20 * BLOCK_SPANS + 5
    for number in range(count):
        history.add(turn(number, NOW + number / 100, requests=MOST_REQUESTS))
        assert history.nbytes <= most_bytes
    found = [span.number for span in read(history)]

    assert found == list(range(count - len(found), count))
    assert 5 <= len(found) < count
    assert len(found) > BLOCK_SPANS or most_bytes < 2 * BLOCK_BYTES


def test_half_an_hour_of_short_turns_fits() -> None:
    """Of two instances that switch every 50 ms, as policies do at most: 72,000 spans."""
    history = SpanHistory()
    spans = [turn(number, NOW + number / 40) for number in range(BLOCK_SPANS)]
    for span in spans:
        history.add(span)
    blocks = KEPT_SECONDS * 40 / BLOCK_SPANS

    assert history.nbytes * blocks < MOST_BYTES
