"""An application that cannot start says so in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from litestar import Litestar

from appliance.errors import ApplianceError
from appliance.http.lifespan import Lifespan


class House:
    """Notes what happens to an application; begins and ends as the test says."""

    def __init__(self, *, start: BaseException | None = None, end: BaseException | None = None):
        self.life: list[str] = []
        self._start, self._end = start, end

    @asynccontextmanager
    async def running(self, app: Litestar) -> AsyncIterator[None]:
        if self._start is not None:
            raise self._start
        self.life.append("started")
        yield
        self.life.append("ended")
        if self._end is not None:
            raise self._end

    def application(self) -> Litestar:
        return Litestar(lifespan=[self.running], logging_config=None)


async def test_a_life() -> None:
    """It starts and ends once, however often it is told to end."""
    house = House()
    lifespan = Lifespan(house.application())
    await lifespan.shutdown()
    assert house.life == []

    await lifespan.startup()
    assert house.life == ["started"]
    await lifespan.shutdown()
    await lifespan.shutdown()
    assert house.life == ["started", "ended"]


async def test_what_it_cannot_start_for_is_raised() -> None:
    """The error itself, not the group that it comes in; nothing is left to end."""
    wrong = ApplianceError("another daemon has its batches there")
    lifespan = Lifespan(House(start=wrong).application())
    with pytest.raises(ApplianceError) as raised:
        await lifespan.startup()

    assert raised.value is wrong
    await lifespan.shutdown()


async def test_what_it_cannot_end_for_is_raised() -> None:
    """Once: it has ended then."""
    wrong = OSError("the disk is gone")
    lifespan = Lifespan(House(end=wrong).application())
    await lifespan.startup()
    with pytest.raises(OSError, match="the disk is gone") as raised:
        await lifespan.shutdown()

    assert raised.value is wrong
    await lifespan.shutdown()


async def test_an_application_that_knows_no_lifespan() -> None:
    """It need not have one."""
    asked = []

    async def application(scope: dict[str, str], receive: object, send: object) -> None:
        asked.append(scope["type"])

    lifespan = Lifespan(application)
    async with asyncio.timeout(10):
        await lifespan.startup()
        await lifespan.shutdown()
    assert asked == ["lifespan"]
