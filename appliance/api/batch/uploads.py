"""Forms with a file in them (``multipart/form-data``), straight to the disk as they come in."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from litestar import Request
from litestar.exceptions import InternalServerException
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from appliance.batches.disk import Disk
from appliance.batches.files import FileStore, Upload
from appliance.http.errors import BadRequest
from appliance.http.streaming import HungUp

FORM_BYTES: Final = 64 * 1024
"""What a form may have besides the content of its file."""

_PIECE_BYTES: Final = 1 << 20
"""Content is handed to the disk in pieces of at least so much."""
_MAX_FIELD_BYTES: Final = 1024
_MAX_PARTS: Final = 16


class UploadForm:
    """The fields of a form, and its file, which is on its way in until it is kept."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.upload: Upload | None = None
        self.filename = ""


async def read_form(
    request: Request[Any, Any, Any],
    form: UploadForm,
    field: str,
    files: FileStore,
    disk: Disk,
    owner: str,
) -> None:
    """Read the body of `request` into `form`. Its file is the part `field`, and `owner`'s.

    Raises `BadRequest`, `StoreFull`, `OSError`, and `HungUp`; `form` then has what came before.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise BadRequest("a body of the type multipart/form-data is needed")
    reader = _Reader(form, field, files, disk, owner)
    try:
        with PushMultipartParser(boundary, max_segment_count=_MAX_PARTS) as parser:
            async with aclosing(_body(request)) as body:
                async for chunk in body:
                    for event in parser.parse(chunk):
                        await reader.take(event)
    except (MultipartError, UnicodeDecodeError) as error:
        raise BadRequest(f"the form cannot be read: {error}", code="invalid_form") from error


async def _body(request: Request[Any, Any, Any]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except InternalServerException as error:
        raise HungUp from error


class _Reader:
    """Puts the parts of a form where they belong."""

    def __init__(
        self, form: UploadForm, field: str, files: FileStore, disk: Disk, owner: str
    ) -> None:
        self._form = form
        self._field = field
        self._files = files
        self._disk = disk
        self._owner = owner
        self._name = ""
        self._data = bytearray()

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """The beginning of a part, some of its content, or its end."""
        if isinstance(event, MultipartSegment):
            await self._begin(event)
        elif event is not None:
            self._data += event
            await self._have()
        elif self._name == self._field:
            await self._flush()
        else:
            self._form.fields[self._name] = self._data.decode()

    async def _begin(self, part: MultipartSegment) -> None:
        self._name = part.name
        self._data = bytearray()
        if part.name in self._form.fields or (part.name == self._field and self._form.upload):
            raise BadRequest(f"{part.name}: there twice", part.name)
        if part.name == self._field:
            self._form.filename = part.filename or ""
            self._form.upload = await self._disk(self._files.begin, self._owner)

    async def _have(self) -> None:
        if self._name != self._field:
            if len(self._data) > _MAX_FIELD_BYTES:
                raise BadRequest(f"{self._name[:100]}: too long", self._name[:100])
        elif len(self._data) >= _PIECE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        data, self._data = bytes(self._data), bytearray()
        assert self._form.upload is not None
        await self._disk(self._files.extend, self._form.upload, data)
