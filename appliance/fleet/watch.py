"""Follows boxes: what each is doing, second by second, as rows for people.

A row of a box that cannot be asked has its state and the reason, and nothing that it said before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

import httpx
import msgspec

from appliance.errors import FleetError
from appliance.fleet.box_addresses import Box
from appliance.fleet.endpoints import Polled, why_not
from appliance.fleet.front import LOADS_PATH
from appliance.fleet.polling import BoxPoller, NoAnswer, bearer, reason_of

EVERY_SECONDS: Final = 1.0
FRONT_SECONDS: Final = 10.0
"""A front asks all its boxes before it answers."""

Row: TypeAlias = dict[str, Any]
"""A JSON object: `box`, `url`, `state`, `reason`; of a box that says its load, `version` (of its
software; empty if that is not known) and of the fields of ``GET /api/load`` those below."""
Sleep: TypeAlias = Callable[[float], Awaitable[None]]

_LOAD_FIELDS: Final = (
    "catalogue", "resident", "coming", "host", "waiting", "waiting_by_model", "running",
    "queue_age_seconds", "pool_free_bytes", "attainment",
)  # fmt: skip


class _Readiness(msgspec.Struct):
    """As much of ``GET /readyz`` as is needed."""

    reasons: list[str] = []


class _Version(msgspec.Struct):
    version: str = ""


class _Load(msgspec.Struct, kw_only=True):
    """``GET /api/load``, also of versions that said less."""

    catalogue: list[str]
    resident: list[str] = []
    coming: list[str] = []
    host: list[str] = []
    waiting: int = 0
    waiting_by_model: dict[str, int] | None = None
    running: int = 0
    queue_age_seconds: float = 0.0
    pool_free_bytes: int = 0
    attainment: float | None = None
    draining: bool = False


class _FrontRow(msgspec.Struct):
    """A row of a front's ``GET /api/fleet``."""

    box: str
    status: int
    load: msgspec.Raw = msgspec.Raw(b"null")


class _FrontRows(msgspec.Struct):
    boxes: list[_FrontRow]


def row_of(name: str, url: str, answer: Polled | NoAnswer, version: str) -> Row:
    """A box in a row: ready, draining, not ready, refused (the key does not open its load), failed
    (what it answers is of no use), or unreachable."""
    row: Row = {"box": name, "url": url, "state": "unreachable", "reason": ""}
    if isinstance(answer, NoAnswer):
        return row | {"reason": answer.reason}
    load = _decoded(answer.load, _Load) if answer.load_status == 200 else None
    if load is None:
        try:
            return row | {"state": "failed", "reason": _failure(answer)}
        except FleetError as error:
            return row | {"state": "refused", "reason": str(error)}
    row |= {"version": version, **{name: getattr(load, name) for name in _LOAD_FIELDS}}
    if load.draining:
        return row | {"state": "draining"}
    if answer.ready_status != 200:
        ready = _decoded(answer.ready, _Readiness) or _Readiness()
        return row | {"state": "not ready", "reason": "; ".join(ready.reasons)}
    return row | {"state": "ready"}


def _failure(answer: Polled) -> str:
    """Of a box whose load is not to be had. Raises `FleetError` if that is because of the key."""
    reason = why_not(answer._replace(ready_status=200))
    return "its answer is not the appliance's" if reason in (None, "draining") else str(reason)


def read_front(body: bytes) -> list[Row]:
    """The rows of a front. Raises `FleetError` for what is none of its answers."""
    found = _decoded(body, _FrontRows)
    if found is None:
        raise FleetError("what answers is not the front of a fleet")
    return [
        row_of(
            one.box,
            "",
            Polled(200, one.status, bytes(one.load)) if one.status else NoAnswer("no answer"),
            "",
        )
        for one in found.boxes
    ]


def _decoded(body: bytes, kind: type[Any]) -> Any:
    """None for what is not of this kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class BoxWatch:
    """Asks each box every second, on its own: one that does not answer holds up no other."""

    def __init__(self, boxes: Sequence[Box], key: str | None, sleep: Sleep = asyncio.sleep) -> None:
        self.name = f"{len(boxes)} boxes" if len(boxes) > 1 else boxes[0].url
        self._boxes = tuple(boxes)
        self._key = key
        self._sleep = sleep
        self._rows: dict[str, Row] = {}

    async def once(self) -> list[Row]:
        """All rows, as of now."""
        async with BoxPoller(self._key) as poller:
            await asyncio.gather(*[self._ask(poller, box) for box in self._boxes])
        return self._known()

    async def follow(self) -> AsyncIterator[list[Row] | str]:
        """The rows of all boxes, whenever one of them has news."""
        for box in self._boxes:
            row = row_of(box.name, box.url, NoAnswer(""), "")
            self._rows[box.name] = row | {"state": "asking"}
        news = asyncio.Event()
        async with BoxPoller(self._key) as poller:
            tasks = [
                asyncio.ensure_future(self._follow(poller, box, news.set)) for box in self._boxes
            ]
            for task in tasks:
                task.add_done_callback(lambda _: news.set())
            try:
                while True:
                    await news.wait()
                    news.clear()
                    for task in tasks:
                        if task.done():
                            task.result()  # raises: a poll that ends is a defect
                    yield self._known()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, poller: BoxPoller, box: Box, news: Callable[[], None]) -> None:
        while True:
            next_time = asyncio.ensure_future(self._sleep(EVERY_SECONDS))
            try:
                await self._ask(poller, box)
                news()
                await next_time
            finally:
                next_time.cancel()

    async def _ask(self, poller: BoxPoller, box: Box) -> None:
        """The version is asked for when a box comes: another one is another process."""
        answer = await poller.poll(box)
        version = self._rows.get(box.name, {}).get("version", "")
        if not version and isinstance(answer, Polled):
            found = _decoded(await poller.version(box), _Version)
            version = "" if found is None else found.version
        self._rows[box.name] = row_of(box.name, box.url, answer, version)

    def _known(self) -> list[Row]:
        """In the order in which the boxes were given."""
        return [self._rows[box.name] for box in self._boxes]


class FrontWatch:
    """Asks the front of a fleet every second, which asks the boxes."""

    def __init__(self, url: str, key: str | None, sleep: Sleep = asyncio.sleep) -> None:
        self.name = url
        self._url = url.rstrip("/") + LOADS_PATH
        self._key = key
        self._sleep = sleep

    async def once(self) -> list[Row]:
        """All rows, as of now. Raises `FleetError`, which says why there are none."""
        async with self._client() as client:
            return await self._ask(client)

    async def follow(self) -> AsyncIterator[list[Row] | str]:
        """The rows of all boxes, or why there are none now."""
        async with self._client() as client:
            while True:
                try:
                    yield await self._ask(client)
                except FleetError as error:
                    yield str(error)
                await self._sleep(EVERY_SECONDS)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=bearer(self._key), timeout=FRONT_SECONDS)

    async def _ask(self, client: httpx.AsyncClient) -> list[Row]:
        try:
            async with asyncio.timeout(FRONT_SECONDS):
                answer = await client.get(self._url)
        except (httpx.HTTPError, TimeoutError) as error:
            raise FleetError(reason_of(error, FRONT_SECONDS)) from error
        if answer.status_code == 404:
            raise FleetError(
                f"{LOADS_PATH} is 404: this is not the front of a fleet; give --box NAME=URL for "
                "each box"
            )
        if answer.status_code != 200:
            raise FleetError(f"{LOADS_PATH} is {answer.status_code}")
        return read_front(answer.content)
