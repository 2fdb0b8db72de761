"""Limits of a key: what a minute holds, debts, and requests at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access.keys import Key
from appliance.access.rate_limits import Bucket, LimitRefusal, Meter


def key(**limits: Any) -> Key:
    return Key(name="k", sha256="0" * 64, created_seconds=0.0, **limits)


def test_a_bucket_gives_a_minute_at_once_and_then_fills() -> None:
    """Sixty a minute are one a second."""
    bucket = Bucket(60, 0.0)

    assert bucket.wait_seconds(60, 0.0) == 0.0
    assert bucket.take(60, 0.0) == 60
    assert bucket.remaining(0.0) == 0
    assert bucket.wait_seconds(2, 0.5) == pytest.approx(1.5)
    assert bucket.wait_seconds(2, 2.0) == 0.0
    assert bucket.full_in_seconds(2.0) == pytest.approx(58.0)
    assert bucket.remaining(1000.0) == 60


def test_more_than_a_bucket_holds_needs_a_full_one() -> None:
    """It is served, once everything is there; the excess delays later requests."""
    bucket = Bucket(60, 0.0)
    bucket.take(1, 0.0)

    assert bucket.wait_seconds(1000, 0.0) == pytest.approx(1.0)
    taken = bucket.take(1000, 1.0)
    assert taken == 60
    bucket.settle(90 - taken, 1.0)
    assert bucket.remaining(1.0) == 0
    assert bucket.wait_seconds(1, 1.0) == pytest.approx(31.0)


def test_what_was_not_needed_comes_back() -> None:
    """Never more than it holds."""
    bucket = Bucket(60, 0.0)
    bucket.settle(10 - bucket.take(50, 0.0), 0.0)
    assert bucket.remaining(0.0) == 50
    bucket.settle(-1000, 0.0)
    assert bucket.remaining(0.0) == 60


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000), st.floats(0, 1.5)), max_size=60),
)
def test_no_more_is_given_than_the_rate_allows(
    per_minute: int, asked: list[tuple[float, int, float]]
) -> None:
    """Whatever is asked and settled: in any time that begins full, at most a bucket and what ran
    in, and one request's excess over its reservation; a wait that is told is long enough."""
    bucket, now, used, excess = Bucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for gap, amount, share in asked:
        now += gap
        if wait := bucket.wait_seconds(amount, now):
            now += wait
            assert bucket.wait_seconds(amount, now) == 0.0
        reserved = bucket.take(amount, now)
        came_to = amount * share
        bucket.settle(came_to - reserved, now)
        excess = max(excess, came_to - reserved)
        used += came_to
        assert used <= per_minute * (1 + now / 60) + excess + 1e-3
        assert 0 <= bucket.remaining(now) <= per_minute


def test_a_meter_without_limits_refuses_nothing() -> None:
    """It only counts who is there."""
    meter = Meter(key(), 0.0)

    assert [meter.begin(0.0) for _ in range(1000)] == [None] * 1000
    assert meter.live == 1000
    assert meter.reserve(10**9, 0.0) == 0.0
    meter.settle(0.0, 10**9, 0.0)


def test_each_limit_is_named() -> None:
    """With its bound, and how long to wait; a request that is refused counts for nothing."""
    busy = Meter(key(concurrency=1, requests_per_minute=100), 0.0)
    often = Meter(key(requests_per_minute=1), 0.0)
    long = Meter(key(tokens_per_minute=60), 0.0)
    for meter in (busy, often):
        assert meter.begin(0.0) is None
    assert long.reserve(50, 0.0) == 50

    assert busy.begin(0.0) == LimitRefusal("concurrency", 1, 1.0)
    assert often.begin(30.0) == LimitRefusal("requests", 1, pytest.approx(30.0))
    assert long.reserve(20, 0.0) == LimitRefusal("tokens", 60, pytest.approx(10.0))
    assert busy.requests is not None
    assert busy.requests.remaining(0.0) == 99
    busy.end()
    assert busy.begin(0.0) is None
    long.settle(50, 5, 0.0)
    assert long.reserve(20, 0.0) == 20


def test_changed_limits_begin_anew_and_others_go_on() -> None:
    """Who is there is still counted."""
    meter = Meter(key(requests_per_minute=10, tokens_per_minute=10), 0.0)
    meter.begin(0.0)
    meter.reserve(10, 0.0)
    meter.change(key(requests_per_minute=10, tokens_per_minute=20, concurrency=1), 0.0)

    assert meter.requests is not None
    assert meter.tokens is not None
    assert (meter.requests.remaining(0.0), meter.tokens.remaining(0.0)) == (9, 20)
    assert isinstance(meter.begin(0.0), LimitRefusal)
    meter.change(key(), 0.0)
    assert (meter.requests, meter.tokens, meter.begin(0.0)) == (None, None, None)
