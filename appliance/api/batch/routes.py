"""OpenAI's ``/v1/batches``: many requests in a file, answered when no other request waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Meta, UnsetType

from appliance.access.auth import SLO_HEADER, Forbidden, current
from appliance.api.batch.executor import ENDPOINTS
from appliance.api.batch.files import configured, own_file, owner
from appliance.api.batch.runner import BatchRunner, TooManyBatches, Unavailable
from appliance.batches.files import StoreFull
from appliance.batches.records import Batch, Problem, Status
from appliance.errors import IllegalTransition
from appliance.http.bodies import parse
from appliance.http.errors import ApiError, BadRequest
from appliance.http.json import json_answer
from appliance.http.paging import Page, page_of, query_of
from appliance.service.interface import AskedSlo
from appliance.vocabulary import RequestClass

_WINDOW: Final = "24h"
_MAX_METADATA: Final = 16
MAX_BATCHES: Final = 100
"""In one page of a list."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None
    ) = None
    output_expires_after: None = None


def batch_routes(batches: BatchRunner | None) -> list[HTTPRouteHandler]:
    """The endpoints; without `batches` they say that there are none."""

    @post("/v1/batches", status_code=200, operation_id="createBatch")
    async def create(request: Request[Any, Any, Any]) -> ASGIResponse:
        here = configured(batches)
        asked = parse(await request.body(), BatchRequest)
        _check(asked, here)
        with refusals():
            batch = await here.create(
                owner(),
                asked.endpoint,
                asked.input_file_id,
                asked.completion_window,
                asked.metadata,
            )
        return json_answer(_worded(batch))

    @get("/v1/batches", operation_id="listBatches")
    async def listed(request: Request[Any, Any, Any]) -> ASGIResponse:
        mine = [one for one in configured(batches).batches(owner()) if not one.of_messages]
        page = page_of(mine, query_of(request, {"after", "limit"}), default=20, most=MAX_BATCHES)
        return json_answer(Page.of([_worded(batch) for batch in page.items], page.more))

    @get("/v1/batches/{id:str}", operation_id="retrieveBatch")
    async def retrieve(id: FromPath[str]) -> ASGIResponse:
        return json_answer(_worded(_own(configured(batches), id)))

    @post("/v1/batches/{id:str}/cancel", status_code=200, operation_id="cancelBatch")
    async def cancel(id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        batch = _own(here, id)
        await end(here, batch)
        return json_answer(_worded(batch))

    return [create, listed, retrieve, cancel]


@contextmanager
def refusals() -> Iterator[None]:
    """Raises `ApiError` where a batch cannot be written down, or there are too many."""
    try:
        yield
    except TooManyBatches as error:
        headers = {"Retry-After": "60"}
        raise ApiError(429, str(error), code="too_many_batches", headers=headers) from error
    except StoreFull as error:
        raise ApiError(413, f"{error}; delete some", code="storage_full") from error
    except Unavailable as error:
        raise ApiError(507, str(error), code="storage_failed") from error


async def end(batches: BatchRunner, batch: Batch) -> None:
    """Cancel a batch. Raises `ApiError`."""
    try:
        with refusals():
            await batches.cancel(batch)
    except IllegalTransition as error:
        message = f"a batch that is {batch.status} cannot be cancelled"
        raise ApiError(409, message, code="batch_not_cancellable") from error


def check_caller() -> None:
    """Raises `ApiError` for a caller who may make no batch, or asks for a service level."""
    caller = current.get()
    if caller.slo != AskedSlo():
        raise BadRequest(f"{SLO_HEADER}: a batch has none of its own", SLO_HEADER)
    key = caller.key
    if key is not None and RequestClass.BATCH not in key.classes:
        raise Forbidden("the API key has no batch work")


def _check(asked: BatchRequest, batches: BatchRunner) -> None:
    if asked.completion_window != _WINDOW:
        raise BadRequest(f"completion_window: only {_WINDOW!r} is supported", "completion_window")
    if asked.endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise BadRequest(f"endpoint: one of {known}", "endpoint", "unsupported_value")
    if asked.metadata is not None and len(asked.metadata) > _MAX_METADATA:
        raise BadRequest(f"metadata: more than {_MAX_METADATA} pairs", "metadata")
    check_caller()
    file = own_file(batches, asked.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"input_file_id: the purpose of the file is {file.purpose!r}, not 'batch'"
        raise BadRequest(message, "input_file_id")


def _own(batches: BatchRunner, id: str) -> Batch:
    batch = batches.find(id)
    if batch is None or batch.created.owner != owner() or batch.of_messages:
        raise ApiError(404, f"no batch {id[:100]!r}", param="id", code="batch_not_found")
    return batch


class _Counts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class _Details(msgspec.Struct, kw_only=True):
    cached_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class _Usage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: _Details
    output_tokens: int
    output_tokens_details: _Details
    total_tokens: int


class _Errors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: tuple[Problem, ...]


class _Batch(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: _Errors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: _Counts
    usage: _Usage
    metadata: dict[str, str] | None


def _worded(batch: Batch) -> _Batch:
    created = batch.created
    since = {status: int(at) for status, at in batch.since.items()}
    return _Batch(
        id=batch.id,
        endpoint=created.endpoint,
        errors=_Errors(data=batch.problems) if batch.problems else None,
        input_file_id=created.input_file_id,
        completion_window=created.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(created.at),
        in_progress_at=since.get(Status.IN_PROGRESS),
        expires_at=int(created.expires_at),
        finalizing_at=since.get(Status.FINALIZING),
        completed_at=since.get(Status.COMPLETED),
        failed_at=since.get(Status.FAILED),
        expired_at=since.get(Status.EXPIRED),
        cancelling_at=since.get(Status.CANCELLING),
        cancelled_at=since.get(Status.CANCELLED),
        request_counts=_Counts(total=batch.total, completed=batch.completed, failed=batch.failed),
        usage=_Usage(
            input_tokens=batch.input_tokens,
            input_tokens_details=_Details(cached_tokens=0),
            output_tokens=batch.output_tokens,
            output_tokens_details=_Details(reasoning_tokens=batch.reasoning_tokens),
            total_tokens=batch.input_tokens + batch.output_tokens,
        ),
        metadata=created.metadata,
    )
