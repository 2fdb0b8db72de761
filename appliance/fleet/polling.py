"""Asks boxes how they are: many at the same time, and each for a bounded time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

import httpx

from appliance.fleet.box_addresses import Box
from appliance.fleet.endpoints import Polled

POLL_SECONDS: Final = 2.0
"""A box that does not answer for so long gives no answer."""
AT_ONCE: Final = 256
"""More boxes than that take turns: a process has about a thousand files."""


class NoAnswer(NamedTuple):
    """A box could not be asked."""

    reason: str


class BoxPoller:
    """Asks with `key`, if boxes want one. Used in one event loop, within ``async with``."""

    def __init__(self, key: str | None) -> None:
        self._client = httpx.AsyncClient(
            headers=bearer(key),
            timeout=POLL_SECONDS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE),
        )
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> BoxPoller:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def poll(self, box: Box) -> Polled | NoAnswer:
        """Its answers to ``/readyz`` and ``/api/load``."""
        try:
            async with self._turns, asyncio.timeout(POLL_SECONDS):  # httpx's are for one read each
                ready = await self._client.get(f"{box.url}/readyz")
                load = await self._client.get(f"{box.url}/api/load")
        except (httpx.HTTPError, TimeoutError) as error:
            return NoAnswer(reason_of(error, POLL_SECONDS))
        return Polled(ready.status_code, load.status_code, load.content, ready.content)

    async def poll_all(self, boxes: Sequence[Box]) -> dict[str, Polled | None]:
        """The answers of all boxes, by name; None of a box that gave none."""
        answers = await asyncio.gather(*[self.poll(box) for box in boxes])
        return {
            box.name: None if isinstance(answer, NoAnswer) else answer
            for box, answer in zip(boxes, answers, strict=True)
        }

    async def version(self, box: Box) -> bytes:
        """Its answer to ``/version``; empty if it gives none."""
        try:
            async with self._turns, asyncio.timeout(POLL_SECONDS):
                answer = await self._client.get(f"{box.url}/version")
        except (httpx.HTTPError, TimeoutError):
            return b""
        return answer.content if answer.status_code == 200 else b""


def bearer(key: str | None) -> dict[str, str]:
    """Headers with a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def reason_of(error: Exception, seconds: float) -> str:
    """Why there was no answer, in a few words."""
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return f"no answer within {seconds:g} s"
    cause: BaseException | None = error
    while cause is not None:  # httpx says that all attempts failed; the cause below says why
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
