"""A box without models, to look at what reaches a box: it says what it was sent, streams when it is
told to, and holds requests until all of them are there.

Its metrics have the names and the labels of an appliance's; the model `plain` is resident on it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.observability.registry import Registry

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MODEL = "plain"
SILENCE_SECONDS = 12.0
"""Longer than any timeout in envoy.yaml that is not meant for requests."""


@dataclass
class PlainBox:
    """An ASGI application."""

    reached: int = 0
    """Requests but those for metrics and for its state."""
    scrapes: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client hung up."""
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """The next event of a stream may go."""
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0

    def metrics(self) -> bytes:
        registry = Registry()
        for name in ("requests_waiting", "requests_running", "kv_usage_ratio"):
            registry.gauge(f"appliance_{name}", "As of an appliance.").set(0)
        labels = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
        info = registry.gauge("appliance_models_info", "As of an appliance.", *labels)
        info.labels(MODEL, "", "1").set_to_current_time()
        return registry.exposition()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in ("/readyz", "/api/load"):
            await _answer(send, b'{"draining": false}')
        elif path == "/metrics":
            self.scrapes += 1
            await _answer(send, self.metrics(), "text/plain; version=0.0.4")
        else:
            self.reached += 1
            await self.serve(scope, receive, send)

    async def serve(self, scope: Any, receive: Receive, send: Send) -> None:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        told = headers.get("x-told", "")
        if told == "stream":
            await self.stream(receive, send)
            return
        if told == "silence":
            await asyncio.sleep(SILENCE_SECONDS)
        if told == "hold":
            self.held += 1
            await self.all_here.wait()
        seen = {"headers": headers, "bytes": len(body)}
        await _answer(send, json.dumps(seen).encode())

    async def stream(self, receive: Receive, send: Send) -> None:
        """An event each time that the gate opens, until the client hangs up."""
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            opened = asyncio.ensure_future(self.gate.acquire())
            await asyncio.wait((opened, gone), return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                opened.cancel()
                break
            event = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        self.left.set()


async def _answer(send: Send, body: bytes, kind: str = "application/json") -> None:
    head = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})
