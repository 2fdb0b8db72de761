"""A rank killed in mid-stream: the client sees a pause, as with any worker, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest, TimedAnswer, burst, send
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance, memfds

MODELS = ["llama-a", "qwen2-a", "qwen3-a"]
TOKENS_BEFORE_KILL = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of one instance of two ranks, whose pools hold one or two of the models."""
    directory = tmp_path_factory.mktemp("ranks")
    make_checkpoints(directory, MODELS)
    path = write_config(
        directory, MODELS, instances=1, memory="20MiB", bind=f"127.0.0.1:{free_port()}"
    )
    path.write_text(path.read_text().replace("[devices]\n", "[devices]\ntensor_parallel = 2\n"))
    return path


@pytest.fixture(scope="module")
def chats() -> list[ChatRequest]:
    """Three of each model, the longest of them first."""
    return sorted(burst(MODELS, 3), key=lambda chat: -chat.max_tokens)


@contextmanager
def start(file: Path) -> Iterator[Appliance]:
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        yield Appliance(url, pid, config, Path(config.journal.path))


def test_ranks_are_killed_in_mid_stream(file: Path, chats: list[ChatRequest]) -> None:
    """Follower, leader, follower: every stream completes with the tokens it has undisturbed (those
    of plain vLLM on two processes: `tests/engine/test_ranks.py`); no process, memfd or shared
    memory stays behind."""
    with start(file) as appliance:
        undisturbed = asyncio.run(send(appliance.url, chats, lambda _: None))
        expected = {answer.chat: answer.tokens for answer in undisturbed}
        assert all(len(tokens) > TOKENS_BEFORE_KILL for tokens in expected.values())
        for number, kill_leader in enumerate((False, True, False)):
            trio = chats[3 * number : 3 * number + 3]
            ranks: set[int] = set()
            answers = asyncio.run(_send_and_kill(appliance, trio, ranks, kill_leader))
            assert len(ranks) == 2, "every round kills a rank in mid-stream"
            assert [answer.error for answer in answers] == [None] * 3
            assert [answer.tokens for answer in answers] == [expected[chat] for chat in trio]
            asyncio.run(_until_gone(ranks))
        (leader,) = appliance.worker_pids()
        ranks = {leader, _follower(leader)}
        pools = {stat.st_ino for pid in ranks for stat in memfds(pid, "appliance-pool")}
        assert len(pools) == 2, "each rank has a pool of its own"
        assert all(_nameless(pid) for pid in ranks)
    asyncio.run(_until_gone(ranks))


async def _send_and_kill(
    appliance: Appliance, chats: list[ChatRequest], ranks: set[int], kill_leader: bool
) -> list[TimedAnswer]:
    """Send; kill a rank when a stream is well under way. `ranks` gets those of that instance."""

    def on_token(answer: TimedAnswer) -> None:
        if ranks or len(answer.tokens) < TOKENS_BEFORE_KILL or answer.finish:
            return
        for leader in appliance.worker_pids():
            follower = _follower(leader)
            ranks.update((leader, follower))
            os.kill(leader if kill_leader else follower, signal.SIGKILL)

    return await send(appliance.url, chats, on_token)


def _follower(leader: int) -> int:
    """The other child is Python's, which keeps an eye on shared memory."""
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    (pid,) = (
        int(child)
        for child in children
        if "appliance.worker." in Path(f"/proc/{child}/cmdline").read_text()
    )
    return pid


async def _until_gone(pids: set[int]) -> None:
    """A follower of a killed leader is reaped by the system's first process, in its own time."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while _exist(pids):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.05)


def _exist(pids: set[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def _nameless(pid: int) -> bool:
    """Whether a process shares memory, and none of it has a name, which would outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line for line in lines if "/dev/shm/" in line]
    return bool(shared) and all(line.endswith(" (deleted)") for line in shared)
