"""Workers killed in mid-stream: clients see a pause, nothing else, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import answered as plain_answers
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from tests.patience import PATIENCE_SECONDS
from tests.processes import worker_parent
from tests.system.conftest import Appliance, memfds, start

MODELS = ["llama-a", "qwen2-a", "qwen3-a"]
"""One of each architecture: a new worker builds an engine for each."""
CHATS = 15
"""So many take turns: the longest ones of these models, three in each round."""
TOKENS_BEFORE_KILL = 12
RESTARTS = "appliance_worker_restarts_total{"


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.thorough)])
def test_kills_in_a_row(kills: int, checkpoints: Path, chats: list[ChatRequest]) -> None:
    """The worker that produces a stream is killed in each round, and once what workers are forked
    from, which ends no worker; every stream completes, with the same tokens, and no process, memfd
    or socket stays behind."""
    mine = [chat for chat in chats if chat.model in MODELS]
    long = sorted(mine, key=lambda chat: -chat.max_tokens)[:CHATS]
    expected = plain_answers(load_config(write_config(checkpoints, MODELS)), long)
    with start(checkpoints, "aegaeon", models=MODELS) as appliance:
        warm = asyncio.run(send(appliance.url, long[:1], lambda _: None))
        assert warm[0].tokens == expected[long[0]].tokens
        parent = worker_parent(appliance.pid)
        descriptors = _descriptors(appliance.pid)
        killed: set[int] = set()
        for number in range(kills):
            if number == kills // 2:
                os.kill(parent, signal.SIGKILL)
                # An order to one that dies would be lost, and count as a restart, too.
                asyncio.run(_until(lambda: _has_other_parent(appliance, parent)))
            trio = [long[(3 * number + i) % CHATS] for i in range(3)]
            answers = asyncio.run(_send_and_kill(appliance, trio, killed))
            assert len(killed) == number + 1, "every round kills a worker in mid-stream"
            assert [answer.error for answer in answers] == [None] * 3
            assert [one.tokens for one in answers] == [expected[chat].tokens for chat in trio]
        asyncio.run(_until(lambda: _all_up(appliance)))
        text = httpx.get(f"{appliance.url}/metrics", timeout=PATIENCE_SECONDS).text
        restarts = [line for line in text.splitlines() if line.startswith(RESTARTS)]
        assert sum(float(line.split()[-1]) for line in restarts) == kills
        # The system reaps those whose parent was killed, in its own time.
        asyncio.run(_until(lambda: _gone(killed)))
        # Before, the connection of the first chat may not have been closed yet.
        asyncio.run(_until(lambda: _descriptors(appliance.pid) <= descriptors))
        memory = {stat.st_ino for stat in memfds(appliance.pid, "appliance")}
        assert len(memory) == 1, "the host tier, and no other"
        recovered = sum(
            value
            for (name, _), value in appliance.metrics().items()
            if name == "appliance_requests_recovered_total"
        )
        assert recovered > 0
        workers = appliance.worker_pids()
        memory |= {stat.st_ino for pid in workers for stat in memfds(pid, "appliance")}
        assert len(memory) == 1 + len(workers)
    # A process that was killed takes a moment to be gone, and its memory with it.
    asyncio.run(_until(lambda: _gone(workers)))
    asyncio.run(_until(lambda: not _holders(memory)))


async def _send_and_kill(
    appliance: Appliance, chats: list[ChatRequest], killed: set[int]
) -> list[TimedAnswer]:
    """Send; kill the worker that runs a stream's model when that stream is well under way."""
    before = len(killed)

    def on_token(answer: TimedAnswer) -> None:
        if len(killed) > before or len(answer.tokens) < TOKENS_BEFORE_KILL or answer.finish:
            return
        for instance in appliance.status()["instances"]:
            if instance["model"] == answer.chat.model and instance["pid"]:
                os.kill(instance["pid"], signal.SIGKILL)
                killed.add(instance["pid"])
                return

    return await send(appliance.url, chats, on_token)


def _has_other_parent(appliance: Appliance, parent: int) -> bool:
    """Whether workers are forked from another process than this one, which has gone."""
    with contextlib.suppress(ValueError, OSError):
        return worker_parent(appliance.pid) != parent
    return False


def _gone(pids: Collection[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _all_up(appliance: Appliance) -> bool:
    return all(instance["state"] == "up" for instance in appliance.status()["instances"])


async def _until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is so; a client's connection closes a little after its answer,
    a worker takes seconds to come back."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110 - the daemon is another process
            await asyncio.sleep(0.05)


def _descriptors(pid: int) -> int:
    """Open files and sockets of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _holders(inodes: set[int]) -> list[int]:
    """Processes that hold one of these memfds."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                held = {stat.st_ino for stat in memfds(int(process.name), "appliance")}
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if held & inodes:
                found.append(int(process.name))
    return found
