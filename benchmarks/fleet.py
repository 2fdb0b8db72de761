"""What a router in front of several boxes is worth: a simulation, by the lab's fleet.

    python -m benchmarks.fleet small|large|costs|placed --json FILE

`small` plays 1, 4 and 16 boxes: every router at the same load; with 4, the load up to which it
keeps 90 % of token deadlines, in the mean of five seeds; with 16, how old the router's knowledge
may be. `large` plays 64 boxes with a thousand models, ten minutes with the CPU time that they take;
the capacity of 16; and random routing of 64 at the same load.
`costs` is the work of the router itself, on this machine. `placed` compares catalogues of 4 boxes:
all models everywhere, each on one box in turn, or on one as `appliance fleet plan` has it. Each
adds to the file what it found.
Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from appliance.fleet.ranking import ROUTERS, BoxLoad, BoxState, FleetRequest
from appliance.lab.experiments.comparison import Match, played
from benchmarks.provenance import made, write

SCENARIO: Final = Path(__file__).parent / "scenarios/fleet.toml"
POLICY: Final = "appliance"
MODELS: Final = {1: (1, 15), 4: (4, 59), 16: (16, 234), 64: (62, 938)}
"""By boxes: models that are asked for often, and the others."""
LOAD: Final = 1.5
"""Times the scenario's rate, at which all are compared."""
GRID: Final = tuple(0.5 * 1.2**step for step in range(16))
"""Loads that are tried for the capacity."""
KEPT: Final = 0.9
SEEDS: Final = (1, 2, 3, 4, 5)
"""Of the runs for the capacity: whether a box that is nearly full gets the one model too many is
chance."""
POLLS: Final = (0.1, 1.0, 5.0)
PLACED_LOADS: Final = (2.4, 3.5)
CATALOGUES: Final = {
    "everywhere": {"fleet.copies": "4"},
    "in turn": {"fleet.copies": "1"},
    "planned": {"fleet.copies": "1", "fleet.placement": "demand"},
}
UNEVEN: Final = {
    "models.0.count": "2",
    "models.0.rate": "0.32",
    "models.1.count": "61",
    "duration": "10m",
    "warmup": "4m",
}
"""As many requests as in the scenario, but two models have what four had: in turn they are on two
of the boxes. Ten minutes, as each model has to be read from disk once."""
METRICS: Final = (
    "requests",
    "token_attainment",
    "request_attainment",
    "ttft_p50_seconds",
    "ttft_p99_seconds",
    "busy_share",
    "switches",
    "loads",
)

Cell = dict[str, Any]


def play(
    boxes: int, router: str, load: float, poll: float = 1.0, minutes: int = 3, seed: int = 1
) -> Cell:
    """One run, and the CPU time that it took."""
    often, seldom = MODELS[boxes]
    changes = {
        "fleet.boxes": str(boxes),
        "fleet.poll": f"{poll}s",
        "models.0.count": str(often),
        "models.1.count": str(seldom),
        "arrivals.rate_scale": f"{load:.4f}",
        "duration": f"{minutes}m",
    }
    began = time.process_time()
    match = Match(path=str(SCENARIO), policy=POLICY, seed=seed, router=router, changes=changes)
    found = played(match)
    spent = time.process_time() - began
    assert found.fleet is not None
    cell = {"boxes": boxes, "models": often + seldom, "router": router, "load": round(load, 4)}
    cell |= {"poll_seconds": poll, "minutes": minutes, "seed": seed}
    cell |= {"cpu_seconds": round(spent, 1)}
    cell |= {name: found.metrics[name] for name in METRICS}
    cell |= {name: getattr(found.fleet, name) for name in found.fleet.__struct_fields__[1:]}
    print(
        f"{boxes:3} boxes {router:16} load {load:5.2f} poll {poll:3.1f} s: tokens"
        f" {cell['token_attainment']:.3f}, loads/request {cell['loads_per_request']:.2f},"
        f" {spent:.1f} s of CPU",
        flush=True,
    )
    return cell


def capacity(grid: Sequence[float], kept: Callable[[float], float]) -> float:
    """The load at which `KEPT` of the deadlines are kept, between the last one of the grid up to
    which they are at all and the next; 0 if at none, the last if at all."""
    above = 1.0
    for low, high in pairwise([0.0, *grid]):
        below = kept(high)
        if below < KEPT:
            return low + (high - low) * (above - KEPT) / (above - below) if low else 0.0
        above = below
    return grid[-1]


class Results:
    """The file, written after every run; a run that is in it is not made again. After so many
    new runs as `left` the program ends."""

    def __init__(self, path: Path, left: int | None = None) -> None:
        self._path = path
        self._left = left
        self.all: dict[str, Any] = {"what": "simulation of the lab; no GPU was used"}
        self.all |= {"scenario": SCENARIO.name, "policy": POLICY, "kept": KEPT}
        self.all |= {"runs": [], "capacity": {}, "costs": [], "placed": []}
        if path.is_file():
            self.all = json.loads(path.read_text(encoding="utf-8"))
        self.all |= made()

    def run(
        self,
        boxes: int,
        router: str,
        load: float,
        poll: float = 1.0,
        minutes: int = 3,
        seed: int = 1,
    ) -> Cell:
        """The run, as it was or as it is now."""
        asked = {"boxes": boxes, "router": router, "load": round(load, 4)}
        asked |= {"poll_seconds": poll, "minutes": minutes, "seed": seed}
        for cell in self.all["runs"]:
            if asked.items() <= cell.items():
                known: Cell = cell
                return known
        if self._left == 0:
            raise SystemExit("the runs asked for are done; ask again for more")
        self._left = None if self._left is None else self._left - 1
        found = play(boxes, router, load, poll, minutes, seed)
        self.add("runs", found)
        return found

    def add(self, part: str, cell: Cell) -> None:
        self.all[part].append(cell)
        write(self.all, self._path)

    def search(self, boxes: int, router: str) -> None:
        """Find the capacity of boxes behind a router, unless it is known."""
        if router in self.all["capacity"].get(str(boxes), {}):
            return

        def kept(load: float) -> float:
            cells = [self.run(boxes, router, load, seed=seed) for seed in SEEDS]
            return math.fsum([cell["token_attainment"] for cell in cells]) / len(cells)

        found = capacity(GRID, kept)
        self.all["capacity"].setdefault(str(boxes), {})[router] = round(found, 3)
        write(self.all, self._path)


def small(results: Results) -> None:
    for boxes in (1, 4):
        for router in ROUTERS:
            results.run(boxes, router, LOAD)
    for router in ROUTERS:
        results.search(4, router)
    for router in ROUTERS:
        results.run(16, router, LOAD)
    for poll in POLLS:
        results.run(16, "residency", LOAD, poll)


def large(results: Results) -> None:
    results.run(64, "residency", LOAD, minutes=10)
    for router in ("random", "residency"):
        results.search(16, router)
    for router in ("random", "residency"):
        results.run(64, router, LOAD)
    for router in ("least_busy", "residency_prefix"):
        results.search(16, router)


def placed(results: Results) -> None:
    for load in PLACED_LOADS:
        for name, changes in CATALOGUES.items():
            asked = {**UNEVEN, **changes, "arrivals.rate_scale": str(load), "fleet.boxes": "4"}
            began = time.process_time()
            match = Match(
                path=str(SCENARIO), policy=POLICY, seed=1, router="residency", changes=asked
            )
            found = played(match)
            assert found.fleet is not None
            cell: Cell = {"catalogues": name, "load": load}
            cell |= {"cpu_seconds": round(time.process_time() - began, 1)}
            cell |= {metric: found.metrics[metric] for metric in METRICS}
            cell |= {one: getattr(found.fleet, one) for one in found.fleet.__struct_fields__}
            print(cell, flush=True)
            results.add("placed", cell)


def costs(results: Results) -> None:
    """What a router itself has to do, by the number of boxes: a choice, and taking in polls."""
    models = [f"m{n:03}" for n in range(1000)]
    encoder = msgspec.json.Encoder(enc_hook=sorted)
    for boxes in (64, 1024, 4096):
        states = [BoxState(name=f"box-{n}", load=_load_of(n, boxes, models)) for n in range(boxes)]
        answers = [encoder.encode(state.load) for state in states[:64]]
        requests = [FleetRequest(model=models[n * 7], session=f"s{n}") for n in range(40)]
        cell: Cell = {"boxes": boxes, "models": len(models)}
        for router, choose in ROUTERS.items():
            began = time.process_time()
            for request in requests:
                choose(request, states, 0.5)
            spent = (time.process_time() - began) / len(requests)
            cell[f"{router}_choice_seconds"] = round(spent, 7)
        began = time.process_time()
        for answer in answers:
            msgspec.json.decode(answer, type=BoxLoad)
        cell["poll_decode_seconds"] = round((time.process_time() - began) / len(answers), 7)
        cell["poll_bytes"] = sum(map(len, answers)) // len(answers)
        print(cell)
        results.add("costs", cell)


def _load_of(number: int, boxes: int, models: Sequence[str]) -> BoxLoad:
    """Eight models on the devices of each box and forty images in its host cache."""
    first = number * len(models) // boxes
    turned = [*models[first:], *models[:first]]
    return BoxLoad(
        catalogue=frozenset(models),
        resident=frozenset(turned[:8]),
        coming=frozenset(turned[8:9]),
        host=frozenset(turned[:40]),
        waiting=number % 3,
        running=number % 7,
        requests_by_model=dict.fromkeys(turned[:9], 1),
        asked_models=9,
        resident_models=8,
        coming_models=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = {"small": small, "large": large, "costs": costs, "placed": placed}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--runs", type=int, help="make no more new runs than so many")
    given = parser.parse_args()
    parts[given.part](Results(given.json, given.runs))


if __name__ == "__main__":
    main()
