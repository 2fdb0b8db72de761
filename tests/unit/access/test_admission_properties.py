"""Whatever keys ask and cancel, in whatever order: everyone is served, and the books balance."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.access.admission import Admission
from appliance.access.auth import Access, Caller, LimitMet
from appliance.access.keys import Key
from appliance.access.organizations import Organization
from appliance.access.rate_limits import Counts, Meter
from appliance.engines.protocol import Produced
from appliance.service.interface import QueueFull, RequestTimes, Sink, SubmitRequest
from appliance.vocabulary import FinishReason

PROMPT, MOST = 3, 5
PER_MINUTE = 1000
MAX_WAITING = 4


class Sequence:
    """A generation that produces one token when it is told, and ends when it is told."""

    def __init__(self, service: Room, request: SubmitRequest, sink: Sink) -> None:
        self.id = request.id
        self._service = service
        self._sink = sink

    def produce(self, finished: FinishReason | None) -> None:
        self._sink.produced(Produced(self.id, 1, finished))
        if finished is not None:
            self._end()

    def cancel(self, reason: FinishReason) -> None:
        if self.id in self._service.live:
            self._end()

    def _end(self) -> None:
        self._service.live.pop(self.id)
        self._sink.ended(RequestTimes(), None)


class Room:
    """An appliance with room for some, which has no idea of keys."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.live: dict[str, Sequence] = {}
        self.begun: set[str] = set()

    def submit(self, request: SubmitRequest, sink: Sink) -> Sequence:
        if len(self.live) >= self.room:
            raise QueueFull(1.0)
        self.begun.add(request.id)
        self.live[request.id] = Sequence(self, request, sink)
        return self.live[request.id]


class Client:
    """Hears what comes of what it asked for."""

    def __init__(self) -> None:
        self.tokens = 0
        self.over = False
        self.generation: Any = None

    def produced(self, produced: Produced) -> None:
        assert not self.over
        self.tokens += produced.tokens

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        assert failure is None
        assert not self.over
        self.over = True

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
    admission = Admission(
        service,  # type: ignore[arg-type]
        Access(clock=lambda: 0.0),
        max_waiting=MAX_WAITING,
    )
    acme = Counts(Organization(name="acme", tokens_per_minute=10 * PER_MINUTE), 0.0, "acme")
    meters = [
        Meter(
            Key(name=n, sha256=n * 64, created_seconds=0.0, tokens_per_minute=PER_MINUTE),
            0.0,
            acme,
        )
        for n in "abc"
    ]
    clients: list[tuple[int, Client]] = []
    refused = 0
    for number, (what, which) in enumerate(steps):
        working = list(service.live.values())
        there = [client for _, client in clients if not client.over]
        if what == "ask":
            key = which % len(meters)
            request = SubmitRequest(
                id=str(number), model="m", prompt=(1,) * PROMPT, max_tokens=MOST, body=b""
            )
            waiting = sum(
                not client.over and client.generation.id not in service.live
                for whose, client in clients
                if whose == key
            )
            client = Client()
            try:
                client.generation = admission.submit(request, Caller(meters[key]), client)
                clients.append((key, client))
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
        still = [client for _, client in clients if not client.over]
        assert len(service.live) == min(room, len(still)), "room is left, and somebody waits"
    while service.live:
        next(iter(service.live.values())).produce(FinishReason.LENGTH)
        await happen()
    assert all(client.over for _, client in clients)
    assert len(clients) + refused == sum(what == "ask" for what, _ in steps)
    of_all = 0
    for key, meter in enumerate(meters):
        served = [
            client
            for whose, client in clients
            if whose == key and client.generation.id in service.begun
        ]
        used = sum(PROMPT + client.tokens for client in served)
        of_all += used
        assert meter.own.tokens is not None
        assert meter.own.tokens.remaining(0.0) == PER_MINUTE - used
    assert acme.tokens is not None
    assert acme.tokens.remaining(0.0) == 10 * PER_MINUTE - of_all


@given(st.integers(1, 3), Steps)
def test_everyone_is_served_and_charged_for_what_it_was(
    room: int, steps: list[tuple[str, int]]
) -> None:
    """Room is never left while somebody waits; all that were not refused come to their end; and
    tokens are taken for what began, and what came of it."""
    asyncio.run(live(room, steps))
