"""How far the lab's predictions are from a real daemon: one half of its day predicts the other.

    python benchmarks/fidelity.py [--policy appliance …] [--seconds 240] [--json FILE]
    python benchmarks/fidelity.py --keep DIR      # keep the journals,
    python benchmarks/fidelity.py --from DIR      # and look at them again

Starts the daemon with the six models of the demonstration on two instances whose pools hold a third
of the weights, and sends it an open loop of requests: Poisson for each model, prompts and answers
of random length, all from one seed. The lab then fits its costs to the first half of the daemon's
journal, after a warm-up in which engines meet their first prompts, plays the whole day again under
the same policy, and is held against what happened to the requests of the second half. The same with
every other block of the day in place of the second half: where the machine is not as fast all day,
that shows what is the lab's error and what is not. A small difference of times sends a day another
way, so a prediction is the mean of some runs, whose times have the noise of the learned half.

Times are the daemon's own: a request arrives when the daemon has read it, a token is there when it
has come from the worker. What clients saw is told, too. Daemon, workers and client need the machine
for themselves; a day on which it stood still for long is begun anew, a few times.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.client import event_lines_async
from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from appliance.lab.experiments.metrics import expand, measure
from appliance.lab.experiments.run import play
from appliance.lab.replay.journal_workload import recording
from appliance.lab.sim.simulator import SimulationRun
from benchmarks.provenance import made_on_cpu

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
BLOCK_SECONDS: Final = 20.0
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

    warmup_seconds: float
    seconds: float
    """Of both halves."""
    stood_still_seconds: float
    """The longest time for which the client did not get its turn."""
    heard: list[Heard]
    told: dict[str, Any]
    """When, where and of what it was made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", dest="policies", help="may be repeated")
    parser.add_argument("--seconds", type=float, default=240.0, help="both halves together")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds before them")
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second of each model")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--ttft", type=float, default=0.3, help="SLO, seconds")
    parser.add_argument("--tbt", type=float, default=0.15, help="SLO, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tries", type=int, default=3, help="of a day on which nothing stood still"
    )
    parser.add_argument("--runs", type=int, default=8, help="of the lab, for each prediction")
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
        results = {policy: compare(directory, policy, options.runs) for policy in policies}
    for policy, result in results.items():
        show(policy, result)
    if options.json:
        what = "a half of a day of a real daemon on the CPU, predicted from the other half"
        document = {"what": what, "predicted": made_on_cpu(), "policies": results}
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
    told = made_on_cpu() | {
        "requests_per_second": options.rate * len(config.models),
        "seed": options.seed,
        "instances": options.instances,
        "slo": {"ttft_seconds": options.ttft, "tbt_seconds": options.tbt},
    }
    made = Day(options.warmup, options.seconds, stood_still, heard, told)
    place.joinpath(f"{policy}.day.json").write_bytes(msgspec.json.encode(made))


def day_of(models: Sequence[str], options: argparse.Namespace) -> list[Ask]:
    """The requests, in the order of time."""
    dice = random.Random(options.seed)
    asks = []
    for model in models:
        seconds = dice.expovariate(options.rate)
        while seconds < options.warmup + options.seconds:
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
        if stages <= {"cold", "loading", "loaded"}:
            return
        time.sleep(0.1)


async def send(url: str, asks: Sequence[Ask]) -> tuple[list[Heard], float]:
    """Each at its time, whatever became of the others; returns when all have ended, with the
    longest time for which nothing happened here that should have."""
    # A connection of its own for each: one that is kept may be closed just when it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
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
        async for line in event_lines_async(response.aiter_bytes()):
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


def compare(place: Path, policy: str, runs: int) -> dict[str, Any]:
    """What the lab makes of the other half, beside what happened."""
    day = msgspec.json.decode(place.joinpath(f"{policy}.day.json").read_bytes(), type=Day)
    splits = {
        "second half, from the first": Halves(day.warmup_seconds, day.seconds / 2, 1),
        "every other block, from those between": Halves(
            day.warmup_seconds, BLOCK_SECONDS, round(day.seconds / BLOCK_SECONDS / 2)
        ),
    }
    return {
        **day.told,
        "seconds": day.seconds,
        "warmup_seconds": day.warmup_seconds,
        "stood_still_seconds": round(day.stood_still_seconds, 3),
        "runs": runs,
        "splits": {
            name: predict(place / f"{policy}.jsonl", day, split, runs)
            for name, split in splits.items()
        },
    }


@dataclass(frozen=True)
class Halves:
    """A day after its warm-up in `pairs` pairs of blocks: one to learn from, one to predict."""

    warmup_seconds: float
    block_seconds: float
    pairs: int

    def learned(self, seconds: float) -> bool:
        return self._block(seconds) % 2 == 0

    def predicted(self, seconds: float) -> bool:
        return self._block(seconds) % 2 == 1

    def _block(self, seconds: float) -> float:
        """NaN before and after."""
        block = (seconds - self.warmup_seconds) // self.block_seconds
        return block if 0 <= block < 2 * self.pairs else math.nan


def predict(journal: Path, day: Day, halves: Halves, runs: int) -> dict[str, Any]:
    found = recording(journal, halves.learned)
    real = figures(found.happened, halves)
    rows = []
    for seed in range(runs):
        deviation = msgspec.structs.replace(found.setting.deviation, seed=seed)
        trial = play(dataclasses.replace(found.setting, deviation=deviation), found.contender)
        rows.append(figures(trial.run, halves))
    predicted = {name: statistics.fmean(row[name] for row in rows) for name in real}
    box = found.setting.box
    return {
        "requests": sum(halves.predicted(life.arrived) for life in found.happened.recorder.lives),
        "real": rounded(real),
        "predicted": rounded(predicted),
        "range": {
            name: [
                round(min(row[name] for row in rows), 4),
                round(max(row[name] for row in rows), 4),
            ]
            for name in real
        },
        "error": rounded({name: error(name, predicted[name], real[name]) for name in real}),
        "clients": rounded(of_clients(day, halves)),
        "learned": {
            "noise": round(found.setting.deviation.noise, 3),
            "order_seconds": round(box.order_seconds, 5),
            "mapping_seconds": round(box.gpu.mapping_seconds, 5),
            "interference_seconds": round(box.interference_seconds, 5),
            "load_bytes_per_second": round(box.gpu.link_bytes_per_second),
        },
    }


def error(name: str, predicted: float, real: float) -> float:
    """Of times relative, of shares in shares; NaN of a time that was not measured."""
    if name.endswith("_seconds"):
        return predicted / real - 1 if real else math.nan
    return predicted - real


def figures(run: SimulationRun, halves: Halves) -> Figures:
    """Of the requests that arrived when they are to be predicted."""
    lives = [life for life in run.recorder.lives if halves.predicted(life.arrived)]
    tokens = expand(run.recorder, lives)
    first = tokens.index == 0
    arrived = np.array([life.arrived for life in lives])
    ttft = tokens.seconds[first] - arrived[tokens.request[first]]
    gaps = np.diff(tokens.seconds)[tokens.index[1:] > 0]
    # All others are of a time that is not looked at.
    everybody = [
        life if halves.predicted(life.arrived) else dataclasses.replace(life, arrived=-1.0)
        for life in run.recorder.lives
    ]
    recorder = dataclasses.replace(run.recorder, lives=everybody)
    metrics = measure(dataclasses.replace(run, recorder=recorder))
    return percentiles(ttft, gaps) | {name: getattr(metrics, name) for name in SHARES}


def of_clients(day: Day, halves: Halves) -> Figures:
    heard = [one for one in day.heard if halves.predicted(one.asked)]
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
    for name, split in result["splits"].items():
        print(f"{policy}, {name}: {split['requests']} requests")
        for figure, real in split["real"].items():
            low, high = split["range"][figure]
            predicted, error = split["predicted"][figure], split["error"][figure]
            print(f"  {figure:20} {real:9.4f} {predicted:9.4f} ({low:.4f}-{high:.4f}) {error:+.1%}")


if __name__ == "__main__":
    main()
