"""What the time of an answer went to, for its client: the ``Server-Timing`` header."""

from __future__ import annotations

from appliance.service.interface import RequestTimes


def server_timing(times: RequestTimes | None) -> str:
    """The header's value, milliseconds by phase, and how often it was preempted if it was; "" of
    what was never computed."""
    if times is None:
        return ""
    value = ", ".join(
        f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in times.phases.items()
    )
    return f'{value};desc="{times.preemptions}"' if times.preemptions else value
