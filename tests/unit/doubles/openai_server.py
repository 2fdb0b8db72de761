"""A server with OpenAI's API on a real socket, for faults: it answers as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: Any
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the one who asked has closed the connection."""


Answering = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


class OpenAiServer:
    """What it was asked is in `asked`; `answering` may be replaced."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answering: Answering = in_three_words
        self.port = 0
        self._news = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until_asked(self, count: int = 1) -> Asked:
        while len(self.asked) < count:
            self._news.clear()
            await self._news.wait()
        return self.asked[count - 1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) != b"":
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                asked = Asked(first.split()[1], headers, json.loads(body))
                self.asked.append(asked)
                self._news.set()
                answer = asyncio.ensure_future(self.answering(asked, writer))
                left = asyncio.ensure_future(_until_left(reader))
                await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    asked.left.set()
                    answer.cancel()
                    return
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                answer.result()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _until_left(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():  # noqa: ASYNC110 - nothing is read that a next request would have
        await asyncio.sleep(0.005)


@asynccontextmanager
async def openai_server() -> AsyncIterator[OpenAiServer]:
    """One that serves."""
    server = OpenAiServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 24)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


# --- answers -------------------------------------------------------------------------------------


def raw(status: int, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"content-type: {kind}", f"content-length: {len(body)}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def chunk(text: str | None, model: str, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return event({"id": "c-1", "model": model, "choices": choices, **more})


async def in_three_words(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A whole answer to anything, streamed or not."""
    body = asked.body
    if body.get("stream"):
        writer.write(STREAM_HEAD)
        for word in ("one", "two", "three"):
            writer.write(chunk(word, body["model"], usage=None))
            await writer.drain()
        if body.get("stream_options", {}).get("include_usage"):
            writer.write(chunk(None, body["model"], usage=USAGE))
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()
        return
    message = {"role": "assistant", "content": "one two three"}
    answer = {"id": "c-1", "model": body["model"], "usage": USAGE}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    writer.write(raw(200, json.dumps({**answer, "choices": choices}).encode()))
    await writer.drain()


def saying(data: bytes) -> Answering:
    """What sends these bytes, and closes the connection."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return answer


def saying_then_nothing(data: bytes) -> Answering:
    """What sends these bytes, and keeps the connection."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.Event().wait()

    return answer
