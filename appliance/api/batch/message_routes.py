"""Anthropic's ``/v1/messages/batches``: many requests in one body, of the class batch."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from appliance.api.batch.downloads import Download
from appliance.api.batch.files import configured, owner, refuse_for_disk
from appliance.api.batch.routes import check_caller, end, refusals
from appliance.api.batch.runner import BatchRunner
from appliance.batches.files import MESSAGES_INPUT, FileStore
from appliance.batches.records import MESSAGES, Batch, Status
from appliance.batches.requestlines import RequestLine
from appliance.errors import IllegalTransition
from appliance.http.bodies import parse
from appliance.http.errors import ApiError, BadRequest
from appliance.http.json import json_answer
from appliance.http.paging import PageItems, page_of, query_of

MAX_BATCHES: Final = 1000
"""In one page of a list."""

CustomId = Annotated[str, Meta(min_length=1, max_length=64)]
_LIST: Final = {"after_id", "before_id", "limit", "beta"}


class _Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    custom_id: CustomId
    params: msgspec.Raw


class _Create(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    requests: list[_Message]


def message_batch_routes(batches: BatchRunner | None) -> list[HTTPRouteHandler]:
    """The endpoints; without `batches` they say that there are none."""

    @post("/v1/messages/batches", status_code=200, operation_id="createMessageBatch")
    async def create(request: Request[Any, Any, Any]) -> ASGIResponse:
        here = configured(batches)
        check_caller()
        return json_answer(_worded(await _create(here, await request.body()), request))

    @get("/v1/messages/batches", operation_id="listMessageBatches")
    async def listed(request: Request[Any, Any, Any]) -> ASGIResponse:
        mine = [batch for batch in configured(batches).batches(owner()) if batch.of_messages]
        page = _page(mine, query_of(request, _LIST))
        ids = [batch.id for batch in page.items]
        return json_answer(
            {
                "data": [_worded(batch, request) for batch in page.items],
                "has_more": page.more,
                "first_id": ids[0] if ids else None,
                "last_id": ids[-1] if ids else None,
            }
        )

    @get("/v1/messages/batches/{id:str}", operation_id="retrieveMessageBatch")
    async def retrieve(request: Request[Any, Any, Any], id: FromPath[str]) -> ASGIResponse:
        return json_answer(_worded(_own(configured(batches), id), request))

    @post(
        "/v1/messages/batches/{id:str}/cancel", status_code=200, operation_id="cancelMessageBatch"
    )
    async def cancel(request: Request[Any, Any, Any], id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        batch = _own(here, id)
        await end(here, batch)
        return json_answer(_worded(batch, request))

    @delete("/v1/messages/batches/{id:str}", status_code=200, operation_id="deleteMessageBatch")
    async def remove(id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        batch = _own(here, id)
        try:
            with refusals():
                await here.delete(batch)
        except IllegalTransition as error:
            message = "a batch is deleted once it has ended; cancel it first"
            raise ApiError(409, message, code="batch_not_over") from error
        return json_answer({"id": batch.id, "type": "message_batch_deleted"})

    @get("/v1/messages/batches/{id:str}/results", operation_id="messageBatchResults")
    async def results(id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        return await _results(here, _own(here, id))

    return [create, listed, retrieve, cancel, remove, results]


async def _create(here: BatchRunner, body: bytes) -> Batch:
    """A batch of the requests in `body`, which are on disk before it exists."""
    lines, count = await here.disk(_lines, body, here.settings.max_requests)
    now = here.wall_clock()
    with refusals():
        try:
            file = await here.disk(_store, here.files, lines, owner(), now)
        except OSError as error:
            refuse_for_disk(error)
        try:
            return await here.create(owner(), MESSAGES, file, "24h", None, checked=count)
        except BaseException:  # a cancelled task, too: no batch names the file
            with suppress(OSError):  # it is swept up later
                await here.disk(here.files.delete, file)
            raise


async def _results(here: BatchRunner, batch: Batch) -> ASGIResponse:
    if batch.output_file_id is None:
        raise ApiError(404, "a batch has results once it has ended", code="batch_not_over")
    path = here.files.path(batch.output_file_id)
    try:
        opened = await here.disk(path.open, "rb")
    except FileNotFoundError as error:  # it is being deleted
        raise _no_batch(batch.id) from error
    return Download(opened, f"{batch.id}_results.jsonl", "application/x-jsonl", here.disk)


def _lines(body: bytes, max_requests: int) -> tuple[bytes, int]:
    """The input file of a batch that `body` asks for, and the number of its lines. Takes time;
    raises `BadRequest`."""
    asked = parse(body, _Create).requests
    if not 1 <= len(asked) <= max_requests:
        raise BadRequest(f"requests: 1 to {max_requests} are needed", "requests")
    seen: set[str] = set()
    lines: list[bytes] = []
    for number, one in enumerate(asked):
        place = f"requests[{number}]"
        if one.custom_id in seen:
            message = f"{place}.custom_id: {one.custom_id!r} is the id of an earlier request"
            raise BadRequest(message, f"{place}.custom_id")
        seen.add(one.custom_id)
        try:
            params = msgspec.json.format(bytes(one.params), indent=-1)  # in one line
            params.decode()  # which a front end could not read otherwise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"{place}.params: {error}", f"{place}.params") from error
        if not params.startswith(b"{"):
            raise BadRequest(f"{place}.params: an object is needed", f"{place}.params")
        line = RequestLine(
            custom_id=one.custom_id, method="POST", url=MESSAGES, body=msgspec.Raw(params)
        )
        lines.append(msgspec.json.encode(line) + b"\n")
    return b"".join(lines), len(lines)


def _store(files: FileStore, lines: bytes, owner: str, now: float) -> str:
    """The id of a file that no client sees. Takes time; raises `StoreFull`, `OSError`."""
    upload = files.begin(owner)
    try:
        files.extend(upload, lines)
        return files.keep(upload, "requests.jsonl", now, MESSAGES_INPUT).id
    finally:
        files.drop(upload)


def _page(mine: list[Batch], query: dict[str, str]) -> PageItems[Batch]:
    """The batches behind `after_id`, or those before `before_id`; `more` is said of the same
    direction. Raises `BadRequest`."""
    if "after_id" in query and "before_id" in query:
        raise BadRequest("before_id: not together with after_id", "before_id")
    back = "before_id" in query
    cursor = "before_id" if back else "after_id"
    asked = {"after" if name == cursor else name: value for name, value in query.items()}
    try:
        part = page_of(mine[::-1] if back else mine, asked, default=20, most=MAX_BATCHES)
    except BadRequest as error:
        raise error.renamed({"after": cursor}) from error
    return PageItems(part.items[::-1], part.more) if back else part


def _own(batches: BatchRunner, id: str) -> Batch:
    batch = batches.find(id)
    if batch is None or batch.created.owner != owner() or not batch.of_messages:
        raise _no_batch(id)
    return batch


def _no_batch(id: str) -> ApiError:
    return ApiError(404, f"no message batch {id[:100]!r}", param="id", code="batch_not_found")


class _Counts(msgspec.Struct, kw_only=True):
    """Each is 0 until the batch has ended, but for `processing`."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class _MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: _Counts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None = None
    results_url: str | None


def _worded(batch: Batch, request: Request[Any, Any, Any]) -> _MessageBatch:
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if batch.over:
        status = "ended"
    elif batch.status is Status.CANCELLING:
        status = "canceling"
    has_results = batch.output_file_id is not None
    return _MessageBatch(
        id=batch.id,
        processing_status=status,
        request_counts=_counts(batch),
        created_at=_time(batch.created.at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(batch.since[batch.status]) if batch.over else None,
        cancel_initiated_at=(
            _time(batch.since[Status.CANCELLING]) if Status.CANCELLING in batch.since else None
        ),
        results_url=f"{request.base_url}v1/messages/batches/{batch.id}/results"
        if has_results
        else None,
    )


def _counts(batch: Batch) -> _Counts:
    if not batch.over:
        return _Counts(processing=batch.total)
    never_ran = batch.total - batch.completed - batch.failed
    counts = _Counts(succeeded=batch.completed, errored=batch.failed)
    if batch.status is Status.CANCELLED:
        counts.canceled = never_ran
    elif batch.status is Status.EXPIRED:
        counts.expired = never_ran
    else:  # its input was lost
        counts.errored += never_ran
    return counts


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
