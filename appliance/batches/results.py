"""What comes of a batch: a file of answers, and one of what was refused, failed or never ran."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from appliance.batches.files import FileStore
from appliance.batches.log import BatchLog, Outcome
from appliance.batches.records import Batch, Status
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


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What HTTP would have answered to a request; `body` is JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not even asked."""

    code: str
    message: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output file or an error file."""

    id: str
    custom_id: str
    response: Response | None = None
    error: Failure | None = None


def answered(custom_id: str, status: int, body: bytes) -> msgspec.Raw:
    """The entry of a request that was answered."""
    name = uuid.uuid4().hex
    response = Response(status_code=status, request_id=name, body=msgspec.Raw(body))
    entry = Entry(id=f"batch_req_{name}", custom_id=custom_id, response=response)
    return msgspec.Raw(msgspec.json.encode(entry))


def refused(custom_id: str, code: str, message: str) -> msgspec.Raw:
    """The entry of a request that was not asked."""
    failure = Failure(code=code, message=message)
    entry = Entry(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, error=failure)
    return msgspec.Raw(msgspec.json.encode(entry))


class Results(NamedTuple):
    """The ids of a batch's files; None for one that would be empty."""

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
    name = batch.id.removeprefix("batch_")
    owner = batch.created.owner
    good = [outcome for outcome in outcomes if outcome.ok]
    output = error = None
    if good:
        output = f"file-output-{name}"
        answers = (log.entry(outcome) + b"\n" for outcome in good)
        files.write(output, owner, f"{batch.id}_output.jsonl", answers, now)
    if len(good) < len(outcomes) or pending:
        error = f"file-error-{name}"
        lines = _bad(status, outcomes, pending, log, source)
        files.write(error, owner, f"{batch.id}_error.jsonl", lines, now)
    return Results(output, error)


def _bad(
    status: Status, outcomes: list[Outcome], pending: list[int], log: BatchLog, source: Path
) -> Iterator[bytes]:
    """Lines for all requests that have no answer, in the order of the input."""
    bad = {outcome.request: outcome for outcome in outcomes if not outcome.ok}
    requests = RequestLines(source) if pending else None
    try:
        for request in sorted([*bad, *pending]):
            if request in bad:
                yield log.entry(bad[request]) + b"\n"
            elif requests is not None:
                code, message = _NEVER_RAN[status]
                yield bytes(refused(requests.read(request).custom_id, code, message)) + b"\n"
    finally:
        if requests is not None:
            requests.close()
