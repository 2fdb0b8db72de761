"""Boxes that answer what a test says, on real ports, and a front over their proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from appliance.fleet.box_proxy import BoxProxy
from appliance.fleet.calls import Answer, Call, Hint, Item
from appliance.fleet.front import Front
from appliance.fleet.known_boxes import KnownBoxes
from appliance.fleet.ranking import choose_residency_prefix
from tests.unit.doubles.serving import served

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]
LINES = [(b"content-type", b"application/x-ndjson")]


@dataclass
class ScriptedBox:
    """An ASGI application: what it was asked, and what it says."""

    models: tuple[str, ...] = ("small",)
    resident: tuple[str, ...] = ()
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: list(JSON))
    chunks: tuple[bytes, ...] = (b'{"said": "it"}',)
    draining: bool = False
    waits: asyncio.Event | None = None
    """Between chunks."""
    breaks: bool = False
    """Instead of ending."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        match scope["path"]:
            case "/readyz":
                await _whole(send, 503 if self.draining else 200, {"ok": not self.draining})
            case "/api/load":
                await _whole(send, 200, self.load())
            case "/v1/models":
                await _whole(send, 200, {"data": [{"id": name} for name in self.models]})
            case _:
                self.asked.append(scope)
                self.bodies.append(body)
                await self._say(receive, send)

    def load(self) -> dict[str, Any]:
        return {
            "catalogue": self.models,
            "resident": self.resident,
            "draining": self.draining,
        }

    def header(self, name: bytes) -> bytes | None:
        """Of the last request."""
        return dict(self.asked[-1]["headers"]).get(name)

    async def _say(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for number, chunk in enumerate(self.chunks):
            if number and self.waits is not None:
                left = asyncio.ensure_future(receive())
                goes_on = asyncio.ensure_future(self.waits.wait())
                await asyncio.wait({left, goes_on}, return_when=asyncio.FIRST_COMPLETED)
                if left.done():
                    self.hung_up.set()
                    return
                left.cancel()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if self.breaks:
            raise RuntimeError("this box breaks off")
        await send({"type": "http.response.body", "body": b""})


async def _whole(send: Any, status: int, body: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": JSON})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


class Fleet:
    """Proxies in the place of Ray: chosen by the router's own rule, as of `poll`."""

    def __init__(self, proxies: Mapping[str, BoxProxy]) -> None:
        self._proxies = dict(proxies)
        self._reports: dict[str, dict[str, Any]] = {name: {} for name in proxies}
        self._known = KnownBoxes(choose_residency_prefix, lambda: 0.0, lambda: 0.0)
        self._number = 0
        self.sent: list[str] = []
        """To which boxes requests went."""

    async def poll(self) -> None:
        for name, proxy in self._proxies.items():
            self._reports[name] = (await proxy.report()).as_stats()

    def move(self, name: str, port: int) -> None:
        """Another process has the place of a box since the last poll."""
        self._proxies[name] = BoxProxy(name, f"http://127.0.0.1:{port}", None)

    async def send(self, hint: Hint, call: Call) -> AsyncGenerator[Item, None]:
        key = self._known.ranked(hint, self._reports)[0]
        self._number += 1
        self._known.sent(key, str(self._number), hint.model)
        self.sent.append(key)
        async with aclosing(self._proxies[key].forward(hint, call)) as items:
            async for item in items:
                yield item

    async def ask_all(self, call: Call) -> list[Answer]:
        return [await proxy.answer(call) for proxy in self._proxies.values()]


@asynccontextmanager
async def fleet_of(
    boxes: Mapping[str, Callable[..., Any] | None],
) -> AsyncIterator[tuple[httpx.AsyncClient, Fleet]]:
    """A client of a front of these boxes, of which those that are None are not there."""
    async with AsyncExitStack() as stack:
        proxies = {}
        for name, box in boxes.items():
            port = 9 if box is None else await stack.enter_async_context(served(box))
            proxies[name] = BoxProxy(name, f"http://127.0.0.1:{port}", None)
            stack.push_async_callback(proxies[name].close)
        fleet = Fleet(proxies)
        await fleet.poll()
        port = await stack.enter_async_context(served(Front(fleet.send, fleet.ask_all, 1 << 16)))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        )
        yield client, fleet
