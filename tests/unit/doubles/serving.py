"""An application as clients meet it: without a network, on a loopback port, by command line."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import uvicorn
from click.testing import CliRunner, Result
from litestar import Litestar

from appliance.cli.main import cli
from appliance.http.connections import Connection

Call = Callable[..., Awaitable[Result]]


@asynccontextmanager
async def unserved(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app` without a network."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        yield client


@asynccontextmanager
async def served(app: Any, http: type[Connection] = Connection) -> AsyncIterator[int]:
    """The port on which `app` answers meanwhile: a real server in the test's own event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http=http, log_config=None, timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def commanded(app: Litestar, *command: str) -> AsyncIterator[Call]:
    """Runs `appliance`, or one of its groups of commands, against `app` on a port."""
    async with served(app) as port:

        async def run(*arguments: str) -> Result:
            line = [*command, *arguments, "--url", f"http://127.0.0.1:{port}"]
            return await asyncio.to_thread(CliRunner().invoke, cli, line)

        yield run


@asynccontextmanager
async def openai_client(app: Litestar) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of `app` on a port; it tries nothing twice."""
    async with (
        served(app) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(app: Litestar) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's, likewise."""
    async with (
        served(app) as port,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0
        ) as client,
    ):
        yield client
