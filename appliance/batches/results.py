"""What comes of a batch: a file of answers, and one of what was refused, failed or never ran.

Of an Anthropic batch, one file of all results.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from appliance.batches.files import MESSAGES_OUTPUT, FileStore
from appliance.batches.log import BatchLog, OutcomePlace
from appliance.batches.records import MESSAGES, Batch, Status
from appliance.batches.requestlines import RequestLines

_NEVER_RAN: Final = {
    Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
}


_UNASKED: Final = {"batch_expired": "expired", "batch_cancelled": "canceled"}
_ERRORS: Final = {"invalid_api_key": "authentication_error"}
"""Anthropic's words for requests that never ran, and for why a request could not be asked."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What HTTP would have answered to a request; `body` is JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not even asked."""

    code: str
    message: str


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output file or an error file."""

    id: str
    custom_id: str
    response: Response | None = None
    error: Failure | None = None


def answered(endpoint: str, custom_id: str, status: int, body: bytes) -> msgspec.Raw:
    """The entry of a request that was answered."""
    if endpoint == MESSAGES and status < 400:
        return _result(custom_id, {"type": "succeeded", "message": msgspec.Raw(body)})
    if endpoint == MESSAGES:
        return _result(custom_id, {"type": "errored", "error": msgspec.Raw(body)})
    name = uuid.uuid4().hex
    response = Response(status_code=status, request_id=name, body=msgspec.Raw(body))
    entry = ResultLine(id=f"batch_req_{name}", custom_id=custom_id, response=response)
    return msgspec.Raw(msgspec.json.encode(entry))


def refused(endpoint: str, custom_id: str, code: str, message: str) -> msgspec.Raw:
    """The entry of a request that was not asked."""
    if endpoint == MESSAGES and code in _UNASKED:
        return _result(custom_id, {"type": _UNASKED[code]})
    if endpoint == MESSAGES:
        error = {"type": _ERRORS.get(code, "api_error"), "message": message}
        return _result(custom_id, {"type": "errored", "error": {"type": "error", "error": error}})
    failure = Failure(code=code, message=message)
    entry = ResultLine(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, error=failure)
    return msgspec.Raw(msgspec.json.encode(entry))


def _result(custom_id: str, result: dict[str, object]) -> msgspec.Raw:
    """The line of a request in the results of an Anthropic batch."""
    return msgspec.Raw(msgspec.json.encode({"custom_id": custom_id, "result": result}))


class Results(NamedTuple):
    """The ids of a batch's files; None for one that would be empty, or that the dialect of the
    batch does not have."""

    output_file_id: str | None
    error_file_id: str | None


def write_results(
    batch: Batch, status: Status, log: BatchLog, source: Path, files: FileStore, now: float
) -> Results:
    """Write the files of a batch that ends as `status`; those of an earlier attempt are replaced.
    `source` is its input, which is only needed for requests that never ran; of a batch that failed
    nothing is said of those. Raises `OSError`, and `InputLost`."""
    outcomes = log.outcomes()
    pending = [] if status is Status.FAILED else batch.pending
    name = batch.id.rpartition("_")[2]
    owner = batch.created.owner
    if batch.of_messages:
        results = f"file-output-{name}"
        lines = _lines(batch, status, outcomes, pending, log, source)
        files.write(results, owner, f"{batch.id}_results.jsonl", lines, now, MESSAGES_OUTPUT)
        return Results(results, None)
    good = [outcome for outcome in outcomes if outcome.ok]
    output = error = None
    if good:
        output = f"file-output-{name}"
        answers = (log.entry(outcome) + b"\n" for outcome in good)
        files.write(output, owner, f"{batch.id}_output.jsonl", answers, now)
    if len(good) < len(outcomes) or pending:
        error = f"file-error-{name}"
        bad = [outcome for outcome in outcomes if not outcome.ok]
        lines = _lines(batch, status, bad, pending, log, source)
        files.write(error, owner, f"{batch.id}_error.jsonl", lines, now)
    return Results(output, error)


def _lines(
    batch: Batch,
    status: Status,
    outcomes: list[OutcomePlace],
    pending: list[int],
    log: BatchLog,
    source: Path,
) -> Iterator[bytes]:
    """Lines for these outcomes and for requests that never ran, in the order of the input."""
    ran = {outcome.request: outcome for outcome in outcomes}
    requests = RequestLines(source) if pending else None
    try:
        for request in sorted([*ran, *pending]):
            if request in ran:
                yield log.entry(ran[request]) + b"\n"
            elif requests is not None:
                custom_id = requests.read(request).custom_id
                entry = refused(batch.created.endpoint, custom_id, *_NEVER_RAN[status])
                yield bytes(entry) + b"\n"
    finally:
        if requests is not None:
            requests.close()
