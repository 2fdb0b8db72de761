"""What happens meanwhile: workers are killed, policies changed, requests cancelled.

Each does so until it is told to stop, and finishes what it is about: what was done is what the
daemon did, whenever the end comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks.endurance.connection import Closed, ask_json


@dataclass
class Disturbances:
    """One who disturbs; what was done."""

    host: str
    port: int
    dice: random.Random
    killed: list[int] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    async def kill_workers(self, every_seconds: float, stop: asyncio.Event) -> None:
        """Of those that are up one, at random, dies of a SIGKILL, again and again."""
        async for _ in _ticks(every_seconds, stop):
            status = await self._ask("GET", "/api/status")
            up = [i["pid"] for i in status["instances"] if i["state"] == "up" and i["pid"]]
            if up:
                victim = self.dice.choice(up)
                with contextlib.suppress(ProcessLookupError):  # it was quicker
                    os.kill(victim, signal.SIGKILL)
                    self.killed.append(victim)

    async def change_policies(
        self, every_seconds: float, names: list[str], stop: asyncio.Event
    ) -> None:
        """Each policy decides in turn."""
        async for tick in _ticks(every_seconds, stop):
            name = names[tick % len(names)]
            await self._ask("PUT", "/api/policies", {"use": [name]})
            self.policies.append(name)

    async def cancel_requests(self, every_seconds: float, stop: asyncio.Event) -> None:
        """An operator ends a random request, whoever's it is."""
        async for _ in _ticks(every_seconds, stop):
            shown = await self._ask("GET", "/api/requests")
            live = [request["id"] for request in shown["requests"]]
            if live:
                name = self.dice.choice(live)
                status, _ = await ask_json(self.host, self.port, "DELETE", f"/api/requests/{name}")
                if status < 300:
                    self.cancelled.append(name)
                elif status != 404:  # it ended meanwhile
                    self.complaints.append(f"DELETE of {name}: {status}")

    async def _ask(self, method: str, path: str, body: object = None):  # type: ignore[no-untyped-def]
        try:
            status, answer = await ask_json(self.host, self.port, method, path, body)
        except (Closed, OSError) as error:
            self.complaints.append(f"{method} {path}: {type(error).__name__}: {error}")
            raise
        if status != 200:
            self.complaints.append(f"{method} {path}: {status} {answer}")
        return answer


async def _ticks(every_seconds: float, stop: asyncio.Event) -> AsyncIterator[int]:
    """Numbers from 0, so far apart however long is taken for each, until it is to stop."""
    began = asyncio.get_running_loop().time()
    for tick in itertools.count():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began + (tick + 1) * every_seconds):
                await stop.wait()
        if stop.is_set():
            return
        yield tick
