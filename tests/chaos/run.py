"""The whole of it: load alone, load with disturbances, load alone again; then all is compared."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance.demo.run import Known, metrics_by_model
from appliance.demo.traffic import ChatRequest
from benchmarks.endurance.asks import Book
from benchmarks.endurance.audit import at_rest
from benchmarks.endurance.clients import PolicyStats, find_out
from benchmarks.endurance.connection import Closed, Connection
from benchmarks.endurance.watch import Sample
from tests.chaos.batches import LastingBatches
from tests.chaos.daemon import BATCHES, LOADERS, MODELS, Daemon, DidNotStart, key, set_up
from tests.chaos.disk import Mounted, small_disk
from tests.chaos.disturbances import KINDS, World, disturb
from tests.chaos.flips import CONTENTS, Files
from tests.chaos.load import Innocent, LastingClient, SlowClient
from tests.chaos.memory_group import memory_group
from tests.chaos.record import Record
from tests.chaos.report import report
from tests.chaos.schedule import schedule

SETTLE_SECONDS = 300.0
LOOK_SECONDS = 1.0
DISK_MIB = 512
NAP_SECONDS = 12.0
NARROW_EVERY = 2
"""Clients of which one has little room for what it does not read."""


@dataclass(frozen=True)
class Plan:
    """How hard it is to be. Times are seconds."""

    seconds: float
    quiet_seconds: float
    """Before the first disturbance, and after the last one."""
    every_seconds: float
    """From one disturbance to the next, on average."""
    seed: int
    connections: int
    """Of each key that loads."""
    kinds: Sequence[str] = tuple(KINDS)
    timed: bool = True
    """Whether the innocent key's TTFT is judged, and memory: a busy machine has other times, and a
    short run other sizes."""


@dataclass
class Life:
    """Everything there is while it runs, and what was seen."""

    world: World
    stats: PolicyStats
    clients: list[LastingClient]
    batches: LastingBatches
    innocent: Innocent
    quiet: list[Sample] = field(default_factory=list)
    disturbed: tuple[float, float] = (0.0, 0.0)
    """From when to when, in seconds since the beginning."""
    calm: list[Sample] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def chaos(
    plan: Plan, folder: Path, checkpoints: Path, truths: Mapping[ChatRequest, Known]
) -> dict[str, Any]:
    """Do all of it in an empty folder; the plan and what happened, with `complaints`."""
    mine = {chat: known for chat, known in truths.items() if chat.model in MODELS}
    state = folder / "state"
    state.mkdir()
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(state, DISK_MIB))
        group = stack.enter_context(memory_group())
        setting = set_up(folder, checkpoints, state)
        daemon = Daemon(setting, disk)
        stack.callback(daemon.kill)
        world = World(daemon, Record(), Files(state, setting.config, setting.keys), group)
        life = asyncio.run(_live(plan, world, mine, checkpoints))
        return {"plan": asdict(plan), **report(plan, life)}


async def _live(
    plan: Plan, world: World, truths: Mapping[ChatRequest, Known], checkpoints: Path
) -> Life:
    daemon = world.daemon
    world.record.leave_out("flips in contents", CONTENTS)
    if not isinstance(daemon.disk, Mounted):
        world.record.leave_out("a full disk", f"none may be mounted here: {daemon.disk.how}")
    await daemon.start()
    book = Book(truths, checkpoints)
    await find_out(book, Connection(*daemon.setting.address, headers=key(LOADERS[0])))
    life = _load(plan, world, book, truths)
    over, innocent_over = asyncio.Event(), asyncio.Event()
    running = [asyncio.create_task(client.run(over)) for client in life.clients]
    running.append(asyncio.create_task(life.batches.run(over)))
    innocent = asyncio.create_task(life.innocent.run(innocent_over))
    life.quiet = await _look_on(daemon, plan.quiet_seconds)
    try:
        await _disturb(plan, world, life)
        await _until_ready(daemon)
        life.calm = await _look_on(daemon, plan.quiet_seconds)
    except* DidNotStart:  # which is a complaint already
        for task in (*running, innocent):
            task.cancel()
    over.set()
    innocent_over.set()
    ends = await asyncio.gather(*running, innocent, return_exceptions=True)
    failed = [end for end in ends if isinstance(end, Exception)]
    life.complaints += [f"{type(error).__name__}: {error}" for error in failed]
    if daemon.up.is_set():
        await _come_to_rest(life)
    return life


def _load(plan: Plan, world: World, book: Book, truths: Mapping[ChatRequest, Known]) -> Life:
    """Clients of every key, which do not ask yet."""
    stats, address = PolicyStats(), world.daemon.setting.address

    def client(kind: type[LastingClient], dice: random.Random, name: str, *, narrow: bool):  # type: ignore[no-untyped-def]
        connection = Connection(*address, narrow=narrow, headers=key(name))
        return kind(connection, book, stats, dice, NAP_SECONDS, world.record)

    def slow(dice: random.Random) -> SlowClient:
        made: SlowClient = client(SlowClient, dice, dice.choice(LOADERS), narrow=True)
        return made

    clients: list[LastingClient] = [
        client(
            LastingClient,
            random.Random(f"{plan.seed} {name} {number}"),
            name,
            narrow=number % NARROW_EVERY == 0,
        )
        for name in LOADERS
        for number in range(plan.connections)
    ]
    connection = Connection(*address, headers=key(BATCHES))
    dice = random.Random(f"{plan.seed} {BATCHES}")
    batches = LastingBatches(connection, book, stats, dice, world.record)
    innocent = Innocent(address, list(truths.items()), world.record)
    world.clients, world.slow = clients, slow
    return Life(world, stats, clients, batches, innocent)


async def _disturb(plan: Plan, world: World, life: Life) -> None:
    """All that is scheduled, each when it is due. Raises `DidNotStart`."""
    began = world.record.now()
    life.disturbed = (began, began)
    due = schedule(plan.seed, plan.seconds, plan.kinds, plan.every_seconds)
    async with asyncio.TaskGroup() as group:
        for one in due:
            await asyncio.sleep(began + one.at_seconds - world.record.now())
            group.create_task(disturb(world, one.kind, one.seed))
        await asyncio.sleep(began + plan.seconds - world.record.now())
    life.disturbed = (began, world.record.now())


async def _look_on(daemon: Daemon, seconds: float) -> list[Sample]:
    """What it takes meanwhile."""
    samples = []
    for _ in range(max(1, round(seconds / LOOK_SECONDS))):
        await asyncio.sleep(LOOK_SECONDS)
        samples.append(daemon.watch.look())
    return samples


async def _until_ready(daemon: Daemon) -> None:
    """Or for as long as that may take."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            while not await daemon.ready():  # noqa: ASYNC110 - the daemon is another process
                await asyncio.sleep(LOOK_SECONDS)


async def _come_to_rest(life: Life) -> None:
    """Nothing is asked any more: what was acknowledged is there, nothing is held, and the daemon
    ends as it is told to, with all that it started."""
    daemon = life.world.daemon
    try:
        await life.batches.check_kept()
        found = ["there was no time"]
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while found:
                    _, snapshot = await daemon.ask("GET", "/api/snapshot")
                    metrics = await asyncio.to_thread(metrics_by_model, daemon.url)
                    found = at_rest(snapshot, metrics)
                    await asyncio.sleep(LOOK_SECONDS)
        life.complaints += found
    except (Closed, OSError, ValueError) as error:
        life.complaints.append(f"at rest: {type(error).__name__}: {error}")
    await daemon.end(signal.SIGTERM)
