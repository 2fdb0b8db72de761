"""The endpoint of an admin who asks what instances computed and moved in the last half hour."""

from __future__ import annotations

import math
from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.http.errors import BadRequest
from appliance.http.json import json_answer
from appliance.service.interface import Watch

MOST_DIGITS = 18
"""Of the number in `before`."""


def timeline_routes(service: Watch) -> list[HTTPRouteHandler]:
    """Pages of spans, the newest first; the next one is asked for with `before` of the last one."""

    @get("/api/timeline", operation_id="timeline")
    async def timeline(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = request.query_params
        since = _time("since", asked.get("since"), 0.0)
        until = _time("until", asked.get("until"), math.inf)
        return json_answer(service.timeline(since, until, _number(asked.get("before"))))

    return [timeline]


def _time(name: str, text: str | None, default: float) -> float:
    """Unix seconds."""
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise BadRequest(f"{name} is a time in Unix seconds, such as 1795340191.5", name)
    return seconds


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise BadRequest("before is the number that the page before this one has", "before")
    return int(text)
