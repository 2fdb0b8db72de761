"""What a model delivered in the last minute, as time goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observability.slo_window import SLICE_SECONDS, WINDOW_SECONDS, SloWindow

TIMES = st.floats(1e-5, 1e4)


def test_nothing_came() -> None:
    """Of a model nobody asks there is nothing to say."""
    assert SloWindow().window(0.0) is None


def test_attainment_is_of_the_last_minute() -> None:
    """Late tokens count until they are a minute old, and what was made before is still counted."""
    pace = SloWindow()
    pace.tokens(0.0, 3, 3)
    pace.tokens(30.0, 1, 0)

    def attained(now: float) -> float | None:
        window = pace.window(now)
        return None if window is None else window.attainment

    assert [attained(now) for now in (30.0, WINDOW_SECONDS, 91.0)] == [0.25, 1.0, None]
    assert pace.output_tokens == 4


def test_a_pooled_prompt_has_a_first_time_and_no_tokens() -> None:
    """So there is nothing of which a share could be late."""
    pace = SloWindow()
    pace.tokens(1.0, 0, 0)
    pace.first_token(1.0, 0.5)
    window = pace.window(1.0)

    assert window is not None
    assert window.attainment is None
    assert window.ttft_p50_seconds == pytest.approx(0.5, rel=0.05)
    assert window.tbt_p99_seconds is None


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_quantiles(times: list[float]) -> None:
    """To within 5 % of the time that so many were not above."""
    pace = SloWindow()
    for seconds in times:
        pace.next_token(3.0, seconds)
    window = pace.window(3.0)
    ordered = sorted(times)

    assert window is not None
    for found, share in [(window.tbt_p50_seconds, 0.5), (window.tbt_p99_seconds, 0.99)]:
        exact = ordered[-(-int(share * 100) * len(times) // 100) - 1]
        assert found == pytest.approx(exact, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans(), TIMES), max_size=60))
def test_what_is_old_is_forgotten(steps: list[tuple[float, bool, float]]) -> None:
    """As if it had never been, to within a slice; and little is kept."""
    pace, now = SloWindow(), 0.0
    tokens: list[tuple[float, bool]] = []
    for later, late, seconds in steps:
        now += later
        pace.tokens(now, 1, int(late))
        pace.first_token(now, seconds)
        tokens.append((now, late))
    window = pace.window(now)
    surely = [late for at, late in tokens if now - at < WINDOW_SECONDS - SLICE_SECONDS]
    perhaps = [late for at, late in tokens if now - at < WINDOW_SECONDS + SLICE_SECONDS]

    assert (window is None) <= (not surely)
    if window is not None and window.attainment is not None and len(surely) == len(perhaps):
        assert window.attainment == pytest.approx(1 - sum(surely) / len(surely))
    assert len(pace._slices) <= WINDOW_SECONDS / SLICE_SECONDS + 1
