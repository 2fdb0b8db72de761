"""What a decision costs, and what the machine makes of an event, with a full house.

    python benchmarks/decisions.py [--policy appliance] [--load turns ...] [--models 100]
                                   [--instances 16] [--events 40000] [--runs 3] [--json FILE]

Loads are those of `benchmarks/decision_house.py`: `turns`, `homes` and `apart`. With each, the
events of the given number are timed: each question through the stack (the policy, and checking its
answer), and each event without the questions it led to, and with them. Microseconds, median and
99th percentile: of the processor, without Python's garbage collector, which may strike anywhere and
is shown apart; of the processor with the collector; and of the clock. What is there after the
warm-up is frozen, as the daemon does after its start. All runs are the same, so of each question
the least time of the runs counts: other processes take the caches, and so make some slower.
`all_decisions` has the questions of all kinds together. Events
are those of the last run. `commands` is a digest of all commands: it is the same if all decisions
were.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.policies.loader import load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import Placement, Policy
from appliance.service.policy_report import PolicyChoice
from benchmarks.decision_house import LOADS, House

CLOCK = "set_clock"
"""It is told, and no question."""


class Collector:
    """How long the garbage collector stopped everything, by generation."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.total_ns = 0
        self._began = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
            return
        taken = time.thread_time_ns() - self._began
        self.taken[f"generation_{info['generation']}"].append(taken)
        self.total_ns += taken

    def close(self) -> None:
        gc.callbacks.remove(self._note)

    def clock_ns(self) -> int:
        """Time of the processor, less that of the collector."""
        return time.thread_time_ns() - self.total_ns


class Taken(NamedTuple):
    """Nanoseconds of one question."""

    processor: int
    collector: int
    """Of the processor, in the garbage collector."""
    clock: int


class Stopwatch:
    """Passes questions on to a stack, and keeps how long each took, and what places changed."""

    def __init__(self, stack: PolicyStack, collector: Collector) -> None:
        self.stack = stack
        self.collector = collector
        self.taken: dict[str, list[Taken]] = defaultdict(list)
        self.on_question: Callable[[int], None] = lambda taken: None
        self.answers: dict[str, int] = defaultdict(int)
        """What the answers had: plans of places that differ from the one before, models in them
        that load ahead, requests that go on elsewhere."""
        self._placements: Sequence[Placement] = ()

    def __getattr__(self, hook: str) -> Callable[..., object]:
        question = getattr(self.stack, hook)
        collector, processor_ns, clock_ns = (
            self.collector,
            time.thread_time_ns,
            time.perf_counter_ns,
        )

        def ask(*arguments: object) -> object:
            collected = collector.total_ns
            clock, began = clock_ns(), processor_ns()
            answer = question(*arguments)
            taken, clock = processor_ns() - began, clock_ns() - clock
            collected = collector.total_ns - collected
            self.taken[hook].append(Taken(taken - collected, collected, clock))
            self.on_question(taken - collected)
            self._count(hook, answer)
            return answer

        self.__dict__[hook] = ask
        return ask

    def _count(self, hook: str, answer: object) -> None:
        if hook == "place":
            placements = cast(Sequence[Placement], answer)
            before, self._placements = self._placements, placements
            self.answers["plans_that_move"] += [p.models for p in placements] != [
                p.models for p in before
            ]
            homes = sum([len(p.ahead) for p in placements])
            self.answers["most_homes"] = max(self.answers["most_homes"], homes)
        elif hook == "flow":
            self.answers["requests_moved"] += len(cast(Sequence[object], answer))


def table(times: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Per kind: how many, and microseconds at the median and the 99th percentile."""
    return {kind: summary(of) for kind, of in sorted(times.items()) if of}


def summary(nanoseconds: Iterable[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    return {
        "count": len(ordered),
        "p50_us": round(statistics.median(ordered) / 1e3, 1),
        "p99_us": quantile(ordered),
    }


def quantile(nanoseconds: Iterable[int]) -> float:
    """Microseconds that 99 of 100 do not exceed."""
    ordered = sorted(nanoseconds)
    return round(ordered[math.ceil(len(ordered) * 0.99) - 1] / 1e3, 1)


def decisions(taken: dict[str, list[Taken]]) -> dict[str, dict[str, float]]:
    """By decision."""
    return {
        hook: summary([one.processor for one in times])
        | {
            "with_collector_p99_us": quantile([one.processor + one.collector for one in times]),
            "clock_p50_us": round(statistics.median([one.clock for one in times]) / 1e3, 1),
            "clock_p99_us": quantile([one.clock for one in times]),
        }
        for hook, times in sorted(taken.items())
        if hook != CLOCK
    }


def least(runs: Sequence[dict[str, list[Taken]]]) -> dict[str, list[Taken]]:
    """Of each question the least times of the runs, by decision."""
    return {
        hook: [Taken(*map(min, zip(*same, strict=True))) for same in zip(*every, strict=True)]
        for hook in runs[0]
        for every in [[run[hook] for run in runs]]
    }


def measure(
    load: str,
    policy: str,
    models: int,
    instances: int,
    warm_up: int,
    events: int,
    seed: int = 0,
    runs: int = 1,
) -> dict[str, Any]:
    """One load."""
    results = [run(load, policy, models, instances, warm_up, events, seed) for _ in range(runs)]
    (_,) = {result["commands"] for result, _ in results}
    taken = least([taken for _, taken in results])
    together = [one.processor for hook, times in taken.items() if hook != CLOCK for one in times]
    return {"all_decisions": summary(together), "decisions": decisions(taken)} | results[-1][0]


def run(
    load: str, policy: str, models: int, instances: int, warm_up: int, events: int, seed: int
) -> tuple[dict[str, Any], dict[str, list[Taken]]]:
    """The figures of one run, and what its questions took."""
    collector = Collector()
    watch = Stopwatch(load_stack(PolicyChoice(use=(policy,))), collector)
    house = House(LOADS[load], cast(Policy, watch), models, instances, seed, collector.clock_ns)

    def count(taken: int) -> None:
        house.asked_ns += taken

    watch.on_question = count
    house.start()
    house.run(warm_up)
    gc.collect()
    gc.freeze()
    house.forget()
    began = house.now
    for kept in (watch.taken, watch.answers, collector.taken):
        kept.clear()
    house.run(events)
    collector.close()
    gc.unfreeze()
    result = {
        "live_requests": len(house.machine.requests),
        "virtual_seconds": round(house.now - began, 1),
        "answers": dict(watch.answers),
        "all_events": {
            "machine": summary([t for times in house.alone.values() for t in times]),
            "machine_and_decisions": summary([t for times in house.whole.values() for t in times]),
        },
        "collector": table(collector.taken),
        "machine": table(house.alone),
        "machine_and_decisions": table(house.whole),
        "ended": dict(house.ended),
        "faults": len(watch.stack.faults),
        "commands": house.digest(),
    }
    return result, watch.taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="appliance")
    parser.add_argument("--load", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--warm-up", type=int, default=40_000, help="events before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "what": "microseconds of decisions, and of events without and with the decisions in them",
        "policy": options.policy,
        "models": options.models,
        "instances": options.instances,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "runs": options.runs,
        "loads": {
            load: measure(
                load,
                options.policy,
                options.models,
                options.instances,
                options.warm_up,
                options.events,
                options.seed,
                options.runs,
            )
            for load in options.load
        },
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
