"""A day that changes, under each fixed policy and under the autopilot, in the lab.

    python -m benchmarks.autopilot_day --json FILE [--seed 1]

Four parts on two GPUs: many models with few requests each (Aegaeon's load), one hot model with long
prompts, models whose first tokens are due within about as long as a load takes (Prism's load), and
a night of batch work. The GPUs are a quarter as fast as H100. The autopilot is the product's
(`benchmarks.autopilot_drive`). A part is ten minutes, and the autopilot's times are shorter than as
they ship: it replays the last 240 s every 200 s, with 5 s of CPU time, and watches for 120 s. The
same seed gives the same figures on any machine. A FILE that is there is gone on with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import to_builtins
from msgspec.structs import replace

from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Setting
from appliance.lab.hardware import Box, ModelProfile, gpu, profile
from appliance.lab.noise import Deviation
from appliance.lab.sim.simulator import SimulationRun
from appliance.lab.workload import Arrival, Lengths, backlog, drawn
from appliance.policies.loader import installed
from appliance.service.autopilot import AutopilotMode, AutopilotTerms
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import ModelSpec, RequestClass, Slo
from benchmarks.autopilot_drive import Day, autopilot_day, fixed_day
from benchmarks.provenance import made, write

Shares: TypeAlias = Mapping[str, Mapping[str, float]]
"""By part, then by what is shared."""
Rows: TypeAlias = Mapping[str, Shares]
Steps: TypeAlias = Iterator[str]
"""What was played."""

SCENARIOS = Path(__file__).parent / "scenarios"
MANY = {
    **{f"m{number}": "Qwen2.5-7B" for number in range(6)},
    **{f"m{number}": "Yi-9B" for number in (6, 7)},
    **{f"m{number}": "Llama-2-13B" for number in (8, 9)},
}
HOT = {"hot": "Qwen2.5-7B"}
TIGHT = {f"t{number}": "Qwen2.5-7B" for number in range(7)}
SLOW = 4.0
"""So many times slower than H100 the GPUs and their links are, so many times longer the targets and
so many times rarer the requests: a replay of a minute costs so much less."""


def _slo(ttft_seconds: float, tbt_seconds: float) -> Slo:
    """As of an H100."""
    return Slo(ttft_seconds=SLOW * ttft_seconds, tbt_seconds=SLOW * tbt_seconds)


SLOS = {
    **dict.fromkeys(MANY, _slo(10.0, 0.1)),
    **dict.fromkeys(HOT, _slo(4.0, 0.05)),
    **dict.fromkeys(TIGHT, _slo(0.4, 0.05)),
}
BATCH = _slo(240.0, 0.5)
CONTEXT = 8192
PART_SECONDS = 600.0
TERMS = AutopilotTerms(
    mode=AutopilotMode.APPLY,
    interval_seconds=200.0,
    cpu_seconds=5.0,
    window_seconds=240.0,
    watch_seconds=120.0,
)
OURS = "appliance"
WRONG = "serverlessllm"


def _lengths(name: str) -> Lengths:
    return Lengths.read(SCENARIOS / "lengths" / name).within(CONTEXT)


def _rates(models: Mapping[str, str], rate: float) -> dict[str, float]:
    """Of each, on H100s."""
    return dict.fromkeys(models, rate / SLOW)


def many_models(seconds: float, seed: int) -> list[Arrival]:
    """Each of ten has a request now and then: Aegaeon's load."""
    return drawn(_rates(MANY, 0.15), _lengths("aegaeon.csv"), seconds, seed)


def hot_model(seconds: float, seed: int) -> list[Arrival]:
    """One has long prompts and a short TBT, the others next to nothing."""
    hot = drawn(_rates(HOT, 3.0), _lengths("arxiv.csv"), seconds, seed)
    return hot + drawn(_rates(MANY, 0.02), _lengths("aegaeon.csv"), seconds, seed)


def tight_first_tokens(seconds: float, seed: int) -> list[Arrival]:
    """Seven models, some asked often and some rarely, whose first tokens are due within about as
    long as a load takes: Prism's load."""
    rates = {name: 1.2 / (1 + index) / SLOW for index, name in enumerate(TIGHT)}
    return drawn(rates, _lengths("aegaeon.csv"), seconds, seed)


def night(seconds: float, seed: int) -> list[Arrival]:
    """Batch work of four models comes at once, and a few requests of people."""
    work = backlog(
        ["m2", "m4", "m6", "m8"], int(seconds / SLOW / 4), _lengths("aegaeon.csv"), 0.0, seed
    )
    return work + drawn(_rates(MANY, 0.03), _lengths("aegaeon.csv"), seconds, seed)


PARTS = {
    "many models": many_models,
    "one hot model": hot_model,
    "tight first tokens": tight_first_tokens,
    "night batches": night,
}


def day(seed: int, part_seconds: float = PART_SECONDS) -> Setting:
    """The box and all requests of a day of parts of this length."""
    arrivals: list[Arrival] = []
    for index, part in enumerate(PARTS.values()):
        begin = index * part_seconds
        its = sorted(part(part_seconds, seed), key=lambda one: (one.seconds, one.model))
        arrivals += [_in_the_day(one, begin) for one in its]
    kinds = {name: _slower(profile(kind, "H100")) for name, kind in (MANY | HOT | TIGHT).items()}
    h100 = gpu("H100")
    return Setting(
        models=[
            ModelSpec(
                name=name,
                weight_bytes=kind.weight_bytes,
                max_context_tokens=CONTEXT,
                max_batch=256,
                slo=SLOS[name],
                batch_slo=BATCH,
            )
            for name, kind in kinds.items()
        ],
        box=Box(
            gpu=replace(h100, pcie_bytes_per_second=h100.pcie_bytes_per_second / SLOW),
            instances=2,
            host_bytes=512 << 30,
            order_seconds=SLOW * 1.3e-3,
            report_seconds=SLOW * 0.1,
        ),
        profiles={name: kind.with_step_overhead(SLOW * 0.3e-3) for name, kind in kinds.items()},
        arrivals=arrivals,
        seconds=len(PARTS) * part_seconds,
        deviation=Deviation(noise=0.1, seed=seed),
    )


def _slower(one: ModelProfile) -> ModelProfile:
    times = {
        name: SLOW * getattr(one, name) for name in one.__struct_fields__ if "_seconds" in name
    }
    return replace(one, **times)


def _in_the_day(one: Arrival, begin: float) -> Arrival:
    """A request of a part that begins then."""
    slo = BATCH if one.request_class is RequestClass.BATCH else None
    return replace(one, seconds=begin + one.seconds, slo=slo)


def shares(run: SimulationRun, part_seconds: float) -> dict[str, dict[str, float]]:
    """Of each part and of the day: shares of requests that met both targets, and of tokens in time,
    and the mean of both."""
    made: dict[str, dict[str, float]] = {}
    for index, name in enumerate(PARTS):
        made[name] = _shares(run, index * part_seconds, (index + 1) * part_seconds)
    made["the day"] = _shares(run, 0.0, run.until)
    return made


def _shares(run: SimulationRun, begin: float, end: float) -> dict[str, float]:
    """Of the requests that arrived from `begin` until `end`, whatever came of them later."""
    lives = [
        life if begin <= life.arrived < end else dataclasses.replace(life, arrived=-1.0)
        for life in run.recorder.lives
    ]
    recorder = dataclasses.replace(run.recorder, lives=lives)
    found = measure(dataclasses.replace(run, recorder=recorder, samples=()))
    both = found.request_attainment, found.token_attainment
    return {
        "requests": round(both[0], 5),
        "tokens": round(both[1], 5),
        "value": round(sum(both) / 2, 5),
    }


def policies() -> list[str]:
    """That a daemon could have for the whole day."""
    return [one.name for one in installed() if one.shipped and not one.lab_only and not one.error]


def told(day: Day, part_seconds: float) -> dict[str, Any]:
    """What the autopilot did and found, for the file."""
    return {
        "shares": shares(day.run, part_seconds),
        "steps": [
            {"at": at, **{k: v for k, v in to_builtins(note).items() if v is not None}}
            for at, note in day.notes
        ],
        "replays": list(day.replays),
    }


def compared(fixed: Rows, autopilot: Rows) -> dict[str, Any]:
    """The best fixed policy of the whole day, and by how much the autopilot is ahead of it and of
    ours, in each part and share, by the policy that it began with."""
    best = max(fixed, key=lambda name: (fixed[name]["the day"]["value"], name))
    return {
        "best_fixed": best,
        "best_of_each_part": {
            part: max(fixed, key=lambda name: (fixed[name][part]["value"], name)) for part in PARTS
        },
        "ahead": {
            began: {"best_fixed": _ahead(rows, fixed[best]), OURS: _ahead(rows, fixed[OURS])}
            for began, rows in autopilot.items()
        },
    }


def _ahead(mine: Shares, theirs: Shares) -> Shares:
    return {
        part: {share: round(value - theirs[part][share], 5) for share, value in row.items()}
        for part, row in mine.items()
    }


def play(result: dict[str, Any], seed: int, part_seconds: float, begin: Sequence[str]) -> Steps:
    """Fill `result` with what it does not have yet, a day at a time."""
    setting = day(seed, part_seconds)
    result |= {"seed": seed, "part_seconds": part_seconds, "requests": len(setting.arrivals)}
    fixed = result.setdefault("fixed", {})
    for name in policies():
        if name not in fixed:
            played = fixed_day(setting, PolicyChoice(use=(name,)))
            fixed[name] = shares(played.run, part_seconds)
            yield name
    autopilot = result.setdefault("autopilot", {})
    for name in begin:
        if name not in autopilot:
            with tempfile.TemporaryDirectory() as directory:
                terms = replace(TERMS, journal=str(Path(directory) / "journal"))
                played = autopilot_day(setting, PolicyChoice(use=(name,)), terms)
            autopilot[name] = told(played, part_seconds)
            yield f"the autopilot, from {name}"
    rows = {name: its["shares"] for name, its in autopilot.items()}
    result["compared"] = compared(fixed, rows)


def table(result: dict[str, Any]) -> str:
    """For people: requests that met both targets / tokens in time."""
    columns = [*PARTS, "the day"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    fixed = sorted(result["fixed"].items(), key=lambda one: -one[1]["the day"]["value"])
    rows = [(name, row) for name, row in fixed]
    rows += [(f"autopilot from `{n}`", its["shares"]) for n, its in result["autopilot"].items()]
    for name, row in rows:
        cells = [f"{row[part]['requests']:.3f} / {row[part]['tokens']:.3f}" for part in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part-seconds", type=float, default=PART_SECONDS)
    given = parser.parse_args()
    result: dict[str, Any] = made()
    if given.json.exists():
        result = json.loads(given.json.read_text(encoding="utf-8"))
        if (result["seed"], result["part_seconds"]) != (given.seed, given.part_seconds):
            parser.error(f"--json: {given.json} is of another day; give another file")
    for name in play(result, given.seed, given.part_seconds, (WRONG, OURS)):
        write(result, given.json)
        print(name, flush=True)
    write(result, given.json)
    print(table(result))


if __name__ == "__main__":
    main()
