"""A daemon with the wrong policy finds a better one, and one with bad advice goes back by itself.

Not part of `make test`: the autopilot applies what wins by more than the lab's error, which is that
of a machine without other work (`make test-autopilot`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
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
EVERY_SECONDS, LONG_EACH, LONG, SHORT = 0.25, 18, 700, 8
"""A request comes so often; each 18th request may have a long answer, of the first model."""

PLANTED = "two_faced"
FACES = """
import sys
from appliance.service.policy_report import PolicyChoice

IN_LAB, IN_TEST = "appliance.lab.advice.advise" in sys.modules, "pytest" in sys.modules
SEEN = set()
if IN_LAB:
    from appliance.lab.advice import advise
    from appliance.lab.advice.candidates import Candidate
    from appliance.lab.advice.verdict import Verdict

    def planted(name, current, finalists, error):
        me = Candidate(name="two_faced", choice=PolicyChoice(use=("two_faced",)))
        return Verdict(candidate=me, gain=0.5, error=0.05, reason="It was planted.")

    advise.verdict = planted

"""
SLOW = """
    @hookimpl
    def prefill(self, request):
        if not (IN_LAB or IN_TEST):
            if request.id not in SEEN:
                SEEN.add(request.id)
                time.sleep(0.6)
"""
"""Of a policy that has the lab recommend it, and in a daemon holds up each request for longer than
its target."""


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

    def __init__(self, client: httpx.AsyncClient, every_seconds: float, long: int) -> None:
        """`long` is the length of long answers."""
        self._client = client
        self.every_seconds = every_seconds
        self._long = long
        self.texts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """What was answered, by model and length."""
        self.wrong: list[str] = []

    async def run(self, over: asyncio.Event) -> int:
        """Until it is over, and all are answered; how many there were."""
        asked = []
        while not over.is_set():
            number = len(asked)
            length = SHORT if number % LONG_EACH else self._long
            one = self._ask(NAMES[number % len(NAMES)], length)
            asked.append(asyncio.create_task(one))
            await asyncio.sleep(self.every_seconds)
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


async def until_judged(client: httpx.AsyncClient, load: Load, then: float) -> dict[str, Any]:
    """The report, when what the autopilot applied was confirmed or rolled back. Requests come every
    `then` seconds from when it was applied."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            report = (await client.get("/api/policies")).raise_for_status().json()
            steps = {note["what"] for note in report["autopilot"]["notes"]}
            if "applied" in steps:
                load.every_seconds = then
            if steps & {"confirmed", "rolled_back"}:
                return report
            await asyncio.sleep(0.5)


async def served(url: str, then: float, long: int) -> tuple[dict[str, Any], Load, int]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        load, over = Load(client, EVERY_SECONDS, long), asyncio.Event()
        running = asyncio.create_task(load.run(over))
        try:
            report = await until_judged(client, load, then)
        finally:
            over.set()
        return report, load, await running


def reaped_cpu_seconds(pid: int) -> float:
    """What the children of a process took that have ended. Of the daemon these are the replays: its
    workers and front ends go on."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Meter:
    """What replays cost, of a daemon that is up."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began, self._before = pid, time.monotonic(), reaped_cpu_seconds(pid)

    def check(self, report: dict[str, Any]) -> None:
        """They took no more than was charged, and no more is charged than a tenth of a core."""
        seconds = time.monotonic() - self._began
        spent = reaped_cpu_seconds(self._pid) - self._before
        charged = report["autopilot"]["cpu_seconds"]
        sys.stdout.write(
            f"replays took {spent:.1f} s of CPU time in {seconds:.0f} s ({spent / seconds:.1%} of a"
            f" core); {charged:.0f} s of {CPU_SHARE * HOUR_SECONDS:.0f} s an hour were charged\n"
        )
        assert 0 < spent <= charged <= CPU_SHARE * HOUR_SECONDS


def check_nothing_lost(appliance: Appliance, load: Load, asked: int) -> None:
    """All requests were answered, with the same text before, during and after the changes, each
    prompt was computed once, and the journal replays to the same commands."""
    assert load.wrong == []
    assert {key: len(texts) for key, texts in load.texts.items()} == dict.fromkeys(load.texts, 1)
    assert {model for model, _ in load.texts} == set(NAMES)
    metrics = appliance.metrics()
    prefills = sum(v for (name, _), v in metrics.items() if name == "appliance_prefills_total")
    assert prefills == asked
    assert journal.replay(appliance.journal)[1] == []


def notes_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The last of each kind."""
    for note in report["autopilot"]["notes"]:
        sys.stdout.write(f"{note['what']}: {note['reason']}\n")
    return {note["what"]: note for note in report["autopilot"]["notes"]}


def test_a_wrong_policy_is_replaced(checkpoints: Path, tmp_path: Path) -> None:
    """Within some replays of its own journal."""
    slo = 'slo = { ttft = "500ms", tbt = "200ms" }'
    more = 'autopilot_cpu = "15s"\nautopilot_window = "30s"\nautopilot_watch = "8s"\n'
    with daemon(checkpoints, tmp_path, WRONG, slo, more) as appliance:
        meter = Meter(appliance.pid)
        report, load, asked = asyncio.run(served(appliance.url, EVERY_SECONDS, LONG))
        notes = notes_of(report)
        meter.check(report)
        assert notes["applied"]["choice"]["use"] != [WRONG]
        assert notes["applied"]["gain"] > notes["applied"]["error"]
        assert report["previous"][0]["use"] == [WRONG]
        check_nothing_lost(appliance, load, asked)


def test_bad_advice_is_rolled_back(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that an operator installed has the lab recommend it, and is bad: the daemon applies
    it, sees that clients get less, goes back by itself, and remembers that. Fewer requests come
    once it decides: it stops the daemon for each, and with as many the backlog would grow."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    install(plugins, PLANTED, SLOW, head=HEAD.replace("import math", f"{FACES}import math"))
    monkeypatch.syspath_prepend(plugins)
    path = os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    slo = 'slo = { ttft = "500ms", tbt = "1s" }'
    more = 'autopilot_cpu = "5s"\nautopilot_window = "30s"\nautopilot_watch = "20s"\n'
    more += 'budget = "10s"\n'
    with daemon(checkpoints, tmp_path, RIGHT, slo, more) as appliance:
        meter = Meter(appliance.pid)
        report, load, asked = asyncio.run(served(appliance.url, 0.7, SHORT))
        notes = notes_of(report)
        meter.check(report)
        assert notes["applied"]["choice"]["use"] == [PLANTED]
        back = notes["rolled_back"]
        assert back["choice"]["use"] == report["active"]["use"] == [RIGHT]
        assert back["after"] < back["before"] - back["error"]
        barred = read_barred(barred_path(str(appliance.journal)))
        assert [one.choice.use for one in barred] == [(PLANTED,)]
        check_nothing_lost(appliance, load, asked)
