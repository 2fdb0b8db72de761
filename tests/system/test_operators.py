"""An operator at work under load: no answer is another one for it, and the journal replays."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance import journal
from appliance.config.layers import directory
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest, TimedAnswer, burst, send
from appliance.vocabulary import ModelEvictRequested, ModelLoadRequested, WaitCode
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance, until

PER_MODEL = 3
TOKENS_BETWEEN = 15
"""Pieces of answers that clients get from one thing that the operator does to the next."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration, of this test alone: drop-ins are written beside it."""
    return tmp_path_factory.mktemp("operators") / "appliance.toml"


@pytest.fixture(scope="module")
def appliance(checkpoints: Path, file: Path) -> Iterator[Appliance]:
    text = write_config(checkpoints, bind=f"127.0.0.1:{free_port()}").read_text()
    record = file.with_name("journal")
    file.write_text(f"{text}\n[journal]\npath = {str(record)!r}\n")
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        yield Appliance(url, pid, config, record)


async def operate(
    url: str, chats: list[ChatRequest]
) -> tuple[list[TimedAnswer], list[str], set[str]]:
    """All chats, while an operator evicts and loads models; what the operator asked for, the last
    of it perhaps without an answer, and the reasons to wait that were seen."""
    pieces = asyncio.Semaphore(0)
    asked: list[str] = []
    reasons: set[str] = set()
    models = cycle(sorted({chat.model for chat in chats}))

    async def work() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            for verb in cycle(["evict", "load", "evict", "pin", "evict", "unpin"]):
                for _ in range(TOKENS_BETWEEN):
                    await pieces.acquire()
                asked.append(verb)
                answer = await client.post(f"/api/models/{next(models)}/{verb}")
                answer.raise_for_status()
                snapshot = (await client.get("/api/snapshot")).raise_for_status().json()
                reasons.update(
                    request["reason"]["code"]
                    for request in snapshot["requests"]
                    if request["reason"]
                )

    working = asyncio.create_task(work())
    answers = await send(url, chats, lambda _: pieces.release())
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return answers, asked, reasons


def test_models_are_dismissed_and_wanted_under_load(appliance: Appliance) -> None:
    """Weights and KV leave and come back as an operator says: every answer is token for token what
    it was undisturbed, no prompt is computed twice, and the journal replays."""
    chats = burst([model.name for model in appliance.config.models], PER_MODEL)
    undisturbed = asyncio.run(send(appliance.url, chats, lambda _: None))

    answers, asked, reasons = asyncio.run(operate(appliance.url, chats))

    assert [answer.error for answer in answers] == [None] * len(chats)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in undisturbed]
    assert reasons <= {code.value for code in WaitCode}
    assert "other_model" in reasons
    prefills = {
        model: value
        for (name, model), value in appliance.metrics().items()
        if name == "appliance_prefills_total"
    }
    assert sum(prefills.values()) == 2 * len(chats)
    events = [entry.event for entry in journal.read(appliance.journal)[1]]
    evict_requested = sum(isinstance(event, ModelEvictRequested) for event in events)
    wanted = sum(isinstance(event, ModelLoadRequested) for event in events)
    assert 3 <= evict_requested <= asked.count("evict")  # the end is not in the file yet
    assert 1 <= wanted <= asked.count("load")
    assert journal.replay(appliance.journal)[1] == []


def test_an_idle_model_comes_and_goes(appliance: Appliance) -> None:
    """An idle daemon loads a model on request, and evicts one with all its slabs; a drained model
    takes no requests, and a cancelled request gets an error."""
    url, model = appliance.url, appliance.config.models[-1].name

    def post(verb: str) -> dict[str, Any]:
        answer = httpx.post(
            f"{url}/api/models/{model}/{verb}", timeout=PATIENCE_SECONDS
        ).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def held() -> set[str]:
        """Who holds memory on devices."""
        return {
            owner.partition(":")[2]
            for instance in appliance.status()["instances"]
            for owner, size in instance["pool_bytes"].items()
            if size and ":" in owner
        }

    post("evict")
    until(lambda: model not in held())
    post("load")
    until(lambda: model in held())
    # Whose each slab is adds up to the pool.
    maps = [httpx.get(f"{url}/api/instances/{i['instance']}/slabs", timeout=PATIENCE_SECONDS).json()
            for i in appliance.status()["instances"]]  # fmt: skip
    assert f"weights:{model}" in {row["name"] for one in maps for row in one["owners"]}
    for one in maps:
        told = sum(count for _, count in one["runs"]) * one["slab_bytes"]
        assert told == appliance.config.devices.memory_bytes
    until(
        lambda: (
            not httpx.get(f"{url}/api/models/{model}", timeout=PATIENCE_SECONDS).json()[
                "load_requested"
            ]
        )
    )
    post("evict")
    until(lambda: model not in held())
    (answer,) = asyncio.run(send(url, [ChatRequest(model, "Hello", 8)], lambda _: None))
    assert answer.error is None
    assert len(answer.tokens) == 8

    post("drain")
    (refused,) = asyncio.run(send(url, [ChatRequest(model, "Hello", 8)], lambda _: None))
    assert refused.error is not None
    assert json.loads(refused.error)["error"]["code"] == "model_draining"
    post("resume")

    cancelled: list[int] = []

    def cancel(answer: TimedAnswer) -> None:
        if len(answer.tokens) > 2 and not cancelled:
            (request,) = httpx.get(f"{url}/api/requests", timeout=PATIENCE_SECONDS).json()[
                "requests"
            ]
            path = f"{url}/api/requests/{request['id']}"
            cancelled.append(httpx.delete(path, timeout=PATIENCE_SECONDS).status_code)

    (broken,) = asyncio.run(send(url, [ChatRequest(model, "Hello", 900, ignore_eos=True)], cancel))
    assert (broken.error, cancelled) == ("an operator cancelled the request", [200])
    assert journal.replay(appliance.journal)[1] == []


async def set_aside(url: str, chats: list[ChatRequest]) -> tuple[list[TimedAnswer], list[str]]:
    """All chats, and in the midst of them instance 0 is quarantined; what /health said then."""
    pieces = asyncio.Semaphore(0)

    async def work() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            for _ in range(3 * TOKENS_BETWEEN):
                await pieces.acquire()
            await client.post("/api/instances/0/quarantine", json={"reason": "a test"})
            health = (await client.get("/health")).raise_for_status().json()
            return [health["status"], *health["reasons"]]

    told, answers = await asyncio.gather(work(), send(url, chats, lambda _: pieces.release()))
    return answers, told


def switches(url: str, instance: int) -> float:
    """How often another model came to run there."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).raise_for_status().text
    values = re.findall(
        rf'^appliance_switches_total{{instance="{instance}",.*}} (\S+)$', text, re.M
    )
    return sum(map(float, values))


def test_an_instance_is_set_aside_and_comes_back(appliance: Appliance) -> None:
    """In the midst of answers its worker is ended: they go on at the other one, token for token as
    undisturbed. When it is released it has a worker again, and work."""
    chats = burst([model.name for model in appliance.config.models], PER_MODEL)

    answers, told = asyncio.run(set_aside(appliance.url, chats))

    assert told == ["degraded", "instance 0 is quarantined"]
    until(  # its process may take a while to end
        lambda: (
            [(one["state"], one["pid"] is None) for one in appliance.status()["instances"]]
            == [("quarantined", True), ("up", False)]
        )
    )
    before = switches(appliance.url, 0)

    path = f"{appliance.url}/api/instances/0/release"
    httpx.post(path, timeout=PATIENCE_SECONDS).raise_for_status()
    until(lambda: appliance.status()["instances"][0]["state"] == "up")
    undisturbed = asyncio.run(send(appliance.url, chats, lambda _: None))

    assert [answer.error for answer in answers] == [None] * len(chats)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in undisturbed]
    assert switches(appliance.url, 0) > before
    assert journal.replay(appliance.journal)[1] == []


def test_a_signal_reloads(appliance: Appliance, file: Path) -> None:
    """HUP applies what needs no restart; what an operator changed is in the file for the next."""
    url, model = appliance.url, appliance.config.models[0].name
    body = {"slo": {"ttft": "7s"}, "max_queue": 5}
    httpx.put(
        f"{url}/api/models/{model}/limits", json=body, timeout=PATIENCE_SECONDS
    ).raise_for_status()
    (directory(file) / "60-mine.toml").write_text("[api]\nmax_queue = 77\n")

    with httpx.stream("GET", f"{url}/api/events", timeout=PATIENCE_SECONDS) as events:
        lines = events.iter_lines()
        while next(lines) != "event: snapshot":
            pass
        os.kill(appliance.pid, signal.SIGHUP)
        while next(lines) != "event: config_reloaded":
            pass

    shown = httpx.get(f"{url}/api/config", timeout=PATIENCE_SECONDS).json()["config"]
    assert shown["api"]["max_queue"] == 77
    found = load_config(file).models[0]
    assert (found.slo.ttft_seconds, found.max_queue) == (7, 5)
    assert httpx.post(f"{url}/api/config/check", timeout=PATIENCE_SECONDS).json()["changes"] == []
