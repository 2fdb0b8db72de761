"""Starts and ends an ASGI application, and raises what it raises: uvicorn would log a traceback,
and end the process with a status of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Lifespan:
    """Takes the place of uvicorn's. Used on one event loop, once."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self.state: dict[str, Any] = {}
        self.should_exit = False
        self._application = application
        self._asked: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        """Raises what the application could not start for."""
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
        }
        life = self._application(scope, self._asked.get, self._answers.put)
        self._life = asyncio.create_task(life)
        await self._step("startup")

    async def shutdown(self) -> None:
        """Once it has started; idempotent. Raises what the application raises."""
        if self._life is not None and not self._life.done():
            await self._step("shutdown")
            await self._life

    async def _step(self, name: str) -> None:
        assert self._life is not None
        self._asked.put_nowait({"type": f"lifespan.{name}"})
        answer = asyncio.create_task(self._answers.get())
        await asyncio.wait({answer, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.result()["type"] == f"lifespan.{name}.complete":
            return
        answer.cancel()
        try:
            await self._life
        except BaseExceptionGroup as group:  # of one: a task group wrapped the error
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from error.__cause__
