"""Ollama's endpoints that fetch models and delete them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from litestar import Request, delete, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.api.admin.events import WatchResponse
from appliance.checkpoints.sources import Progress, Tell
from appliance.http.bodies import parse
from appliance.http.error_formats import ollama_error
from appliance.http.errors import ApiError, BadRequest, as_api_error
from appliance.http.json import json_answer
from appliance.service.interface import Inference, ModelNotFound
from appliance.service.settings import Settings

_LATEST = ":latest"
_SUCCESS = {"status": "success"}


class OllamaPull(msgspec.Struct, kw_only=True):
    """``POST /api/pull``; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    """Unless it is false, progress is sent line by line."""
    peer: str | None = msgspec.field(default=None, name="from")
    """The address of another box, of which it is a model (`catalog.peers`)."""
    add: bool | None = None
    """Unless it is false, the model is served then. If it is, the answer says where it is."""


class OllamaDelete(msgspec.Struct, kw_only=True):
    """``DELETE /api/delete``; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None


def ollama_pull_routes(service: Inference, settings: Settings | None) -> list[HTTPRouteHandler]:
    """What is served already is there: to pull it succeeds. Without `settings` nothing else can be
    pulled, and nothing is deleted. What is deleted is what was pulled; other models' files stay."""

    @post("/api/pull", status_code=200, operation_id="ollamaPull")
    async def pull(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), OllamaPull)
        source = _named(asked.model or asked.name)
        if asked.peer == "":
            raise BadRequest("from: give the address of a box, or leave it out", "from")
        streams = asked.stream is not False
        add = asked.add is not False
        # Another box may call a model so; Ollama's clients add it to any name.
        called = source if asked.peer else source.removesuffix(_LATEST)
        if add and {source, called} & {card.id for card in service.models()}:
            if not streams:
                return json_answer(_SUCCESS)
            return WatchResponse(_there(), "application/x-ndjson")
        if settings is None:
            raise ApiError(
                404,
                f"/api/pull is not supported: {source} is not served, and models are catalogued in "
                "the appliance's configuration",
            )
        pulling = partial(settings.pull_model, called, "", peer=asked.peer or "", add=add)
        if streams:
            return WatchResponse(_sent(pulling, add), "application/x-ndjson")
        return json_answer(_done(await pulling(lambda progress: None), add))

    if settings is None:
        return [pull]

    @delete("/api/delete", status_code=200, operation_id="ollamaDelete")
    async def remove(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), OllamaDelete)
        name = _named(asked.model or asked.name)
        try:
            await settings.remove_model(name, force=False, files=True)
        except ModelNotFound:
            if not name.endswith(_LATEST):
                raise
            await settings.remove_model(name.removesuffix(_LATEST), force=False, files=True)
        return ASGIResponse(body=b"", media_type="text/plain")  # no JSON is that short

    return [pull, remove]


def _named(name: str | None) -> str:
    if not name:
        raise BadRequest("model: a value is required", "model", "missing_field")
    return name


async def _there() -> AsyncIterator[bytes]:
    yield b'{"status":"pulling manifest"}\n'
    yield msgspec.json.encode(_SUCCESS) + b"\n"


def _done(path: str, add: bool) -> dict[str, str]:
    return _SUCCESS if add else {**_SUCCESS, "path": path}


async def _sent(pulling: Callable[[Tell], Awaitable[str]], add: bool) -> AsyncIterator[bytes]:
    """A pull as lines, to its end; a failure is the last one. A client that leaves leaves the pull
    alone: one that asks again finds what is there."""
    steps: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(progress: Progress) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, _line(progress))

    async def fetch() -> None:
        try:
            last = msgspec.json.encode(_done(await pulling(tell), add)) + b"\n"
        except Exception as error:
            last = ollama_error(as_api_error(error)) + b"\n"
        steps.put_nowait(last)
        steps.put_nowait(None)

    _pulls.add(task := asyncio.create_task(fetch()))
    task.add_done_callback(_pulls.discard)
    yield b'{"status":"pulling manifest"}\n'
    while (line := await steps.get()) is not None:
        yield line


_pulls: set[asyncio.Task[None]] = set()
"""Those that are under way: the loop itself does not hold them."""


def _line(progress: Progress) -> bytes:
    """In Ollama's words. Its digests name files by their contents, ours by their names."""
    if not progress.total_bytes:
        what = {"verifying": "verifying sha256 digest"}.get(progress.status, progress.status)
        return msgspec.json.encode({"status": f"{what} {progress.file}".rstrip()}) + b"\n"
    digest = f"sha256:{hashlib.sha256(progress.file.encode()).hexdigest()}"
    line = {
        "status": f"pulling {progress.file}",
        "digest": digest,
        "total": progress.total_bytes,
        "completed": progress.done_bytes,
    }
    return msgspec.json.encode(line) + b"\n"
