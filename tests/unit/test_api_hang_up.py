"""Open streams over a real server: comments while waiting, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from appliance.api.app import create_app
from appliance.vocabulary import FinishReason
from tests.patience import PATIENCE_SECONDS

from .fake_service import FakeService, small_tokenizer
from .serving import served

pytestmark = pytest.mark.filterwarnings("error")


@asynccontextmanager
async def asking(
    service: FakeService,
    *,
    path: str = "/v1/completions",
    keep_alive_seconds: float = 1000,
    **fields: object,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection on which a completion was asked for, or something else at `path`."""
    app = create_app(service, keep_alive_seconds=keep_alive_seconds)
    if path == "/v1/completions":
        fields["prompt"] = "hello"
    body = json.dumps({"model": "small", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with asyncio.timeout(PATIENCE_SECONDS), served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        try:
            yield reader, writer
        finally:
            writer.close()


async def test_headers_and_comments_come_before_any_token() -> None:
    """A stream is open and kept alive while its model is not even loaded."""
    async with asking(FakeService(), keep_alive_seconds=0.01, stream=True) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            assert (await reader.readuntil(b"\n\n")).endswith(b"\r\n: keep-alive\n\n")

    assert b"200 OK" in head
    assert b"content-type: text/event-stream" in head


async def test_comments_fill_a_pause_between_tokens() -> None:
    """A request that was preempted keeps its stream alive, then goes on."""
    service = FakeService()
    async with asking(service, keep_alive_seconds=0.01, stream=True) as (reader, _):
        generation = await service.arrivals.get()
        generation.feed(small_tokenizer().encode("one"))
        await reader.readuntil(b'"one"')
        await reader.readuntil(b": keep-alive")
        generation.feed(small_tokenizer().encode("two"), FinishReason.LENGTH)
        await reader.readuntil(b'"two"')
        await reader.readuntil(b"data: [DONE]")


MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}


async def test_pings_keep_a_message_alive() -> None:
    """Anthropic's streams begin at once, and have events of their own for silence."""
    asked = {**MESSAGES, "max_tokens": 5, "stream": True}
    async with asking(FakeService(), path="/v1/messages", keep_alive_seconds=0.01, **asked) as (
        reader,
        _,
    ):
        await reader.readuntil(b"event: message_start\n")
        for _ in range(3):
            await reader.readuntil(b'event: ping\ndata: {"type":"ping"}\n\n')


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {**MESSAGES, "max_tokens": 5}),
        ("/api/chat", MESSAGES),
        ("/api/generate", {"prompt": "hello"}),
    ],
)
async def test_leaving_cancels_in_every_dialect(
    stream: bool, path: str, fields: dict[str, object]
) -> None:
    """A client that leaves before its first token takes its request with it."""
    service = FakeService()
    async with asking(service, path=path, stream=stream, **fields) as (_, writer):
        generation = await service.arrivals.get()
        writer.close()
        await generation.cancelled.wait()

    assert generation.reason == FinishReason.CANCELLED


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_client_that_leaves_cancels_all_its_choices(stream: bool, tokens: int) -> None:
    """Streaming or not, before the first token or after it: nothing is computed for nobody."""
    service = FakeService()
    async with asking(service, stream=stream, n=3) as (_, writer):
        generations = [await service.arrivals.get() for _ in range(3)]
        for generation in generations[:tokens]:
            generation.feed(small_tokenizer().encode("one"))
        writer.close()
        await writer.wait_closed()
        for generation in generations:
            await generation.cancelled.wait()

    assert [generation.reason for generation in generations] == [FinishReason.CANCELLED] * 3


async def test_a_client_that_stops_reading_and_leaves_is_noticed() -> None:
    """Also a stream that is stuck in sending ends when the client goes."""
    service = FakeService(lambda generation: generation.say("hello", None))
    body = json.dumps({"model": "small", "prompt": "hello", "stream": True}).encode()
    events: list[dict[str, object]] = [{"type": "http.request", "body": body, "more_body": False}]
    stuck = asyncio.Event()

    async def receive() -> dict[str, object]:
        if events:
            return events.pop()
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if b"hello" in bytes(message.get("body", b"")):  # type: ignore[call-overload]
            stuck.set()
            await asyncio.Event().wait()

    scope: dict[str, object] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
    }
    scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http"}
    async with asyncio.timeout(PATIENCE_SECONDS):
        await create_app(service)(scope, receive, send)  # type: ignore[arg-type]

    assert service.submitted[0].reason == FinishReason.CANCELLED


async def test_leaving_with_more_asked_for() -> None:
    """A client that sent another request behind the one that is being answered takes both along, as
    soon as it is written to: until then nothing is read of it."""
    service = FakeService()
    async with asking(service, keep_alive_seconds=0.01, stream=True) as (reader, writer):
        generation = await service.arrivals.get()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        writer.close()
        await generation.cancelled.wait()

    assert generation.reason == FinishReason.CANCELLED


async def test_leaving_before_all_was_said(caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves in the middle of its body is no error of ours: nothing is logged."""
    events: list[dict[str, object]] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b'{"model": "sm', "more_body": True},
    ]

    async def receive() -> dict[str, object]:
        return events.pop()

    async def send(message: dict[str, object]) -> None:
        statuses.append(message.get("status"))

    statuses: list[object] = []
    scope: dict[str, object] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
    }
    scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http"}
    await create_app(FakeService())(scope, receive, send)  # type: ignore[arg-type]

    assert (statuses[0], caplog.records) == (499, [])


async def test_tokens_that_come_together_are_one_chunk() -> None:
    """What is ready at once is sent at once."""
    service = FakeService(lambda generation: generation.say("hello world, one two"))
    async with asking(service, stream=True) as (reader, _):
        sent = await reader.readuntil(b"data: [DONE]")

    assert sent.count(b"data: {") == 1


async def test_a_choice_that_is_complete_is_not_cancelled() -> None:
    """Leaving cancels what still runs, not what has ended."""
    service = FakeService()
    async with asking(service, stream=True, n=2) as (reader, writer):
        done, running = [await service.arrivals.get() for _ in range(2)]
        done.say("one")
        await reader.readuntil(b'"length"')
        writer.close()
        await running.cancelled.wait()

    assert (done.reason, running.reason) == (None, FinishReason.CANCELLED)
