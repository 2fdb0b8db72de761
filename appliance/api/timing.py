"""What the time of an answer went to, for whoever asked: the ``Server-Timing`` header."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.api.service import RequestTimes


def longest(times: Iterable[RequestTimes | None]) -> RequestTimes | None:
    """The times of the choice that took longest, among those that are over."""
    known = (choice for choice in times if choice is not None)
    return max(known, key=lambda choice: sum(choice.phases.values()), default=None)


def server_timing(times: RequestTimes | None) -> str:
    """The header's value, milliseconds by phase, and how often it was preempted if it was; "" of
    what is not over."""
    if times is None:
        return ""
    value = ", ".join(
        f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in times.phases.items()
    )
    return f'{value};desc="{times.preemptions}"' if times.preemptions else value
