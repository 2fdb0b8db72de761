"""OpenAI's ``/v1/files``: what batches are made of, and what comes of them."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import msgspec
from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.access.auth import current
from appliance.api.batch.downloads import Download
from appliance.api.batch.runner import BatchRunner
from appliance.api.batch.uploads import FORM_BYTES, UploadForm, read_form
from appliance.batches.files import StoredFile, StoreFull
from appliance.http.errors import ApiError, BadRequest, Unsupported
from appliance.http.json import json_answer
from appliance.http.paging import Page, page_of, query_of

MAX_FILES: Final = 10_000
_MAX_FILENAME: Final = 255
_LIST: Final = {"after", "limit", "order", "purpose"}


def file_routes(batches: BatchRunner | None) -> list[HTTPRouteHandler]:
    """The endpoints; without `batches` they say that there are no files."""
    bound = FORM_BYTES if batches is None else batches.settings.max_file_bytes + FORM_BYTES

    @post("/v1/files", status_code=200, operation_id="createFile", request_max_body_size=bound)
    async def create(request: Request[Any, Any, Any]) -> ASGIResponse:
        return json_answer(_worded(await _receive(configured(batches), request)))

    @get("/v1/files", operation_id="listFiles")
    async def listed(request: Request[Any, Any, Any]) -> ASGIResponse:
        here = configured(batches)
        query = query_of(request, _LIST)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("order: asc or desc", "order")
        mine = [file for file in here.files.all() if _is_own(file)]
        if "purpose" in query:
            mine = [file for file in mine if file.purpose == query["purpose"]]
        if order == "asc":
            mine.reverse()
        page = page_of(mine, query, default=MAX_FILES, most=MAX_FILES)
        return json_answer(Page.of([_worded(file) for file in page.items], page.more))

    @get("/v1/files/{id:str}", operation_id="retrieveFile")
    async def retrieve(id: FromPath[str]) -> ASGIResponse:
        return json_answer(_worded(own_file(configured(batches), id)))

    @get("/v1/files/{id:str}/content", operation_id="downloadFile")
    async def content(id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        file = own_file(here, id)
        try:
            opened = await here.disk(here.files.path(file.id).open, "rb")
        except FileNotFoundError as error:
            raise _no_file(id) from error
        return Download(opened, file.filename, "application/jsonl", here.disk)

    @delete("/v1/files/{id:str}", status_code=200, operation_id="deleteFile")
    async def remove(id: FromPath[str]) -> ASGIResponse:
        here = configured(batches)
        file = own_file(here, id)
        if here.needed(file.id):
            raise ApiError(409, "a batch that is not over needs this file", code="file_in_use")
        try:
            await here.disk(here.files.delete, file.id)
        except OSError as error:
            refuse_for_disk(error)
        return json_answer({"id": file.id, "object": "file", "deleted": True})

    return [create, listed, retrieve, content, remove]


async def _receive(here: BatchRunner, request: Request[Any, Any, Any]) -> StoredFile:
    """The file of a form, kept for its owner."""
    form = UploadForm()
    try:
        await read_form(request, form, "file", here.files, here.disk, owner())
        _check(form, here.settings.max_file_bytes)
        assert form.upload is not None
        filename = form.filename[:_MAX_FILENAME]
        now = here.wall_clock()
        return await here.disk(here.files.keep, form.upload, filename, now)
    except StoreFull as error:
        raise ApiError(413, f"{error}; delete some", code="storage_full") from error
    except OSError as error:
        refuse_for_disk(error)
    finally:
        if form.upload is not None:
            await here.disk(here.files.drop, form.upload)


def configured(batches: BatchRunner | None) -> BatchRunner:
    """Raises `ApiError` if there are none."""
    if batches is None:
        message = "this appliance keeps no files and has no batches: batches.directory is not set"
        raise ApiError(404, message, code="not_configured")
    return batches


def owner() -> str:
    """Of the files of the caller."""
    return current.get().owner


def own_file(batches: BatchRunner, id: str, param: str = "id") -> StoredFile:
    """Raises `ApiError` for a file that is not there, or belongs to another key."""
    file = batches.files.find(id)
    if file is None or not _is_own(file):
        raise _no_file(id, param)
    return file


def _is_own(file: StoredFile) -> bool:
    return file.owner == owner() and not file.hidden


def refuse_for_disk(error: OSError) -> NoReturn:
    """Say that the disk does not take it."""
    message = f"it cannot be written down: {error.strerror}"
    raise ApiError(507, message, code="storage_failed") from error


def _no_file(id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"no file {id[:100]!r}", param=param, code="file_not_found")


def _check(form: UploadForm, max_bytes: int) -> None:
    if (purpose := form.fields.get("purpose")) != "batch":
        if purpose is None:
            raise BadRequest("purpose: a value is required", "purpose", "missing_field")
        raise BadRequest("purpose: only 'batch' is supported", "purpose", "unsupported_value")
    for field in sorted(form.fields.keys() - {"purpose"}):
        raise Unsupported(field[:100])
    if form.upload is None:
        raise BadRequest("file: a value is required", "file", "missing_field")
    if form.upload.size_bytes > max_bytes:
        message = f"file: more than {max_bytes} bytes"
        raise ApiError(413, message, param="file", code="request_too_large")


class _File(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


def _worded(file: StoredFile) -> _File:
    return _File(
        id=file.id,
        bytes=file.size_bytes,
        created_at=int(file.created_at),
        expires_at=int(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
    )
