"""What a promised longest gap changes for readers: pauses of streams, in the lab.

    python -m benchmarks.gaps [SCENARIO ...] [--json FILE]

Models share GPUs. Each scenario is played by the policy `appliance` without a gap, with 1 s and
with 0.5 s. All are judged by the same promises, so that a row without a gap says what readers get
where nothing was promised to them. Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from appliance.lab.experiments import scenario
from appliance.lab.experiments.metrics import expand, measure
from appliance.lab.experiments.run import play
from appliance.lab.sim.simulator import SimulationRun
from benchmarks.provenance import made, write

SCENARIOS = Path(__file__).parent / "scenarios"
GAPS = (0.0, 1.0, 0.5)
"""Seconds; 0 for none."""
WARMUP_SECONDS = 20.0
PAUSES = (0.5, 1.0, 4.0)
"""Gaps that are longer, in seconds, are counted."""


@dataclass(frozen=True)
class Box:
    """A scenario file and what is changed of it."""

    what: str
    file: str
    changes: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1, 2, 3)


BOXES = {
    "aegaeon": Box(
        "92 models on 16 H800, 0.1 requests a second each: 80 % of the most that is carried",
        "capacity_aegaeon.toml",
        {"models.0.count": "92", "arrivals.rate": "0.1", "duration": '"120s"'},
        seeds=(1,),
    ),
    "h800": Box(
        "8 models on two H800, 0.2 requests a second each",
        "capacity_aegaeon.toml",
        {
            "hardware.count": "2",
            "models.0.count": "8",
            "arrivals.rate": "0.2",
            "duration": '"120s"',
        },
    ),
    "a10": Box(
        "4 models on four A10, 0.1 requests a second each, TTFT 5 s; a GPU has room for one model",
        "aegaeon_a10.toml",
        {"models.0.count": "4", "duration": '"240s"'},
    ),
}


def played(box: Box, gap: float, seed: int) -> SimulationRun:
    """One run; with a gap of 0, none is promised."""
    path = SCENARIOS / box.file
    changes = dict(box.changes) | ({"slo.gap": f'"{gap:g}s"'} if gap else {})
    chosen = scenario.read(path, changes)
    return play(chosen.setting(seed, path.parent), chosen.contender("appliance")).run


def judged(run: SimulationRun, gap: float) -> float:
    """Token attainment, as if this gap had been promised to all."""
    for life in run.recorder.lives:
        life.slo = replace(life.slo, gap_seconds=gap)
    return measure(run, WARMUP_SECONDS).token_attainment


def row(run: SimulationRun) -> dict[str, float]:
    """Figures of a run: gaps between tokens of all requests, the longest gap of each request, and
    what was in time. Seconds, counts and shares."""
    lives = [life for life in run.recorder.lives if life.arrived >= WARMUP_SECONDS]
    tokens = expand(run.recorder, lives)
    follows = tokens.index[1:] > 0
    gaps = np.diff(tokens.seconds)[follows]
    longest = np.zeros(len(lives))
    np.maximum.at(longest, tokens.request[1:][follows], gaps)
    usual = measure(run, WARMUP_SECONDS)
    return {
        "requests": len(lives),
        "gap_p50_seconds": usual.tbt_p50_seconds,
        "gap_p99_seconds": usual.tbt_p99_seconds,
        "longest_gap_p50_seconds": float(np.percentile(longest, 50)),
        "longest_gap_p99_seconds": float(np.percentile(longest, 99)),
        **{f"gaps_over_{over:g}s": int((gaps > over).sum()) for over in PAUSES},
        "ttft_p50_seconds": usual.ttft_p50_seconds,
        "ttft_attainment": usual.ttft_attainment,
        "tpot_attainment": usual.tpot_attainment,
        "switches": usual.switches,
        **{
            f"token_attainment_gap_{gap:g}s" if gap else "token_attainment": judged(run, gap)
            for gap in GAPS
        },
    }


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of the seeds."""
    return {name: round(sum(one[name] for one in rows) / len(rows), 4) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(BOXES)}; all without")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    if strange := set(given.scenario) - set(BOXES):
        parser.error(f"no scenario {min(strange)}; there are {', '.join(BOXES)}")
    found: dict[str, Any] = {}
    for name in given.scenario or BOXES:
        box = BOXES[name]
        print(f"SIMULATED: {box.what}")
        found[name] = {"what": box.what, "seeds": list(box.seeds), "promised": {}}
        for gap in GAPS:
            one = mean([row(played(box, gap, seed)) for seed in box.seeds])
            found[name]["promised"][f"{gap:g}s" if gap else "none"] = one
            words = ", ".join(f"{key} {value:g}" for key, value in one.items())
            print(f"  gap {gap:g} s: {words}", flush=True)
    write({**made(), "what": "simulation of the lab; no GPU was used", "rows": found}, given.json)


if __name__ == "__main__":
    main()
