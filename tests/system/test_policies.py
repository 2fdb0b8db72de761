"""Policies are changed under load, and strangers among them fail; no client notices either."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance import journal
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from appliance.policies.loader import installed
from appliance.service.policy_report import PolicyChosen
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance, start
from tests.unit.policies.strangers import install

TOKENS_BETWEEN = 60
"""Pieces of answers that clients get from one change to the next."""
BUDGET_SECONDS = 5
"""For an answer of a stranger. A busy machine may keep one that answers at once for longer than the
50 ms of the default: that would be its fault, too, and not the one it is here for."""
SLEEP_SECONDS = 60
"""Of one that never answers in time, which is not asked again meanwhile."""

STRANGERS = {
    "raises": "    @hookimpl\n    def round(self):\n        raise RuntimeError('no idea')\n",
    "babbles": "    @hookimpl\n    def prefill(self):\n        return 'somewhere'\n",
    "sleeps": f"    @hookimpl\n    def decode(self):\n        time.sleep({SLEEP_SECONDS})\n",
    "mutates": "    @hookimpl\n    def round(self, instance):\n        instance.batches = ()\n",
}
REASONS = {
    "raises": ("round", "no idea"),
    "babbles": ("prefill", "somewhere"),
    "sleeps": ("decode", f"no answer within {BUDGET_SECONDS} s"),
    "mutates": ("round", "immutable"),
}


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of strangers' policies, installed for a daemon and for a replay here."""
    for name, body in STRANGERS.items():
        install(tmp_path, name, body)
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), known])))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def appliance(strangers: Path, checkpoints: Path) -> Iterator[Appliance]:
    with start(checkpoints, "aegaeon", budget=f"{BUDGET_SECONDS}s") as appliance:
        yield appliance


async def put(client: httpx.AsyncClient, *use: str) -> dict[str, Any]:
    """Have these policies decide; what is the case then."""
    answer = await client.put("/api/policies", json={"use": use})
    return answer.raise_for_status().json()


async def under_changes(
    url: str, chats: list[ChatRequest], names: list[str]
) -> tuple[list[TimedAnswer], int]:
    """All chats, while each policy in turn decides for a while; and how often that changed before
    the last answer was whole. The first change comes when all have arrived: some policies refuse a
    request that arrives while its model has no room."""
    pieces = asyncio.Semaphore(0)
    changes = ended = 0

    def heard(answer: TimedAnswer) -> None:
        nonlocal ended
        ended += answer.finish is not None
        pieces.release()

    async def until_all_arrived(client: httpx.AsyncClient) -> None:
        while True:
            before = ended
            models = (await client.get("/api/status")).raise_for_status().json()["models"]
            if before + sum(m["running"] + m["waiting"] for m in models) >= len(chats):
                return
            await asyncio.sleep(0.05)

    async def change() -> None:
        nonlocal changes
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            await until_all_arrived(client)
            while True:
                for name in names:
                    for _ in range(TOKENS_BETWEEN):
                        await pieces.acquire()
                    await put(client, name)
                    changes += 1
                (await client.post("/api/policies/rollback")).raise_for_status()

    changing = asyncio.create_task(change())
    answers = await send(url, chats, heard)
    done = changes
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    return answers, done


def test_changing_policies_under_load(
    appliance: Appliance, chats: list[ChatRequest], expected: dict[ChatRequest, list[int]]
) -> None:
    """Every installed policy decides in turn while 48 requests run: all finish, token for token as
    on plain vLLM, none is computed twice, and the journal replays to the same commands."""
    names = [policy.name for policy in installed() if policy.shipped and not policy.lab_only]
    answers, changes = asyncio.run(under_changes(appliance.url, chats, names))

    assert [answer.error for answer in answers] == [None] * len(chats)
    assert {answer.chat: answer.tokens for answer in answers} == expected
    assert changes >= len(names)
    metrics = appliance.metrics()
    prefills = sum(v for (name, _), v in metrics.items() if name == "appliance_prefills_total")
    assert prefills == len(chats)
    assert ("appliance_policy_errors_total", "") not in metrics
    entries = list(journal.read(appliance.journal)[1])
    chosen = [e.event.choice.use for e in entries if isinstance(e.event, PolicyChosen)]
    assert {(name,) for name in names} <= set(chosen)
    assert journal.replay(appliance.journal)[1] == []


async def watched(url: str, chats: list[ChatRequest]) -> tuple[list[TimedAnswer], list[int]]:
    """All chats, and what the probe said again and again meanwhile."""
    probes = []

    async def probe() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            while True:
                probes.append((await client.get("/readyz")).status_code)
                await asyncio.sleep(0.1)

    probing = asyncio.create_task(probe())
    answers = await send(url, chats, lambda _: None)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    return answers, probes


def test_strangers_that_fail(
    appliance: Appliance, chats: list[ChatRequest], expected: dict[ChatRequest, list[int]]
) -> None:
    """One that raises, answers nonsense, sleeps a minute, or changes its view: outputs are
    identical, the event names it and why, the probe stays green, and the journal replays."""

    async def play() -> None:
        async with httpx.AsyncClient(base_url=appliance.url, timeout=PATIENCE_SECONDS) as client:
            for place, name in enumerate(STRANGERS):
                await put(client, name, "aegaeon")
                some = chats[12 * place : 12 * (place + 1)]
                answers, probes = await watched(appliance.url, some)
                assert {answer.chat: answer.tokens for answer in answers} == {
                    chat: expected[chat] for chat in some
                }
                assert probes
                assert set(probes) == {200}
                report = (await client.get("/api/policies")).json()
                hook, reason = REASONS[name]
                faults = [e for e in report["events"] if e["what"] == "fault"]
                assert {fault["policy"] for fault in faults} <= set(STRANGERS)
                assert (faults[-1]["policy"], faults[-1]["hook"]) == (name, hook)
                assert reason in faults[-1]["reason"]

    asyncio.run(play())

    assert journal.replay(appliance.journal)[1] == []
