"""What the dashboard knows after messages: as much as the daemon, and no more than it can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.admin.watch import Document, difference
from tests.unit.tui.bench import NOW, delta, lost, notice, state, tree
from tui.drawing.series import MOST_SAMPLES, Counter
from tui.state import MOST_NOTICES, MOST_SPANS, State

ROWS = st.dictionaries(
    st.sampled_from("abcd"),
    st.fixed_dictionaries(
        {"output_tokens": st.integers(0, 9)},
        optional={"state": st.sampled_from(["cold", "loaded"]), "terms": st.just({"pinned": True})},
    ),
)
SPANS = st.dictionaries(
    st.sampled_from("1234"),
    st.fixed_dictionaries({"kind": st.just("turn")}, optional={"ended_unix_seconds": st.just(9.0)}),
)
TREES = st.fixed_dictionaries({"models": ROWS, "spans": SPANS})


@given(st.lists(st.tuples(TREES, st.booleans()), min_size=1))
def test_it_knows_what_the_daemon_knows(steps: list[tuple[Document, bool]]) -> None:
    """After any sequence of states and deltas the tree is the daemon's, no counter is kept of a row
    that is gone, and of spans those that are over."""
    heard, told = State(), {}
    spans: Document = {}
    heard.hear(state(told))
    for number, (now, whole) in enumerate(steps):
        at = NOW + number
        patch = difference(told, now)
        heard.hear(state(now, at, missed=True) if whole else delta(patch, at))
        told = now

        assert heard.tree == now
        assert heard.version == number + 2
        known = {key for table, key, _ in heard._counters if table == "models"}
        assert known <= set(now["models"])
        over = {key: span for key, span in spans.items() if "ended_unix_seconds" in span}
        spans = over | now["spans"]
        assert heard.spans == spans
        assert all(name in heard.numbers for name in now["models"])


def test_what_grows_is_bounded() -> None:
    """Notices, spans and samples, however many come."""
    heard = State()
    heard.hear(state(tree()))
    for number in range(MOST_NOTICES + 10):
        heard.hear(notice(number, "model_load_requested", model="a"))
    for first in range(0, MOST_SPANS + 100, 50):
        heard.hear(delta({"spans": {str(first + i): {"kind": "turn"} for i in range(50)}}))
    for tokens in range(MOST_SAMPLES + 10):
        heard.hear(delta({"models": {"a": {"output_tokens": tokens}}}, NOW + tokens))

    assert len(heard.notices) == MOST_NOTICES
    assert len(heard.spans) == MOST_SPANS
    assert next(iter(heard.spans)) == "100"
    assert heard.counter("models", "a", "output_tokens").rate(NOW + tokens, 10) == 1.0


def test_events_that_were_missed_leave_a_mark() -> None:
    """Not at first: nobody missed what was before."""
    heard = State()
    heard.hear(state(tree(), missed=True))
    heard.hear(notice(1, "model_load_requested", model="a"))
    heard.hear(lost("gone"))
    heard.hear(state(tree(), missed=True))

    assert [row["kind"] for row in heard.notices] == ["model_load_requested", "missed"]


def test_a_daemon_that_is_lost_comes_back() -> None:
    """What was known stays until it is known better."""
    heard = State()
    assert heard.lost == "connecting"
    heard.hear(state(tree()))
    assert heard.lost is None
    heard.hear(lost("connection refused", 4.0))
    assert (heard.lost, heard.retry_at) == ("connection refused", NOW + 4.0)
    assert "a" in heard.rows("models")
    heard.hear(notice(2, "instance_up", instance=0))
    assert heard.lost is None


def test_what_ran_when_the_daemon_was_lost_is_let_go() -> None:
    """Its end is not known, and it runs no more; what was over stays, before what is new."""
    heard = State()
    over, runs = {"kind": "turn", "ended_unix_seconds": NOW}, {"kind": "turn"}
    heard.hear(state(tree(spans={"1": over, "2": runs})))
    heard.hear(lost("killed"))
    heard.hear(state(tree(spans={"8": runs, "9": dict(runs)})))
    assert list(heard.spans) == ["1", "8", "9"]
    heard.hear(delta({"spans": {"8": None, "9": {"ended_unix_seconds": NOW}}}))
    heard.hear(delta({"spans": {"9": None}}))
    assert list(heard.spans) == ["1", "9"]


def test_a_daemon_that_began_anew_counts_anew() -> None:
    """Of the one before no span is left; the same one tells its start a little otherwise."""
    heard = State()
    over = {"kind": "turn", "ended_unix_seconds": NOW}
    heard.hear(state(tree(spans={"500": over}) | {"started_unix_seconds": NOW - 90}))
    heard.hear(state(tree(spans={"501": over}) | {"started_unix_seconds": NOW - 90.01}))
    assert list(heard.spans) == ["500", "501"]
    heard.hear(state(tree(spans={"1": over}) | {"started_unix_seconds": NOW - 5}))
    assert list(heard.spans) == ["1"]


def test_time_is_the_daemons() -> None:
    """Whatever the clock here says; it goes on between messages, and never back."""
    heard = State()
    message = state(tree(), NOW)
    heard.hear(message._replace(at=50.0))

    assert heard.now(53.0) == NOW + 3
    assert heard.now(40.0) == NOW


@pytest.mark.parametrize(
    ("samples", "now", "seconds", "expected"),
    [
        ([], 10, 10, 0.0),
        ([(0, 0)], 10, 10, 0.0),
        ([(0, 0), (5, 50)], 10, 10, 5.0),
        ([(0, 0), (5, 50)], 100, 10, 0.0),
        ([(9, 0), (10, 30)], 10, 10, 30.0),
        ([(0, 100), (5, 10), (10, 60)], 10, 10, 10.0),
    ],
    ids=["unknown", "still", "up", "long ago", "short", "begun anew"],
)
def test_rates(
    samples: list[tuple[float, float]], now: float, seconds: float, expected: float
) -> None:
    """Over the last seconds, or as long as the counter is known."""
    counter = Counter()
    for at, value in samples:
        counter.sample(at, value)

    assert counter.rate(now, seconds) == expected


def test_increases_by_bucket() -> None:
    """The oldest first; the bucket that is not over is not shown."""
    counter = Counter()
    for at, value in [(0, 0), (12, 5), (18, 9), (23, 10)]:
        counter.sample(at, value)

    assert counter.increases(26, 5, 5) == [0, 0, 5, 4, 1]
    assert Counter().increases(26, 2, 5) == [0.0, 0.0]
