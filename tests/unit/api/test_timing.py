"""What the time of an answer went to, as ``Server-Timing`` has it."""

from __future__ import annotations

from appliance.http.server_timing import server_timing
from appliance.service.interface import RequestTimes


def test_it_tells_milliseconds_by_phase() -> None:
    """In the order of a request's life; nothing of what was never computed."""
    times = RequestTimes(queue_seconds=0.5, load_seconds=0.25, prefill_seconds=0.0625)
    shown = "queue;dur=500.0, load;dur=250.0, prefill;dur=62.5, decode;dur=0.0, preempted;dur=0.0"

    assert server_timing(times) == shown
    assert server_timing(None) == ""


def test_it_tells_how_often_it_was_preempted() -> None:
    """As the description of that phase, where it happened."""
    times = RequestTimes(preempted_seconds=0.25, preemptions=3)

    assert server_timing(times).endswith('decode;dur=0.0, preempted;dur=250.0;desc="3"')
