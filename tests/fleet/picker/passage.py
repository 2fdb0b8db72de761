"""What passes between a client and a box through Envoy and the picker, as a plain box sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tests.fleet.picker.plain_box import MODEL, PlainBox
from tests.patience import PATIENCE_SECONDS

Check = Callable[[str, bool, str], None]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/embeddings": {"input": "Hello"},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hello"},
    "/api/embed": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/score": {"text_1": "Hello", "text_2": "you"},
    "/rerank": {"query": "Hello", "documents": ["you"]},
}
"""Requests that name a model, by path."""
TIMES = 12
"""By chance alone, a box of four would have all of them once in 17 million runs."""
MANY = 1100
"""More than the 1,024 requests at once that Envoy lets through unless it is told otherwise."""
LARGE = 24 << 20
PASSED = {
    "authorization": "Bearer a key",
    "x-slo": "ttft=2s",
    "x-request-id": "2f6f9a5e-3d0a-4c55-9d0e-0c8f6a1f7b11",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}


def body(path: str) -> dict[str, Any]:
    return {"model": MODEL} | ASKED[path]


async def by_path(front: httpx.AsyncClient, box: PlainBox) -> dict[str, int]:
    """How many of `TIMES` requests for its model the plain box gets, of each path."""
    found = {}
    for path in ASKED:
        before = box.reached
        for _ in range(TIMES):
            await front.post(path, json=body(path))
        found[path] = box.reached - before
    return found


async def headers(front: httpx.AsyncClient, check: Check) -> None:
    answer = await front.post(CHAT, json=body(CHAT), headers=PASSED)
    seen = answer.json()["headers"]
    lost = {name: seen.get(name) for name, value in PASSED.items() if seen.get(name) != value}
    check("headers of the client reach the box", not lost, f"{', '.join(PASSED)}; lost: {lost}")


async def _events(front: httpx.AsyncClient, box: PlainBox) -> AsyncIterator[float]:
    """When each event of a stream came: the box sends the next one only after it."""
    asked = body(CHAT) | {"stream": True}
    async with front.stream("POST", CHAT, json=asked, headers={"x-told": "stream"}) as answer:
        box.gate.release()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield time.monotonic()
                box.gate.release()


async def stream(front: httpx.AsyncClient, box: PlainBox, check: Check) -> None:
    """Were an event held back until the next one, none would ever come."""
    box.left.clear()
    count = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        events = _events(front, box)
        async for _ in events:
            count += 1
            if count == 50:
                break
        await events.aclose()  # type: ignore[attr-defined]
        check("no event of a stream waits for the next one", True, f"{count} events, one by one")
        await box.left.wait()
        check("a client that hangs up ends its request in the box", True, "")


async def silence(front: httpx.AsyncClient, check: Check) -> None:
    begun = time.monotonic()
    answer = await front.post(CHAT, json=body(CHAT), headers={"x-told": "silence"})
    said = f"{answer.status_code} after {time.monotonic() - begun:.1f} s {answer.text[:60]!r}"
    check("a box may be silent before its answer", answer.status_code == 200, said)


async def many(front: httpx.AsyncClient, box: PlainBox, check: Check) -> None:
    """All at once: the box answers none before it has all of those that were not refused."""
    refused: list[int] = []
    box.held = 0
    box.all_here.clear()

    async def one() -> None:
        answer = await front.post(CHAT, json=body(CHAT), headers={"x-told": "hold"})
        if answer.status_code != 200:
            refused.append(answer.status_code)

    async def release() -> None:
        while box.held + len(refused) < MANY:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        box.all_here.set()

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(release(), *(one() for _ in range(MANY)))
    said = f"{MANY} at once, {len(refused)} refused {sorted(set(refused))}"
    check("as many requests at once as clients send", not refused, said)


async def large(front: httpx.AsyncClient, check: Check) -> None:
    asked = body(CHAT) | {"messages": [{"role": "user", "content": "x" * LARGE}]}
    answer = await front.post(CHAT, json=asked)
    came = answer.json().get("bytes", 0) if answer.status_code == 200 else 0
    check("a large body", came > LARGE, f"{LARGE >> 20} MiB: {answer.status_code}, {came} bytes")


async def steered(front: httpx.AsyncClient, other: str, check: Check, reached: Any) -> None:
    """A client must not choose where Envoy connects to."""
    told = {"x-gateway-destination-endpoint": other}
    codes = []
    for path in (CHAT, "/api/chat", "/tokenize"):
        codes.append((await front.post(path, json=body(path), headers=told)).status_code)
    codes.append((await front.get("/v1/models", headers=told)).status_code)
    check("a client cannot steer Envoy to an address", reached() == 0, f"answers {codes}")


async def scrapes(box: PlainBox, check: Check) -> None:
    """As `interval` says: each one costs a box some milliseconds."""
    before, begun = box.scrapes, time.monotonic()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while box.scrapes < before + 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    took = time.monotonic() - begun
    check("the picker reads metrics once a second", took > 4, f"6 times in {took:.1f} s")


async def without_picker(front: httpx.AsyncClient, other: str, reached: Any, check: Check) -> None:
    begun = time.monotonic()
    told = {"x-gateway-destination-endpoint": other}
    answer = await front.post(CHAT, json=body(CHAT), headers=told)
    said = f"{answer.status_code} after {time.monotonic() - begun:.1f} s: {answer.text[:60]!r}"
    well = answer.status_code >= 500 and reached() == 0
    check("without the picker a request is refused at once", well, said)
