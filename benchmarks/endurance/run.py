"""The whole of it: load, disturbances and watching for so long; then everything is compared."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.demo.run import metrics_by_model
from appliance.demo.traffic import Chat
from benchmarks.endurance.asks import Book
from benchmarks.endurance.audit import at_rest, compare, read_books
from benchmarks.endurance.batches import BatchClient
from benchmarks.endurance.clients import Client, Tally, find_out
from benchmarks.endurance.connection import Connection, ask_json
from benchmarks.endurance.disturbances import Disturbances
from benchmarks.endurance.watch import Watch, descendants

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
    batches: int
    policies: Sequence[str]


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
    switches: int
    not_ready: int
    flatness: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)


async def endure(
    plan: Plan,
    url: str,
    pid: int,
    *,
    truths: Mapping[Chat, Sequence[int]],
    checkpoints: Path,
    log: Path,
    journal: Path,
) -> Result:
    """Do it to the daemon at `url`; when it returns, nothing runs there any more."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 0
    book, tally, over = Book(truths, checkpoints), Tally(), asyncio.Event()
    await find_out(book, host, port)
    known = {line["request"] for line in read_books(log, journal, set()).lines}
    disturbances = Disturbances(host, port, random.Random(f"{plan.seed} disturbances"))
    watch = Watch(pid, host, port, journal)
    watching = asyncio.create_task(watch.run(plan.sample_every))
    disturbing = [
        asyncio.create_task(disturbances.kill_workers(plan.kill_every)),
        asyncio.create_task(disturbances.change_policies(plan.policy_every, list(plan.policies))),
        asyncio.create_task(disturbances.cancel_requests(plan.cancel_every)),
    ]
    clients: list[Client | BatchClient] = [
        Client(Connection(host, port), book, tally, random.Random(f"{plan.seed} client {i}"))
        for i in range(plan.connections)
    ]
    clients += [
        BatchClient(Connection(host, port), book, tally, random.Random(f"{plan.seed} batches {i}"))
        for i in range(plan.batches)
    ]
    running = [asyncio.create_task(client.run(over)) for client in clients]
    await asyncio.sleep(plan.seconds)
    for task in disturbing:
        task.cancel()
    ends = await asyncio.gather(*disturbing, return_exceptions=True)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    over.set()
    left = await asyncio.gather(*running, return_exceptions=True)
    await _settled(host, port)
    watch.seen |= set(descendants(pid))

    _, snapshot = await ask_json(host, port, "GET", "/api/snapshot")
    metrics = metrics_by_model(url)
    books = read_books(log, journal, known)
    failed = [e for e in (*ends, *left) if isinstance(e, Exception)]
    complaints = [
        *tally.complaints,
        *disturbances.complaints,
        *watch.complaints,
        *(f"{type(error).__name__}: {error}" for error in failed),
        *compare(books, tally.outcomes, disturbances.cancelled),
        *at_rest(snapshot, metrics),
    ]

    def total(metric: str) -> int:
        return int(sum(value for (name, _), value in metrics.items() if name == metric))

    restarts = total("appliance_worker_restarts_total")
    if restarts != len(disturbances.killed):
        complaints.append(f"{restarts} workers died, {len(disturbances.killed)} were killed")
    ended = total("appliance_requests_total")
    if ended != len(books.lines) + len(known):
        complaints.append(
            f"metrics count {ended} requests, the log {len(books.lines) + len(known)}"
        )
    return Result(
        complaints=complaints,
        requests=tally.ends,
        fates=dict(tally.fates),
        sequences=len(books.lines),
        tokens_compared=tally.tokens_compared,
        kills=len(disturbances.killed),
        policies=disturbances.policies,
        cancelled=len(disturbances.cancelled),
        recoveries=total("appliance_recoveries_total"),
        preemptions=total("appliance_preemptions_total"),
        switches=total("appliance_switches_total"),
        not_ready=sum(not sample.ready for sample in watch.samples),
        flatness=watch.flatness(),
        samples=[asdict(sample) for sample in watch.samples],
        processes=watch.seen,
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
