"""The whole of it: load, disturbances and watching for so long; then everything is compared."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance.demo.run import Known, metrics_by_model
from appliance.demo.traffic import ChatRequest
from appliance.journal import replay
from benchmarks.endurance.asks import Book
from benchmarks.endurance.audit import (
    arrived,
    at_rest,
    cancelled_by,
    compare,
    read_books,
    stalls,
)
from benchmarks.endurance.batches import BatchClient
from benchmarks.endurance.clients import Client, PolicyStats, find_out
from benchmarks.endurance.connection import Connection, ask_json
from benchmarks.endurance.disturbances import Disturbances
from benchmarks.endurance.watch import Watch

NARROW_EVERY = 2
"""Clients of which one has little room for what it does not read."""
SETTLE_SECONDS = 600.0
"""How long workers may take to be up again, and batches to end, when the load is over."""


@dataclass(frozen=True)
class Plan:
    """How hard it is to be. Times are seconds."""

    seconds: float
    connections: int
    seed: int
    kill_every: float
    policy_every: float
    cancel_every: float
    sample_every: float
    nap_seconds: float
    batches: int
    policies: Sequence[str]
    unbounded: bool = False
    """Whether most chats name no `max_tokens`: a stop string ends them."""


@dataclass
class Result:
    """What came of it."""

    complaints: list[str]
    requests: dict[str, dict[str, int]]
    fates: dict[str, int]
    sequences: int
    tokens_compared: int
    kills: int
    policies: list[str]
    cancelled: int
    recoveries: int
    preemptions: int
    recomputed_tokens: int
    stalls: int
    """How often a client was found not to read."""
    switches: int
    events_replayed: int
    not_ready: int
    flatness: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Life:
    """A daemon's life as seen from outside."""

    stats: PolicyStats
    disturbances: Disturbances
    known: set[str]
    """Requests of before, when nothing disturbed it."""
    failed: list[str]
    snapshot: dict[str, Any] = field(default_factory=dict)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)

    def total(self, metric: str) -> int:
        return int(sum(value for (name, _), value in self.metrics.items() if name == metric))


async def endure(
    plan: Plan, watch: Watch, *, truths: Mapping[ChatRequest, Known], checkpoints: Path, log: Path
) -> Life:
    """Do it to the daemon that `watch` watches; when this returns, nothing runs there any more."""
    host, port = watch.address
    book = Book(truths, checkpoints, unbounded=plan.unbounded)
    await find_out(book, Connection(host, port))
    known = {line["request"] for line in read_books(log, set()).lines}
    disturbances = Disturbances(host, port, random.Random(f"{plan.seed} disturbances"))
    life = Life(PolicyStats(), disturbances, known, [])
    await _live(plan, watch, book, life)
    await _settled(host, port)
    watch.note()
    _, life.snapshot = await ask_json(host, port, "GET", "/api/snapshot")
    life.metrics = metrics_by_model(watch.url)
    return life


async def _live(plan: Plan, watch: Watch, book: Book, life: Life) -> None:
    """The load, and what disturbs it, for as long as is planned; what was asked is heard."""
    host, port = watch.address
    stop, over, disturbances = asyncio.Event(), asyncio.Event(), life.disturbances
    clients: list[Client | BatchClient] = [
        Client(
            Connection(host, port, narrow=i % NARROW_EVERY == 0),
            book,
            life.stats,
            random.Random(f"{plan.seed} client {i}"),
            plan.nap_seconds,
        )
        for i in range(plan.connections)
    ]
    clients += [
        BatchClient(Connection(host, port), book, life.stats, random.Random(f"{plan.seed} {i}"))
        for i in range(plan.batches)
    ]
    policies = list(plan.policies)
    watching = asyncio.create_task(watch.run(plan.sample_every))
    disturbing = [
        asyncio.create_task(disturbances.kill_workers(plan.kill_every, stop)),
        asyncio.create_task(disturbances.change_policies(plan.policy_every, policies, stop)),
        asyncio.create_task(disturbances.cancel_requests(plan.cancel_every, stop)),
    ]
    running = [asyncio.create_task(client.run(over)) for client in clients]
    await asyncio.sleep(plan.seconds)
    # The load goes on until nothing disturbs it any more: the last kill is noticed, too.
    stop.set()
    ends = await asyncio.gather(*disturbing, return_exceptions=True)
    watching.cancel()
    over.set()
    ends += await asyncio.gather(watching, *running, return_exceptions=True)
    life.failed += [f"{type(e).__name__}: {e}" for e in ends if isinstance(e, Exception)]


def judge(life: Life, watch: Watch, log: Path) -> Result:
    """What is to be said of a daemon that has ended."""
    books = read_books(log, life.known)
    disturbances, killed = life.disturbances, len(life.disturbances.killed)
    complaints = [
        *life.stats.complaints,
        *disturbances.complaints,
        *watch.complaints,
        *life.failed,
        *compare(books, arrived(watch.journal, life.known), life.stats.outcomes),
        *cancelled_by(books, life.stats.outcomes, disturbances.cancelled),
        *at_rest(life.snapshot, life.metrics),
        *(f"{thing} outlives the daemon" for thing in watch.left_behind()),
    ]
    restarts, ended = (
        life.total(f"appliance_{what}_total") for what in ("worker_restarts", "requests")
    )
    if restarts != killed:
        complaints.append(f"{restarts} workers died, {killed} were killed")
    if ended != len(books.lines) + len(life.known):
        logged = len(books.lines) + len(life.known)
        complaints.append(f"metrics count {ended} requests, the log {logged}")
    events, differences = replay(watch.journal)
    complaints += [f"replayed otherwise: {difference}" for difference in differences[:3]]
    return Result(
        complaints=complaints,
        requests=life.stats.ends,
        fates=dict(life.stats.fates),
        sequences=len(books.lines),
        tokens_compared=life.stats.tokens_compared,
        kills=killed,
        policies=disturbances.policies,
        cancelled=len(disturbances.cancelled),
        recoveries=life.total("appliance_requests_recovered_total"),
        recomputed_tokens=life.total("appliance_kv_recomputed_tokens_total"),
        preemptions=life.total("appliance_preemptions_total"),
        stalls=stalls(watch.journal),
        switches=life.total("appliance_switches_total"),
        events_replayed=events,
        not_ready=sum(not sample.ready for sample in watch.samples),
        flatness=watch.flatness(),
        samples=[asdict(sample) for sample in watch.samples],
    )


async def _settled(host: str, port: int) -> None:
    """Wait until no request is live and every instance is up, or for as long as that may take."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        _, snapshot = await ask_json(host, port, "GET", "/api/snapshot")
        up = all(one["state"] == "up" for one in snapshot["status"]["instances"])
        used = any(
            use["used_bytes"]
            for kv in snapshot["status"]["kv"].values()
            for use in kv["shapes"].values()
        )
        if up and not snapshot["requests"] and not used:
            return
        await asyncio.sleep(0.5)
