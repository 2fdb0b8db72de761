"""The one line that the log has of each request: sizes, times, outcome; no text, no secret.

Logger ``appliance.requests``, level info; the fields are those of `docs/logs.md`.
"""

from __future__ import annotations

import logging

from appliance.service.generation import RequestStream
from appliance.service.interface import GenerationFailed, RequestTimes
from appliance.vocabulary import FinishReason

CLIENT_LEFT = 499
"""The status of a request whose client left before the answer, as in nginx's log."""

log = logging.getLogger("appliance.requests")


def log_request(
    stream: RequestStream,
    times: RequestTimes,
    outcome: str,
    failure: GenerationFailed | None,
    now: float,
) -> None:
    """Write it. `outcome` is a finish reason, or the code of the failure."""
    if not log.isEnabledFor(logging.INFO):
        return
    request, tokens = stream.request, len(stream.output)
    fields: dict[str, object] = {
        "request": request.id,
        "model": request.model,
        "class": request.request_class.value,
        **({} if request.key is None else {"key": request.key}),
        "outcome": str(outcome),
        "status": _status(outcome, failure),
        "prompt_tokens": len(request.prompt),
        "completion_tokens": tokens,
        "seconds": _short(now - stream.arrived),
        **{f"{phase}_seconds": _short(spent) for phase, spent in times.phases.items()},
    }
    if stream.first is not None:
        fields["ttft_seconds"] = _short(stream.first - stream.arrived)
    if stream.first is not None and tokens > 1:
        fields["mean_tbt_seconds"] = _short(stream.decode_seconds() / (tokens - 1))
    fields["late_tokens"] = stream.late
    fields["preemptions"] = times.preemptions
    fields["instances"] = times.instances
    if failure is not None:
        fields["reason"] = failure.message
    log.info("request", extra={"fields": fields})


def _status(outcome: str, failure: GenerationFailed | None) -> int:
    if failure is not None:
        return failure.status
    if outcome == FinishReason.CANCELLED:
        return CLIENT_LEFT
    if outcome == FinishReason.INVALID_GUIDE:
        return 400
    return 500 if outcome == FinishReason.ERROR else 200


def _short(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return round(seconds, 4)
