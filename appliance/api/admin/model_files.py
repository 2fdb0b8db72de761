"""The files of this box's checkpoints for other boxes: which there are, and a file or a part of it.

Files are read piece by piece in threads, a few at a time, and hashed one after the other, so
that neither the event loop nor the disk is taken from requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.batches.disk import Disk
from appliance.checkpoints.peers.offer import Digests, NotOffered, OfferedFile, offered
from appliance.errors import PullError
from appliance.http.errors import ApiError
from appliance.http.json import json_answer
from appliance.http.streaming import Streamed
from appliance.service.interface import ModelNotFound, Service
from appliance.service.threads import in_own_thread

PIECE_BYTES: Final = 1 << 20
MAX_TRANSFERS: Final = 4
"""Files that are sent at once."""
DIGEST_SECONDS: Final = 10.0
"""A list is answered after this long at most; digests that are not found by then are null."""
RETRY_SECONDS: Final = 2

_FILES: Final = re.compile(r"/files(?:/|$)")
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?", re.ASCII)


def names_files(target: str) -> bool:
    """Whether what follows ``/api/models/`` may be files of a model."""
    return _FILES.search(target) is not None


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint. `modified` is a Unix time in seconds; `sha256` is null until it was
    computed."""

    path: str
    bytes: int
    modified: int
    sha256: str | None


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/models/NAME/files``."""

    model: str
    complete: bool
    """Whether all have their `sha256`; if not, ask again."""
    files: tuple[ModelFile, ...]


class OfferedModels:
    """Answers what other boxes ask of checkpoints here."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._digests = Digests()
        self._hashing: dict[Path, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._disk = Disk()
        self._sending = 0

    async def answer(self, request: Request[Any, Any, Any], target: str) -> ASGIResponse:
        """To ``NAME/files`` or ``NAME/files/PATH``. Raises `ModelNotFound` for another target, or
        a model that the caller does not know."""
        name, path = self._split(target)
        folder = self._folder(name)
        if path is None:
            return json_answer(await self._listed(name, folder, await self._offered(folder)))
        return await self._sent(request, folder, path)

    def _split(self, target: str) -> tuple[str, str | None]:
        """A model and the path of a file, None for all of them. Names may have slashes, and so may
        paths: the first part that is a model is meant."""
        first = None
        for found in _FILES.finditer(target):
            name, path = target[: found.start()], target[found.end() :]
            first = first or name
            with contextlib.suppress(ModelNotFound):
                self._service.model(name)
                return name, path if found[0].endswith("/") else None
        raise ModelNotFound(first or target)

    def _folder(self, name: str) -> Path:
        card = self._service.model(name)
        facts = self._service.model_activity(card.model).facts
        if facts is None:
            message = f"{name} is a model of another server, which has its files: ask that one"
            raise ApiError(409, message, param="model", code="remote_model")
        if card.base:
            message = f"{name} is an adapter: only files of models are offered; copy its folder"
            raise ApiError(409, message, param="model", code="files_not_offered")
        return Path(facts.path)

    async def _offered(self, folder: Path) -> dict[str, OfferedFile]:
        try:
            return await self._disk(offered, folder)
        except PullError as error:
            raise _not_offered(str(error)) from error
        except OSError as error:
            raise _not_offered(f"its files cannot be read: {error.strerror}") from error

    async def _listed(self, name: str, folder: Path, files: dict[str, OfferedFile]) -> ModelFiles:
        if any(self._digests.of(file) is None for file in files.values()):
            await asyncio.wait({self._hash(folder, files)}, timeout=DIGEST_SECONDS)
        listed = tuple(
            ModelFile(
                path=file.name,
                bytes=file.nbytes,
                modified=file.modified,
                sha256=self._digests.of(file),
            )
            for file in files.values()
        )
        complete = all(file.sha256 is not None for file in listed)
        return ModelFiles(model=name, complete=complete, files=listed)

    def _hash(self, folder: Path, files: dict[str, OfferedFile]) -> asyncio.Task[None]:
        """The work on digests of a checkpoint that is under way, or begins."""
        if (task := self._hashing.get(folder)) is None:
            task = asyncio.create_task(self._find(folder, files))
            self._hashing[folder] = task
        return task

    async def _find(self, folder: Path, files: dict[str, OfferedFile]) -> None:
        try:
            async with self._one_at_a_time:
                find = self._digests.find
                await in_own_thread(lambda: find(files.values()), "digests")
        finally:
            del self._hashing[folder]

    async def _sent(self, request: Request[Any, Any, Any], folder: Path, path: str) -> ASGIResponse:
        if self._sending >= MAX_TRANSFERS:
            raise ApiError(
                503,
                f"{MAX_TRANSFERS} files are sent to other boxes already; try again in "
                f"{RETRY_SECONDS} s",
                code="transfers_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        with self._one_more():
            files = await self._offered(folder)
            if path not in files:
                raise _no_file(path)
            file = files[path]
            part = part_of(request.headers, file.nbytes)
            try:
                opened = await self._disk(file.open)
            except FileNotFoundError as error:
                raise _no_file(file.name) from error
            except NotOffered as error:
                raise _not_offered(str(error)) from error
            except OSError as error:
                raise _not_offered(f"{file.name} cannot be read: {error.strerror}") from error
        # It counts itself before anything else runs: nothing is waited for until then.
        return _Sent(self, opened, part, file.nbytes)

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[None]:
        self._sending += 1
        try:
            yield
        finally:
            self._sending -= 1

    def read(self, opened: BinaryIO, nbytes: int) -> asyncio.Future[bytes]:
        return self._disk.begin(opened.read, nbytes)


class _Sent(Streamed):
    """Sends a file, or a part of it, and closes it once no thread reads it any more."""

    def __init__(
        self, models: OfferedModels, opened: BinaryIO, part: range | None, nbytes: int
    ) -> None:
        headers = {"accept-ranges": "bytes", "cache-control": "no-store"}
        whole = range(nbytes)
        if part is not None:
            headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{nbytes}"
        headers["content-length"] = str(len(whole if part is None else part))
        super().__init__(
            self._pieces(whole if part is None else part),
            "application/octet-stream",
            headers,
        )
        self.status_code = 200 if part is None else 206
        self._models = models
        self._opened = opened
        self._reading: asyncio.Future[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as held:
            held.enter_context(self._models._one_more())
            held.enter_context(self._opened)
            try:
                await super().__call__(scope, receive, send)
            finally:
                if self._reading is not None and not self._reading.done():
                    # The thread goes on, and its descriptor may by then be that of another file.
                    later = held.pop_all()
                    self._reading.add_done_callback(lambda _: later.close())

    async def _pieces(self, part: range) -> AsyncIterator[bytes]:
        self._opened.seek(part.start)
        left = len(part)
        while left:
            self._reading = self._models.read(self._opened, min(PIECE_BYTES, left))
            piece = await asyncio.shield(self._reading)
            if not piece:
                raise EOFError("the file became shorter while it was sent")  # ends the connection
            left -= len(piece)
            yield piece


def part_of(headers: Any, nbytes: int) -> range | None:
    """The bytes that a request wants; None for all, also if it asks for several parts. Raises
    `ApiError` for what is behind the end."""
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or "if-range" in headers:
        return None
    first, last = int(match[1]), nbytes - 1
    if match[2] is not None:
        if int(match[2]) < first:
            return None
        last = min(last, int(match[2]))
    if first >= nbytes:
        raise ApiError(
            416,
            f"Range: the file has {nbytes} bytes",
            param="Range",
            code="range_not_satisfiable",
            headers={"Content-Range": f"bytes */{nbytes}"},
        )
    return range(first, last + 1)


def _no_file(path: str) -> ApiError:
    message = f"the checkpoint has no file {path[:200]!r} to offer: GET its files for those it has"
    return ApiError(404, message, param="path", code="file_not_found")


def _not_offered(why: str) -> ApiError:
    return ApiError(409, why, param="model", code="files_not_offered")
