"""A daemon with the wrong policy finds a better one, and one with bad advice goes back by itself.

Not part of `make test`: replays have the lowest priority, so on a busy machine they wait for long
(`make test-autopilot`). The tests wait for the autopilot's own events.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance import journal
from appliance.config.loader import load_config
from appliance.daemon.autopilot.barred_file import barred_path, read_barred
from appliance.demo.checkpoints import write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import free_port, running_daemon
from appliance.service.autopilot import CPU_SHARE, HOUR_SECONDS
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance
from tests.unit.policies.strangers import HEAD, install

WRONG = "serverlessllm"
"""It gives the instance to a long answer until it is whole, and the others wait."""
RIGHT = "appliance"
NAMES = tuple(recipe.name for recipe in RECIPES)
"""Six, of which the pool holds the weights of two."""
AUTOPILOT = """
autopilot = "apply"
autopilot_interval = "10s"
"""
REPLACED_SECONDS = 300.0
"""So long may a wrong policy decide until another one does."""
EVERY_SECONDS, LONG_EACH, LONG, SHORT = 0.25, 18, 700, 8
"""A request comes so often; each 18th request may have a long answer, of the first model."""

PLANTED = "two_faced"
FACES = """
import sys
from appliance.service.policy_report import PolicyChoice

IN_LAB, IN_TEST = "appliance.lab.advice.advise" in sys.modules, "pytest" in sys.modules
if IN_LAB:
    from appliance.lab.advice import advise
    from appliance.lab.advice.candidates import Candidate
    from appliance.lab.advice.verdict import Verdict

    def planted(*compared):
        me = Candidate(name="two_faced", choice=PolicyChoice(use=("two_faced",)))
        return Verdict(candidate=me, gain=0.5, error=0.05, reason="It was planted.")

    advise.verdict = planted

"""
"""Has the lab recommend the policy; in a daemon it is bad. The test replays its journal, and need
not sleep for that."""
REFUSES = """
    @hookimpl
    def prefill(self, request):
        if not IN_LAB:
            return Refusal(reason="planted")
"""
SLEEPS = """
    @hookimpl
    def prefill(self, request):
        if not (IN_LAB or IN_TEST):
            time.sleep(5.0)
"""
"""For much longer than a policy's budget, which is what it may hold up the daemon for: after three
such answers it is not asked any more."""


@contextmanager
def daemon(
    checkpoints: Path, folder: Path, policy: str, slo: str, more: str
) -> Iterator[Appliance]:
    """With six models on one instance, an autopilot, and a journal."""
    file = write_config(
        checkpoints, NAMES, policy=policy, instances=1, bind=f"127.0.0.1:{free_port()}"
    )
    text = file.read_text().replace("[policy]\n", f"[policy]{AUTOPILOT}{more}")
    text = text.replace('slo = { ttft = "10s", tbt = "100ms" }', slo)
    written = folder / "journal.jsonl"
    own = folder / "appliance.toml"
    own.write_text(f"{text}\n[journal]\npath = {str(written)!r}\n")
    config = load_config(own)
    with running_daemon(own, config) as (url, pid):
        yield Appliance(url, pid, config, written)


class Load:
    """Requests that keep coming."""

    def __init__(self, client: httpx.AsyncClient, long: int) -> None:
        """`long` is the length of long answers."""
        self._client = client
        self._long = long
        self.texts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """What was answered, by model and length."""
        self.answered = 0
        self.progress = asyncio.Event()
        """Set with each answer."""
        self.refused = 0
        """By the planted policy."""
        self.wrong: list[str] = []
        self.asked = 0

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over, and all are answered."""
        loop, waiting = asyncio.get_running_loop(), []
        began = loop.time()
        while not over.is_set():
            length = SHORT if self.asked % LONG_EACH else self._long
            one = self._ask(NAMES[self.asked % len(NAMES)], length)
            waiting.append(asyncio.create_task(one))
            self.asked += 1
            due = began + self.asked * EVERY_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(0.0, due - loop.time()))
        await asyncio.gather(*waiting)

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
            self.answered += 1
            self.progress.set()
        elif answer.status_code == 503 and "planted" in found["error"]["message"]:
            self.refused += 1
        else:
            self.wrong.append(answer.text)


async def autopilot_notes(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    """What the autopilot does from now on; each is printed, too."""
    async with client.stream("GET", "/api/events") as answer:
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "autopilot":
                note = json.loads(line.removeprefix("data: "))["facts"]
                sys.stdout.write(f"{note['what']}: {note['reason']}\n")
                yield note


async def judged(client: httpx.AsyncClient, load: Load) -> dict[str, Any]:
    """What it did until something that it applied was confirmed or rolled back, by kind, the newest
    of each. The load begins with it."""
    over, notes = asyncio.Event(), {}
    running = asyncio.create_task(load.run(over))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for note in autopilot_notes(client):
                notes[note["what"]] = note | {"clock": time.monotonic()}
                if note["what"] in ("confirmed", "rolled_back"):
                    break
        # Policies decide again that answer all.
        since = load.answered
        async with asyncio.timeout(PATIENCE_SECONDS):
            while load.answered < since + len(NAMES):
                load.progress.clear()
                await load.progress.wait()
    finally:
        over.set()
        await running
    return notes


async def served(url: str, long: int) -> tuple[dict[str, Any], dict[str, Any], Load]:
    """What the autopilot did, the report of policies at the end, and the requests."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        load = Load(client, long)
        notes = await judged(client, load)
        report = (await client.get("/api/policies")).raise_for_status().json()
        return notes, report, load


def reaped_cpu_seconds(pid: int) -> float:
    """What the children of a process took that have ended. Of the daemon these are the replays: its
    workers and front ends go on."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Meter:
    """What replays cost, of a daemon that is up."""

    def __init__(self, pid: int) -> None:
        self._pid, self.began, self._before = pid, time.monotonic(), reaped_cpu_seconds(pid)

    def check(self, report: dict[str, Any]) -> None:
        """They took no more than was charged, and no more than a tenth of a core until now; no
        more is charged than a tenth of a core for an hour."""
        seconds = time.monotonic() - self.began
        spent = reaped_cpu_seconds(self._pid) - self._before
        charged = report["autopilot"]["cpu_seconds"]
        sys.stdout.write(
            f"replays took {spent:.1f} s of CPU time in {seconds:.0f} s ({spent / seconds:.1%} of a"
            f" core); {charged:.0f} s of {CPU_SHARE * HOUR_SECONDS:.0f} s an hour were charged\n"
        )
        assert 0 < spent <= charged <= CPU_SHARE * HOUR_SECONDS
        assert spent <= CPU_SHARE * seconds


def check_nothing_lost(appliance: Appliance, load: Load) -> None:
    """All requests that were not refused were answered, with the same text before, during and after
    the changes, each prompt was computed once, and the journal replays to the same commands."""
    assert load.wrong == []
    assert load.answered + load.refused == load.asked
    assert {key: len(texts) for key, texts in load.texts.items()} == dict.fromkeys(load.texts, 1)
    assert {model for model, _ in load.texts} == set(NAMES)
    metrics = appliance.metrics()
    prefills = sum(v for (name, _), v in metrics.items() if name == "appliance_prefills_total")
    assert prefills == load.answered
    assert journal.replay(appliance.journal)[1] == []


def test_a_wrong_policy_is_replaced(checkpoints: Path, tmp_path: Path) -> None:
    """By a replay of its own journal."""
    slo = 'slo = { ttft = "500ms", tbt = "200ms" }'
    more = 'autopilot_cpu = "10s"\nautopilot_window = "30s"\nautopilot_watch = "10s"\n'
    with daemon(checkpoints, tmp_path, WRONG, slo, more) as appliance:
        meter = Meter(appliance.pid)
        notes, report, load = asyncio.run(served(appliance.url, LONG))
        meter.check(report)
        assert notes["applied"]["clock"] - meter.began <= REPLACED_SECONDS
        assert notes["applied"]["choice"]["use"] != [WRONG]
        assert notes["applied"]["gain"] > notes["applied"]["error"]
        assert report["previous"][0]["use"] == [WRONG]
        assert load.refused == 0
        check_nothing_lost(appliance, load)


@pytest.mark.parametrize("bad", [REFUSES, SLEEPS], ids=["refuses", "sleeps"])
def test_bad_advice_is_rolled_back(
    bad: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that an operator installed has the lab recommend it, and is bad: the daemon applies
    it, sees that clients get less or that it does not answer, goes back by itself, and remembers
    that."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    install(plugins, PLANTED, bad, head=HEAD.replace("import math", f"{FACES}import math"))
    monkeypatch.syspath_prepend(plugins)
    path = os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    slo = 'slo = { ttft = "60s", tbt = "10s" }'
    more = 'autopilot_cpu = "5s"\nautopilot_window = "30s"\nautopilot_watch = "20s"\n'
    with daemon(checkpoints, tmp_path, RIGHT, slo, more) as appliance:
        meter = Meter(appliance.pid)
        notes, report, load = asyncio.run(served(appliance.url, SHORT))
        meter.check(report)
        assert notes["applied"]["choice"]["use"] == [PLANTED]
        back = notes["rolled_back"]
        assert back["choice"]["use"] == report["active"]["use"] == [RIGHT]
        if bad == REFUSES:
            assert back["after"] < back["before"] - back["error"]
            assert load.refused > 0
        else:
            assert back["reason"] == f"policy {PLANTED} failed too often"
            assert load.refused == 0
        barred = read_barred(barred_path(str(appliance.journal)))
        assert [one.choice.use for one in barred] == [(PLANTED,)]
        check_nothing_lost(appliance, load)
