"""Limits of a key and of its organization: what a minute holds, debts, and requests at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access.keys import Key
from appliance.access.organizations import Organization
from appliance.access.rate_limits import Bucket, Counts, LimitRefusal, Meter, Reserved


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
    assert meter.own.live == 1000
    assert meter.reserve(10**9, 0.0) == Reserved()
    meter.settle(Reserved(), 10**9, 0.0)


def test_each_limit_is_named() -> None:
    """With its bound, and how long to wait; a request that is refused counts for nothing."""
    busy = Meter(key(concurrency=1, requests_per_minute=100), 0.0)
    often = Meter(key(requests_per_minute=1), 0.0)
    long = Meter(key(tokens_per_minute=60), 0.0)
    for meter in (busy, often):
        assert meter.begin(0.0) is None
    assert long.reserve(50, 0.0) == Reserved(50)

    assert busy.begin(0.0) == LimitRefusal("concurrency", 1, 1.0)
    assert often.begin(30.0) == LimitRefusal("requests", 1, pytest.approx(30.0))
    assert long.reserve(20, 0.0) == LimitRefusal("tokens", 60, pytest.approx(10.0))
    assert busy.own.requests is not None
    assert busy.own.requests.remaining(0.0) == 99
    busy.end()
    assert busy.begin(0.0) is None
    long.settle(Reserved(50), 5, 0.0)
    assert long.reserve(20, 0.0) == Reserved(20)


def test_changed_limits_begin_anew_and_others_go_on() -> None:
    """Who is there is still counted."""
    meter = Meter(key(requests_per_minute=10, tokens_per_minute=10), 0.0)
    meter.begin(0.0)
    meter.reserve(10, 0.0)
    meter.change(key(requests_per_minute=10, tokens_per_minute=20, concurrency=1), 0.0)

    assert meter.own.requests is not None
    assert meter.own.tokens is not None
    assert (meter.own.requests.remaining(0.0), meter.own.tokens.remaining(0.0)) == (9, 20)
    assert isinstance(meter.begin(0.0), LimitRefusal)
    meter.change(key(), 0.0)
    assert (meter.own.requests, meter.own.tokens, meter.begin(0.0)) == (None, None, None)


def organization(**limits: Any) -> Counts[Organization]:
    return Counts(Organization(name="acme", **limits), 0.0, "acme")


def test_an_organizations_limits_hold_for_its_keys_together() -> None:
    """The refusal names whose limit it is; what one limit refuses is taken of no other."""
    acme = organization(requests_per_minute=3, tokens_per_minute=60, concurrency=2)
    one = Meter(key(requests_per_minute=10, tokens_per_minute=30), 0.0, acme)
    other = Meter(key(), 0.0, acme)

    assert (one.begin(0.0), other.begin(0.0)) == (None, None)
    assert other.begin(0.0) == LimitRefusal("concurrency", 2, 1.0, "acme")
    one.end()
    assert one.begin(0.0) is None
    other.end()
    assert one.begin(0.0) == LimitRefusal("requests", 3, pytest.approx(20.0), "acme")
    assert one.own.requests is not None
    assert one.own.requests.remaining(0.0) == 8

    reserved = other.reserve(50, 0.0)
    assert reserved == Reserved(0.0, 50, acme)
    assert one.reserve(20, 0.0) == LimitRefusal("tokens", 60, pytest.approx(10.0), "acme")
    assert one.own.tokens is not None
    assert one.own.tokens.remaining(0.0) == 30
    other.settle(reserved, 10, 0.0)
    assert one.reserve(20, 0.0) == Reserved(20, 20, acme)


def test_a_key_goes_to_another_organization() -> None:
    """What is being answered counts there; tokens are settled where they were taken."""
    acme, other = organization(tokens_per_minute=60), organization(concurrency=1)
    meter = Meter(key(), 0.0, acme)
    meter.begin(0.0)
    reserved = meter.reserve(60, 0.0)
    assert isinstance(reserved, Reserved)
    meter.join(other)

    assert (acme.live, other.live) == (0, 1)
    assert isinstance(meter.begin(0.0), LimitRefusal)
    meter.settle(reserved, 10, 0.0)
    assert acme.tokens is not None
    assert acme.tokens.remaining(0.0) == 50
    meter.join(None)
    meter.end()
    assert (acme.live, other.live, meter.own.live) == (0, 0, 0)
