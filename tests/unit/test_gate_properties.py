"""Whatever keys ask and cancel, in whatever order: everyone is served, and the books balance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.api.auth import Access, Caller, LimitMet, current
from appliance.api.gate import gated
from appliance.api.service import Generation, QueueFull, SubmitRequest
from appliance.engines.protocol import Produced, Sampling
from appliance.keys import Key
from appliance.ratelimits import Meter
from appliance.vocabulary import FinishReason

PROMPT, MOST = 3, 5
PER_MINUTE = 1000
MAX_WAITING = 4


class Sequence:
    """A generation that produces one token when it is told, and ends when it is told."""

    def __init__(self, service: Room, request: SubmitRequest) -> None:
        self.id = request.id
        self.request = request
        self._service = service
        self._batches: asyncio.Queue[list[Produced] | None] = asyncio.Queue()

    def produce(self, finished: FinishReason | None) -> None:
        self._batches.put_nowait([Produced(request=self.id, token=1, finished=finished)])
        if finished is not None:
            self._service.live.pop(self.id)

    async def __aiter__(self) -> AsyncIterator[list[Produced]]:
        while (batch := await self._batches.get()) is not None:
            yield batch
            if batch[-1].finished is not None:
                return

    def cancel(self, reason: FinishReason) -> None:
        if self._service.live.pop(self.id, None) is not None:
            self._batches.put_nowait(None)


class Room:
    """An appliance with room for some, which has no idea of keys."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.live: dict[str, Sequence] = {}

    def submit(self, request: SubmitRequest) -> Sequence:
        if len(self.live) >= self.room:
            raise QueueFull(1.0)
        self.live[request.id] = Sequence(self, request)
        return self.live[request.id]


class Client:
    """Reads what it asked for, to the end or until it leaves."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.tokens = 0
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.generation:
            self.tokens += len(batch)

    def leave(self) -> None:
        self.generation.cancel(FinishReason.CANCELLED)


async def happen() -> None:
    """Let everything happen that can without time going on."""
    for _ in range(12):
        await asyncio.sleep(0)


Steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "token", "end", "leave"]), st.integers(0, 99)),
    max_size=60,
)


async def live(room: int, steps: list[tuple[str, int]]) -> None:
    service = Room(room)
    service_of_keys: Any = gated(
        service,  # type: ignore[arg-type]
        Access(clock=lambda: 0.0),
        max_waiting=MAX_WAITING,
    )
    meters = [
        Meter(Key(name=n, sha256=n * 64, created_seconds=0.0, tokens_per_minute=PER_MINUTE), 0.0)
        for n in "abc"
    ]
    clients: list[tuple[int, Client]] = []
    refused = 0
    for number, (what, which) in enumerate(steps):
        working = list(service.live.values())
        there = [client for _, client in clients if not client.reading.done()]
        if what == "ask":
            key = which % len(meters)
            current.set(Caller(meters[key]))
            request = SubmitRequest(
                id=str(number), model="m", prompt=(1,) * PROMPT, sampling=Sampling(max_tokens=MOST)
            )
            waiting = sum(
                not client.reading.done() and client.generation.id not in service.live
                for whose, client in clients
                if whose == key
            )
            try:
                clients.append((key, Client(service_of_keys.submit(request))))
                assert waiting < MAX_WAITING
            except QueueFull:
                refused += 1
                assert waiting == MAX_WAITING
            except LimitMet:
                refused += 1
        elif what == "leave" and there:
            there[which % len(there)].leave()
        elif what in ("token", "end") and working:
            sequence = working[which % len(working)]
            sequence.produce(FinishReason.STOP if what == "end" else None)
        await happen()
        still = [client for _, client in clients if not client.reading.done()]
        assert len(service.live) == min(room, len(still)), "room is left, and somebody waits"
    while service.live:
        next(iter(service.live.values())).produce(FinishReason.LENGTH)
        await happen()
    assert all(client.reading.done() for _, client in clients)
    for _, client in clients:
        await client.reading
    assert len(clients) + refused == sum(what == "ask" for what, _ in steps)
    for key, meter in enumerate(meters):
        served = [c for whose, c in clients if whose == key and c.generation.begun]  # type: ignore[attr-defined]
        used = sum(PROMPT + client.tokens for client in served)
        assert meter.tokens is not None
        assert meter.tokens.remaining(0.0) == PER_MINUTE - used


@given(st.integers(1, 3), Steps)
def test_everyone_is_served_and_charged_for_what_it_was(
    room: int, steps: list[tuple[str, int]]
) -> None:
    """Room is never left while somebody waits; all that were not refused come to their end; and
    tokens are taken for what began, and what came of it."""
    asyncio.run(live(room, steps))
