"""KV on disk: slow clients make room, what is damaged is computed again, a kill leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx

from appliance.client import event_lines_async
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, metrics_by_model, running_daemon
from tests.patience import PATIENCE_SECONDS, until
from tests.system.conftest import copy_with_context

MODEL = "llama-a"
CONTEXT = 1024
PROMPT = "Tell me about bridges. " * 24
"""Some 600 tokens: a client has much KV as soon as it is found to be slow, however large the
buffers of the kernel are, and long before its connection is closed for not reading for a minute."""
TOKENS = 150
MOST_CLIENTS = 6
"""Slow clients at once: the KV of so many prompts does not fit the host cache."""
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
"""So that a client that does not read is soon noticed."""


def configured(checkpoints: Path, folder: Path) -> Path:
    """One model with a longer context, room for the KV of 1,152 tokens in the host cache, and a
    folder for KV on disk."""
    copy_with_context(checkpoints / MODEL, folder / MODEL, CONTEXT)
    file = write_config(
        folder,
        [MODEL],
        instances=1,
        memory="96MiB",
        host_cache="9MiB",
        max_context=CONTEXT,
        bind=f"127.0.0.1:{free_port()}",
    )
    text = file.read_text().replace(
        "[policy]", '[devices.kv_spill]\ndirectory = "kv"\nsize = "256MiB"\n[policy]'
    )
    file.write_text(text)
    return file


async def chat(client: httpx.AsyncClient, go_on: asyncio.Event, salt: str = "") -> list[int]:
    """The tokens of an answer, of which nothing is read after the first until it may go on. They
    come with so much text about each that the buffers of the kernel are soon full."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "cache_salt": salt or "of one that reads",
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in event_lines_async(response.aiter_bytes(1)):
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or ()
            if tokens:
                await go_on.wait()
    return tokens


def places(url: str) -> list[str]:
    """Where the KV of each paused request is, as the API shows it."""
    requests = httpx.get(f"{url}/api/requests", timeout=PATIENCE_SECONDS).json()["requests"]
    return [request["kv"] for request in requests if request["phase"] == "paused"]


async def stall(client: httpx.AsyncClient, go_on: asyncio.Event) -> list[asyncio.Task[list[int]]]:
    """Clients that do not read until they may go on, one after another, until the KV of two is on
    disk, and none is on its way there: no file is being written. With as many clients as there may
    be, that is waited for."""
    url, tasks = str(client.base_url), []

    def on_disk() -> bool:
        found = places(url)
        return found.count("disk") >= 2 and "spilling" not in found

    while len(tasks) < MOST_CLIENTS and not on_disk():
        tasks.append(asyncio.create_task(chat(client, go_on, f"slow {len(tasks)}")))
        await asyncio.to_thread(until, lambda: len(places(url)) == len(tasks))
    await asyncio.to_thread(until, on_disk)
    return tasks


def clients(url: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(socket_options=SMALL_BUFFER)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=None)


async def slow_clients(url: str, act: Callable[[], None]) -> list[list[int]]:
    """What one client gets that reads, then what slow ones get, which read on after `act` was
    called, with the KV of two of them on disk."""
    async with clients(url) as client:
        go_on = asyncio.Event()
        go_on.set()
        alone = await chat(client, go_on)
        go_on.clear()
        tasks = await stall(client, go_on)
        act()
        go_on.set()
        return [alone, *await asyncio.gather(*tasks)]


def test_kv_of_slow_clients_goes_to_disk_and_comes_back(checkpoints: Path, tmp_path: Path) -> None:
    """All answers are those of a client that reads; a file that was damaged costs the tokens of one
    request, computed again."""
    file = configured(checkpoints, tmp_path)
    kept: list[Path] = []

    def damage_one() -> None:
        kept.extend((tmp_path / "kv").glob("*.kv"))
        os.truncate(kept[0], 4096)

    with running_daemon(file, load_config(file)) as (url, _):
        answers = asyncio.run(slow_clients(url, damage_one))
        counted = metrics_by_model(url)
        text = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).text
        left = list((tmp_path / "kv").glob("*.kv"))
    assert len(kept) >= 2
    assert len(answers[0]) == TOKENS
    assert all(answer == answers[0] for answer in answers)
    assert 0 < counted["appliance_kv_recomputed_tokens_total", MODEL] < CONTEXT
    assert 'appliance_kv_disk_errors_total{operation="read"} 1.0' in text
    assert 'appliance_transfer_bytes_total{kind="kv_restored",model="llama-a"} 0.0' not in text
    assert left == []


def test_a_killed_daemon_leaves_nothing_to_the_next(checkpoints: Path, tmp_path: Path) -> None:
    """The files of one that was killed are deleted, and requests are served as ever."""
    file = configured(checkpoints, tmp_path)
    folder = tmp_path / "kv"
    config = load_config(file)

    async def stall_and_kill(url: str, pid: int) -> None:
        async with clients(url) as client:
            tasks = await stall(client, asyncio.Event())
            os.kill(pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with running_daemon(file, config) as (url, pid):
        asyncio.run(stall_and_kill(url, pid))
    left = list(folder.glob("*.kv"))
    with running_daemon(file, config) as (url, _):
        found = list(folder.glob("*.kv"))
        answers = asyncio.run(slow_clients(url, lambda: None))
    assert left
    assert found == []
    assert all(answer == answers[0] for answer in answers)
