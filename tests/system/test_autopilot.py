"""A daemon that was started with the wrong policy finds a better one; no client notices.

Not part of `make test`: the autopilot applies what wins by more than the lab's error, which is that
of a machine without other work (`make test-autopilot`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance import journal
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import free_port, running_daemon
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance

WRONG = "serverlessllm"
"""It gives the instance to a long answer until it is whole, and the others wait."""
NAMES = tuple(recipe.name for recipe in RECIPES[:3])
SLO = 'slo = { ttft = "500ms", tbt = "200ms" }'
AUTOPILOT = """
autopilot = "apply"
autopilot_interval = "10s"
autopilot_cpu = "15s"
autopilot_window = "30s"
autopilot_watch = "8s"
"""
EVERY_SECONDS, LONG_EACH, LONG, SHORT = 0.25, 18, 700, 8
"""A request comes so often; each 18th has a long answer, of the first model."""


@pytest.fixture
def appliance(checkpoints: Path, tmp_path: Path) -> Iterator[Appliance]:
    file = write_config(
        checkpoints, NAMES, policy=WRONG, instances=1, bind=f"127.0.0.1:{free_port()}"
    )
    text = file.read_text().replace("[policy]\n", f"[policy]{AUTOPILOT}")
    text = text.replace('slo = { ttft = "10s", tbt = "100ms" }', SLO)
    written = tmp_path / "journal.jsonl"
    own = tmp_path / "appliance.toml"
    own.write_text(f"{text}\n[journal]\npath = {str(written)!r}\n")
    config = load_config(own)
    with running_daemon(own, config) as (url, pid):
        yield Appliance(url, pid, config, written)


class Load:
    """Requests that keep coming."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.texts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """What was answered, by model and length."""
        self.wrong: list[str] = []

    async def run(self, over: asyncio.Event) -> int:
        """Until it is over, and all are answered; how many there were."""
        asked = []
        while not over.is_set():
            number = len(asked)
            length = SHORT if number % LONG_EACH else LONG
            one = self._ask(NAMES[number % len(NAMES)], length)
            asked.append(asyncio.create_task(one))
            await asyncio.sleep(EVERY_SECONDS)
        await asyncio.gather(*asked)
        return len(asked)

    async def _ask(self, model: str, length: int) -> None:
        answer = await self._client.post(
            "/v1/completions",
            json={
                "model": model,
                "prompt": "All the same to everyone",
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        found = answer.json()
        if answer.status_code == 200 and found["usage"]["completion_tokens"] == length:
            self.texts[model, length].add(found["choices"][0]["text"])
        else:
            self.wrong.append(answer.text)


async def until_judged(client: httpx.AsyncClient) -> dict[str, Any]:
    """The report, when what the autopilot applied was confirmed or rolled back."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            report = (await client.get("/api/policies")).raise_for_status().json()
            steps = {note["what"] for note in report["autopilot"]["notes"]}
            if steps & {"confirmed", "rolled_back"}:
                return report
            await asyncio.sleep(0.5)


async def served(url: str) -> tuple[dict[str, Any], Load, int]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        load, over = Load(client), asyncio.Event()
        running = asyncio.create_task(load.run(over))
        try:
            report = await until_judged(client)
        finally:
            over.set()
        return report, load, await running


def test_a_wrong_policy_is_replaced(appliance: Appliance) -> None:
    """Within some replays of its own journal; all requests are answered, with the same text before,
    during and after, and the journal replays to the same commands."""
    report, load, asked = asyncio.run(served(appliance.url))

    notes = {note["what"]: note for note in report["autopilot"]["notes"]}
    assert notes["applied"]["choice"]["use"] != [WRONG]
    assert notes["applied"]["gain"] > notes["applied"]["error"]
    assert report["previous"][0]["use"] == [WRONG]
    assert report["autopilot"]["cpu_seconds"] <= 360
    assert load.wrong == []
    assert {key: len(texts) for key, texts in load.texts.items()} == dict.fromkeys(load.texts, 1)
    metrics = appliance.metrics()
    prefills = sum(v for (name, _), v in metrics.items() if name == "appliance_prefills_total")
    assert prefills == asked
    assert journal.replay(appliance.journal)[1] == []
