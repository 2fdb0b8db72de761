"""Workers killed in mid-stream: clients see a pause, nothing else, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from appliance.demo.traffic import Answer, Chat, send
from tests.system.conftest import Appliance, memfds, start

KILLS = 10
TOKENS_BEFORE_KILL = 12


def test_ten_kills_in_a_row(
    checkpoints: Path, chats: list[Chat], expected: dict[Chat, list[int]]
) -> None:
    """Ten times the worker that produces the stream is killed; every stream completes, with the
    same tokens, and no process, memfd or socket stays behind."""
    long = sorted(chats, key=lambda chat: -chat.max_tokens)
    with start(checkpoints, "aegaeon") as appliance:
        warm = asyncio.run(send(appliance.url, long[:1], lambda _: None))
        assert warm[0].tokens == expected[long[0]]
        descriptors = _descriptors(appliance.pid)
        killed: set[int] = set()
        for number in range(KILLS):
            trio = [long[(3 * number + i) % 24] for i in range(3)]
            answers = asyncio.run(_send_and_kill(appliance, trio, killed))
            assert len(killed) == number + 1, "every round kills a worker in mid-stream"
            assert [answer.error for answer in answers] == [None] * 3
            assert [answer.tokens for answer in answers] == [expected[chat] for chat in trio]
        asyncio.run(_until_up(appliance))
        assert not any(Path(f"/proc/{pid}").exists() for pid in killed)
        assert _descriptors(appliance.pid) == descriptors
        assert len(memfds(appliance.pid, "appliance")) == 1, "the host tier, and no other"
        recovered = sum(
            value
            for (name, _), value in appliance.metrics().items()
            if name == "appliance_recoveries_total"
        )
        assert recovered > 0
        workers = appliance.worker_pids()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not _holders_of_memfds(), "no memory of the appliance outlives it"


async def _send_and_kill(appliance: Appliance, chats: list[Chat], killed: set[int]) -> list[Answer]:
    """Send; kill the worker that runs a stream's model when that stream is well under way."""
    before = len(killed)

    def on_token(answer: Answer) -> None:
        if len(killed) > before or len(answer.tokens) < TOKENS_BEFORE_KILL or answer.finish:
            return
        for instance in appliance.status()["instances"]:
            if instance["model"] == answer.chat.model and instance["pid"]:
                os.kill(instance["pid"], signal.SIGKILL)
                killed.add(instance["pid"])
                return

    return await send(appliance.url, chats, on_token)


async def _until_up(appliance: Appliance) -> None:
    """Poll until every instance is up again (bounded by the client's patience)."""
    async with asyncio.timeout(120):
        async with httpx.AsyncClient(base_url=appliance.url) as client:
            while True:
                status = (await client.get("/api/status", timeout=10)).json()
                if all(instance["state"] == "up" for instance in status["instances"]):
                    return
                await asyncio.sleep(0.1)


def _descriptors(pid: int) -> int:
    """Open files of a process that are not connections of clients."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += not str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def _holders_of_memfds() -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if memfds(int(process.name), "appliance"):
                    found.append(int(process.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found
