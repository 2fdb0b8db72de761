"""What goes wrong: a function for each kind of disturbance, which does it once.

A kind says what it hit, or raises `Missed` where there is nothing to hit. What lasts for a while is
undone before it returns.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.endurance.answers import name_of
from benchmarks.endurance.asks import STAY
from benchmarks.endurance.connection import Closed
from tests import processes
from tests.chaos import hostile
from tests.chaos.daemon import LOADERS, MODELS, Daemon, DidNotStart
from tests.chaos.flips import Files, Flipped, flip_somewhere
from tests.chaos.load import LastingClient, SlowClient
from tests.chaos.memory_group import end_for_want_of_memory
from tests.chaos.record import CUT_OFF, Hit, Record

LOOK_SECONDS = 0.1
FREEZE_SECONDS = (1.0, 6.0)
DAEMON_FREEZE_SECONDS = (0.5, 3.0)
FULL_SECONDS = (3.0, 8.0)
JUMP_SECONDS = (3.0, 10.0)
"""How long each lasts, between these."""
FARTHEST_JUMP_SECONDS = 400 * 24 * 3600.0
"""Of the clock, while a daemon runs."""
FARTHEST_START_SECONDS = 10 * 3600.0
"""By how much the clock is wrong when a daemon starts: it believes that, and a batch has 24 h."""
LATE_SECONDS = 10.0
"""Within so long after a restart happens what was due during it, and not all of it at the moment
when the daemon is back and clients are about to ask again."""
FLIPS = 3
"""At most, in one pause of the daemon."""
SLOW = 6
SLOW_ASKS = 2


class Missed(Exception):
    """There is nothing to hit now; why."""


@dataclass
class World:
    """What there is to disturb."""

    daemon: Daemon
    record: Record
    files: Files
    group: Path | None
    """A memory cgroup, if one can be made."""
    clients: Sequence[LastingClient] = ()
    slow: Callable[[random.Random], SlowClient] | None = None
    """Makes one."""
    flipped: int = 0
    """Bits in what the daemon stores of files and batches."""
    base_clock: float = 0.0
    """By how much the clock was wrong at the start of the daemon."""
    worker_restarts: list[float] = field(default_factory=list)
    """Seconds from the end of a worker until all are up again."""
    complaints: list[str] = field(default_factory=list)


Disturb = Callable[[World, random.Random, Hit], Awaitable[str]]


# --- processes that end --------------------------------------------------------------------------


async def kill_worker(world: World, dice: random.Random, hit: Hit) -> str:
    pid = await _signalled(world, dice, _workers, signal.SIGKILL)
    await _recovered(world, hit, pid)
    return f"worker {pid}"


async def run_out_of_memory(world: World, dice: random.Random, hit: Hit) -> str:
    """The kernel ends a worker, in a memory cgroup."""
    if world.group is None:
        world.record.leave_out("worker_oom", "no memory cgroup can be made: SIGKILL does the same")
        return await kill_worker(world, dice, hit)
    pid = dice.choice(await _workers(world))
    if not await asyncio.to_thread(end_for_want_of_memory, world.group, pid):
        raise Missed("the kernel did not end the worker")
    await _recovered(world, hit, pid)
    return f"worker {pid}"


async def kill_front_end(world: World, dice: random.Random, hit: Hit) -> str:
    pid = await _signalled(world, dice, _front_ends, signal.SIGKILL)
    return f"front end {pid}"


async def kill_front_end_parent(world: World, dice: random.Random, hit: Hit) -> str:
    pid = _parent(world)
    os.kill(pid, signal.SIGKILL)
    return f"process {pid}"


async def kill_guide_compiler(world: World, dice: random.Random, hit: Hit) -> str:
    """While it has a guide that it does not know."""
    asking = asyncio.create_task(_new_guide(world, dice))
    try:
        pid = await _compiler(world, asking)
        os.kill(pid, signal.SIGKILL)
        with suppress(Closed, OSError):
            return f"compiler {pid}; the guide: {await asking}"
        return f"compiler {pid}; the guide: {CUT_OFF}"
    finally:
        asking.cancel()


async def _new_guide(world: World, dice: random.Random) -> str:
    """A chat with a guide that was never sent; how it was answered."""
    schema = STAY | {"description": str(dice.random())}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {
        "model": dice.choice(MODELS),
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "response_format": form,
    }
    status, answer = await world.daemon.ask("POST", "/v1/chat/completions", body, of=LOADERS[0])
    return "answered" if status == 200 else f"{status} {name_of(answer['error'])}"


async def _compiler(world: World, asking: asyncio.Task[str]) -> int:
    """The process, once it runs."""
    while True:
        if found := _found(processes.guide_compilers, world, none=True):
            return found[0]
        if asking.done():
            raise Missed("no compiler of guides runs")
        await asyncio.sleep(LOOK_SECONDS / 10)


# --- the daemon, and what is on its disk meanwhile -----------------------------------------------


async def restart(number: signal.Signals, world: World, dice: random.Random, hit: Hit) -> str:
    """End the daemon, flip bits in its files, and start it again with a clock that is wrong."""
    daemon = world.daemon
    async with daemon.life:
        with daemon.timed():
            await daemon.end(number)
            flipped = world.files.flip(dice.randint(1, FLIPS), dice)
            world.flipped += flipped.stored
            world.base_clock = dice.uniform(-1, 1) * FARTHEST_START_SECONDS
            daemon.clock.move(world.base_clock)
            refused = await _start(world, flipped)
            for path, whole in reversed(flipped.repaired):  # as an operator would, who saw the log
                path.write_bytes(whole)
    return "; ".join([*flipped.places, f"clock {world.base_clock:+.0f} s", *refused])


async def _start(world: World, flipped: Flipped) -> list[str]:
    """Start; with files that cannot be read it has to say so. They are restored then."""
    if not flipped.refused:
        await world.daemon.start()
        return []
    try:
        await world.daemon.start()
    except DidNotStart as error:
        said = str(error)
    else:
        names = ", ".join(guard.path.name for guard, _ in flipped.refused)
        world.complaints.append(f"it started although {names} cannot be read")
        return []
    if not any(guard.path.name in said for guard, _ in flipped.refused):
        world.complaints.append(f"a start was refused without naming the file: {said}")
    for guard, whole in flipped.refused:
        guard.path.write_bytes(whole)
    await world.daemon.start()
    return ["refused to start: " + said.strip().splitlines()[-1][:200]]


async def fill_disk(world: World, dice: random.Random, hit: Hit) -> str:
    daemon = world.daemon
    async with daemon.life:
        pid = daemon.pid
        daemon.disk.fill(pid)
        try:
            await asyncio.sleep(dice.uniform(*FULL_SECONDS))
        finally:
            daemon.disk.free(pid)
    return daemon.disk.how


async def jump_clock(world: World, dice: random.Random, hit: Hit) -> str:
    daemon = world.daemon
    seconds = dice.choice((-1, 1)) * FARTHEST_JUMP_SECONDS ** dice.uniform(0.2, 1.0)
    async with daemon.life:
        daemon.clock.move(world.base_clock + seconds)
        try:
            await asyncio.sleep(dice.uniform(*JUMP_SECONDS))
        finally:
            daemon.clock.move(world.base_clock)
    return f"{seconds:+.0f} s"


async def flip_kv(world: World, dice: random.Random, hit: Hit) -> str:
    """In KV that was put on disk, while the daemon runs: it reads that back. Slow clients have it
    put there, if the host cache is short."""
    folder = world.daemon.setting.state / "kv"
    slow = asyncio.create_task(slow_clients(world, dice, hit))
    path = None
    while path is None and not slow.done():
        await asyncio.sleep(LOOK_SECONDS)
        path = flip_somewhere(sorted(folder.glob("*.kv")), dice)
    await slow
    if path is None:
        raise Missed("no KV was put on disk")
    return path.name


# --- processes that hang -------------------------------------------------------------------------


async def freeze_worker(world: World, dice: random.Random, hit: Hit) -> str:
    pid = await _signalled(world, dice, _workers, signal.SIGSTOP)
    return await _frozen(pid, dice.uniform(*FREEZE_SECONDS))


async def freeze_front_end(world: World, dice: random.Random, hit: Hit) -> str:
    pid = await _signalled(world, dice, _front_ends, signal.SIGSTOP)
    return await _frozen(pid, dice.uniform(*FREEZE_SECONDS))


async def freeze_guide_compiler(world: World, dice: random.Random, hit: Hit) -> str:
    pid = await _signalled(world, dice, _guide_compilers, signal.SIGSTOP)
    return await _frozen(pid, dice.uniform(*FREEZE_SECONDS))


async def freeze_daemon(world: World, dice: random.Random, hit: Hit) -> str:
    async with world.daemon.life:
        os.kill(world.daemon.pid, signal.SIGSTOP)
        return await _frozen(world.daemon.pid, dice.uniform(*DAEMON_FREEZE_SECONDS))


async def _frozen(pid: int, seconds: float) -> str:
    """Let a process that was stopped go on after so long."""
    try:
        await asyncio.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return f"process {pid} for {seconds:.1f} s"


# --- clients -------------------------------------------------------------------------------------


async def drop_clients(world: World, dice: random.Random, hit: Hit) -> str:
    dropped = dice.sample(list(world.clients), len(world.clients) // 2)
    for client in dropped:
        client.hang_up_now()
    return f"{len(dropped)} clients"


async def slow_clients(world: World, dice: random.Random, hit: Hit) -> str:
    """They do not read for a while; then they read on, and the answers are the right ones."""

    async def one(client: SlowClient) -> None:
        for _ in range(SLOW_ASKS):
            await client.once(client.draw())

    assert world.slow is not None
    await asyncio.gather(*(one(world.slow(dice)) for _ in range(SLOW)))
    return f"{SLOW} clients"


async def hostile_requests(kind: str, world: World, dice: random.Random, hit: Hit) -> str:
    address = world.daemon.setting.address
    if kind in hostile.HALF_SENT_KINDS:
        return await hostile.hold(address, kind)
    return await hostile.send(address, kind, world.record)


# --- all of them ---------------------------------------------------------------------------------

KINDS: dict[str, Disturb] = {
    "worker_kill": kill_worker,
    "worker_oom": run_out_of_memory,
    "worker_freeze": freeze_worker,
    "front_end_kill": kill_front_end,
    "front_end_freeze": freeze_front_end,
    "front_end_parent_kill": kill_front_end_parent,
    "guide_compiler_kill": kill_guide_compiler,
    "guide_compiler_freeze": freeze_guide_compiler,
    "daemon_kill": partial(restart, signal.SIGKILL),
    "daemon_restart": partial(restart, signal.SIGTERM),
    "daemon_freeze": freeze_daemon,
    "disk_full": fill_disk,
    "clock_jump": jump_clock,
    "kv_flip": flip_kv,
    "clients_drop": drop_clients,
    "clients_slow": slow_clients,
    **{f"hostile: {kind}": partial(hostile_requests, kind) for kind in hostile.KINDS},
}
"""By name."""


async def disturb(world: World, kind: str, seed: int) -> None:
    """Do it once, when a daemon is up. What goes wrong in it is a complaint."""
    dice = random.Random(seed)
    while not world.daemon.up.is_set():
        await world.daemon.up.wait()
        await asyncio.sleep(dice.uniform(0.0, LATE_SECONDS))
    with world.record.hit(kind) as hit:
        try:
            hit.what = await KINDS[kind](world, dice, hit)
        except Missed as error:
            hit.missed = str(error)
        except (Closed, OSError) as error:  # the daemon, or a process of it, has just gone
            hit.missed = f"{type(error).__name__}: {error}"
        except DidNotStart as error:
            world.complaints.append(f"{kind}: it did not start again: {error}")
            raise
    print(f"{hit.began:7.1f} s {kind}: {hit.missed or hit.what}", file=sys.stderr, flush=True)


async def _signalled(
    world: World,
    dice: random.Random,
    find: Callable[[World], Awaitable[list[int]]],
    number: signal.Signals,
) -> int:
    """Send a signal to one of the processes that `find` finds. Another disturbance may have ended
    it a moment ago, of which the daemon does not know yet: then one is drawn again. Raises `Missed`
    as `find` does, `Closed` and `OSError`."""
    while True:
        pid = dice.choice(await find(world))
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return pid
        await asyncio.sleep(LOOK_SECONDS)


async def _front_ends(world: World) -> list[int]:
    return _found(processes.front_ends, world)


async def _guide_compilers(world: World) -> list[int]:
    return _found(processes.guide_compilers, world)


def _found(find: Callable[[int], list[int]], world: World, *, none: bool = False) -> list[int]:
    """Processes. Raises `Missed` if there is none, unless there may be."""
    try:
        found = find(world.daemon.pid)
    except (OSError, ValueError):
        found = []
    if not found and not none:
        raise Missed("there is no such process now")
    return found


def _parent(world: World) -> int:
    try:
        return processes.front_end_parent(world.daemon.pid)
    except (OSError, ValueError):
        raise Missed("front ends have no parent now") from None


async def _workers(world: World) -> list[int]:
    """Those that are up, once there is one. Raises `Closed` and `OSError`."""
    while not (found := await world.daemon.workers()):
        await asyncio.sleep(LOOK_SECONDS)
        await world.daemon.up.wait()
    return found


async def _recovered(world: World, hit: Hit, worker: int) -> None:
    """Until another worker is there, and all instances are up; noted, unless the daemon has been
    restarted meanwhile."""
    pid = world.daemon.pid
    while not await _replaced(world, worker):
        await asyncio.sleep(LOOK_SECONDS)
        await world.daemon.up.wait()
    if world.daemon.pid == pid:
        world.worker_restarts.append(round(world.record.now() - hit.began, 2))


async def _replaced(world: World, worker: int) -> bool:
    with suppress(Closed, OSError):
        return worker not in await world.daemon.workers() and await world.daemon.ready()
    return False
