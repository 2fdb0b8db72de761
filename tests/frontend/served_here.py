"""Fixtures of test files that have a front end of their own, on the event loop of the file: they
make it in a fixture `shared`, or `core`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio

from tests.frontend.stand_in_core import StandInCore
from tests.patience import PATIENCE_SECONDS


@pytest_asyncio.fixture(loop_scope="module")
async def core(shared: StandInCore) -> StandInCore:
    """With nothing left of the test before."""
    await shared.quiet()
    shared.frames.clear()
    shared.script()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def http(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client
