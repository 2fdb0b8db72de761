"""The images in a body: found before vLLM reads it, called as its client calls them, and looked at.

What is not found here, vLLM is not given either (`appliance.frontend.serving.media`). Requests with
images take turns, as each takes much memory and time until it is submitted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from appliance.frontend.body_values import decoded
from appliance.frontend.calls import Call
from appliance.frontend.core import Core
from appliance.frontend.image_files import BadImage, checked_size, decoded_base64, decoded_url
from appliance.http.body_budget import Client
from appliance.http.errors import ApiError, BadRequest

T = TypeVar("T")

AT_ONCE: Final = 2
"""Requests of a front end whose images are decoded and prepared; of a client one."""
MAX_ALL_PIXELS: Final = 80_000_000
"""Of all images of a request, whose shorter sides count as what they may be scaled to."""

_MESSAGES: Final = frozenset(
    {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/api/chat"}
)
_INPUTS: Final = frozenset({"/v1/responses", "/v1/responses/input_tokens"})
_GENERATE: Final = "/api/generate"
_REMOTE: Final = re.compile("https?:", re.IGNORECASE)
_NOT_READ: Final = (
    *("image_embeds", "image_pil", "prompt_embeds", "audio_embeds", "video_embeds"),
    *("audio_url", "input_audio", "video_url", "file", "input_file", "document"),
)
"""Kinds of parts, and fields that make a part one of them."""


class Image(NamedTuple):
    """An image that a body sends."""

    name: str
    """The field, as in ``messages[0].content[1].image_url``."""
    sent: object
    """A URL, or base64; what else it is, is refused."""
    is_url: bool
    fetched: bytes | None = None
    """The file, if it was fetched."""

    @property
    def remote(self) -> str:
        """The URL that it is to be fetched from; empty if it is here."""
        here = self.fetched is not None or not self.is_url or not isinstance(self.sent, str)
        return "" if here or not _REMOTE.match(str(self.sent)) else str(self.sent)

    def file(self) -> bytes:
        """Raises `BadImage`."""
        if self.fetched is not None:
            return self.fetched
        if not isinstance(self.sent, str) or not self.sent:
            raise BadImage("send the image in base64")
        return decoded_url(self.sent) if self.is_url else decoded_base64(self.sent)

    def key(self) -> int:
        """What `call.images` knows it by."""
        return key_of_url(str(self.sent)) if self.is_url else hash(str(self.sent))


class Images(NamedTuple):
    """Those of a body."""

    images: tuple[Image, ...]
    most: int
    """As many as the model reads in a prompt."""

    @property
    def characters(self) -> int:
        """Of the body, which are no text."""
        return sum(len(image.sent) for image in self.images if isinstance(image.sent, str))


NO_IMAGES: Final = Images((), 0)


def key_of_url(url: str) -> int:
    """What `call.images` knows an image by: its base64, or the whole URL of another one."""
    return hash(url if _REMOTE.match(url) else url.partition(",")[2])


# --- finding them --------------------------------------------------------------------------------


def find(path: str, fields: Mapping[str, Any]) -> list[Image]:
    """The images in a body for `path`. Raises `BadRequest` for parts that are neither text nor
    images."""
    if path == _GENERATE:
        return list(_listed("images", decoded(fields.get("images"))))
    if path in _MESSAGES:
        name = "messages"
    elif path in _INPUTS:
        name = "input"
    else:
        return []
    found: list[Image] = []
    messages = decoded(fields.get(name))
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            found += _of_message(f"{name}[{i}]", message)
    return found


def _of_message(name: str, message: Mapping[str, Any]) -> Iterator[Image]:
    yield from _listed(f"{name}.images", message.get("images"))
    for field in ("content", "output"):
        parts = message.get(field)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield from _of_part(f"{name}.{field}[{i}]", part)


def _listed(name: str, images: object) -> Iterator[Image]:
    """Ollama's."""
    for i, image in enumerate(images if isinstance(images, list) else ()):
        yield Image(f"{name}[{i}]", image, is_url=False)


def _of_part(name: str, part: Mapping[str, Any]) -> Iterator[Image]:
    kind = part.get("type")
    if kind == "tool_result":  # Anthropic's, which has parts of its own
        yield from _of_message(name, part)
        return
    for other in _NOT_READ:
        if kind == other or other in part:
            message = f"{name}: this model reads no {other}: send text and images"
            raise BadRequest(message, name, "unsupported_part")
    if kind == "image":
        yield _sourced(f"{name}.source", part.get("source"))
    elif kind in ("image_url", "input_image") or "image_url" in part:
        if part.get("uuid") is not None:
            message = f"{name}.uuid: images are known by their content: remove it"
            raise BadRequest(message, f"{name}.uuid", "unsupported_field")
        sent = part.get("image_url")
        url = sent.get("url") if isinstance(sent, dict) else sent
        yield Image(f"{name}.image_url", url, is_url=True)


def _sourced(name: str, source: object) -> Image:
    """Anthropic's."""
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "url":
        return Image(f"{name}.url", source.get("url"), is_url=True)
    if source.get("type") != "base64":
        raise BadRequest(f"{name}.type: send the image as base64", f"{name}.type", "invalid_image")
    return Image(f"{name}.data", source.get("data"), is_url=False)


# --- fetching them -------------------------------------------------------------------------------


async def fetch(core: Core, call: Call, sent: Images) -> Images:
    """The images with the files of those that are named by URL: the core fetches them, one after
    another, and they count as if they were in the body. Raises `BadRequest`, also for more images
    than a prompt may have, and `ApiError` for what may be tried again, such as `BodiesFull`."""
    images, most = sent
    if len(images) > most:
        message = f"{images[most].name}: a prompt of this model has at most {most} images"
        raise BadRequest(message, images[most].name, "too_many_images")
    files: dict[str, bytes] = {}
    found = []
    for image in images:
        if url := image.remote:
            if url not in files:
                fetched = await core.fetch_image(call, url)
                if fetched.busy:
                    raise _too_many_fetches(f"{image.name}: {fetched.refused}", image.name)
                if fetched.refused:
                    message = f"{image.name}: {fetched.refused}"
                    raise BadRequest(message, image.name, "invalid_image")
                call.keep(len(fetched.file))
                files[url] = call.fetched[image.key()] = fetched.file
            image = image._replace(fetched=files[url])
        found.append(image)
    return sent._replace(images=tuple(found))


def _too_many_fetches(message: str, field: str) -> ApiError:
    headers = {"Retry-After": "5"}
    return ApiError(429, message, param=field, code="too_many_fetches", headers=headers)


# --- looking at them -----------------------------------------------------------------------------


def look_at(sent: Images) -> dict[int, str]:
    """The names of images by their keys. Takes a while. Raises `BadRequest` for images that are
    no images, and for larger ones than a request may have."""
    pixels = 0
    for image in sent.images:
        try:
            pixels += checked_size(image.file()).prepared
            if pixels > MAX_ALL_PIXELS:
                raise BadImage(
                    f"with it the request has more than {MAX_ALL_PIXELS} pixels: send smaller ones"
                )
        except BadImage as error:
            raise BadRequest(f"{image.name}: {error}", image.name, "invalid_image") from error
    return {image.key(): image.name for image in sent.images}


threads: Final = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="images")
"""They look at images and decode them, and do nothing else."""


async def in_thread(
    call: Call, pool: ThreadPoolExecutor, function: Callable[..., T], *args: object
) -> T:
    """What a function returns that a thread calls for images of a call. If the call is cancelled
    meanwhile, the thread goes on: the call's turn lasts until it is done."""
    job = pool.submit(function, *args)
    call.image_work.add(job)
    try:
        return await asyncio.wrap_future(job)  # cancels the job if that has not begun
    finally:
        if job.done():
            call.image_work.discard(job)


class ImageTurns:
    """Whose images are looked at, decoded and prepared."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._of_client: WeakValueDictionary[Client, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, call: Call, client: Client, sent: Images) -> AsyncIterator[None]:
        """Wait for a turn of a client's call, and look at its images. It is over when the first
        request of the call is submitted, when `call.on_submit` is called for another reason, or
        with the block; but never before the threads that work for it are done. Raises
        `BadRequest`.
        """
        lock = self._of_client.setdefault(client, asyncio.Lock())
        # A client with many requests has one in line, before those of other clients that came
        # later: it waits for its own turn first.
        async with AsyncExitStack() as waiting:
            await waiting.enter_async_context(lock)
            await waiting.enter_async_context(self._free)
            waiting.pop_all()
        over = False

        def free(_: object = None) -> None:
            self._free.release()
            lock.release()

        def end() -> None:
            nonlocal over
            if over:
                return
            over = True
            jobs = [asyncio.wrap_future(job) for job in call.image_work if not job.done()]
            if jobs:
                asyncio.gather(*jobs, return_exceptions=True).add_done_callback(free)
            else:
                free()

        call.on_submit = end
        try:
            call.images = await in_thread(call, threads, look_at, sent)
            yield
        finally:
            end()
