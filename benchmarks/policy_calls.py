"""What asking a policy costs: a bare call, one through pluggy, through the stack, in a thread.

    python benchmarks/policy_calls.py [--rounds 20000] [--json FILE]

Two questions of policies that do nothing: `phase`, of one instance, and `prefill`, of sixteen with
six groups each. `bare` calls the method, `pluggy` goes through its hook, `inline` is the stack,
which calls the method itself, with every answer checked and timed, and `apart` the same in a thread
of its own, as strangers are asked.
Microseconds of one question: median, and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pluggy

from appliance.hookspecs import PROJECT, PolicySpec, hookimpl
from appliance.policies.stack import PolicyStack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.policy_api import (
    GroupView,
    InstanceView,
    LocalClock,
    Phase,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceClass, RequestClass, Role, Slo

INSTANCES = 16
GROUPS = 6


class Idle:
    """Answers at once."""

    @hookimpl
    def phase(self) -> Phase:
        return Phase.PREFILL

    @hookimpl
    def prefill(self) -> PrefillChoice:
        return PrefillChoice(instance=INSTANCES - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.rounds)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(rounds: int) -> dict[str, Any]:
    """Each question, each way."""
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "pluggy": pluggy.__version__,
        "rounds": rounds,
    }
    costs = CostModel([]).estimates()
    views = [instance(number) for number in range(INSTANCES)]
    questions: dict[str, dict[str, Any]] = {
        "phase": {"now": 1.0, "instance": views[0], "costs": costs},
        "prefill": {"now": 1.0, "request": request(), "instances": views, "costs": costs},
    }
    policy = Idle()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicySpec)
    manager.register(policy)
    inline = PolicyStack({"idle": policy}, observe=lambda hook, seconds: None)
    apart = PolicyStack({"idle": policy}, apart=["idle"], observe=lambda hook, seconds: None)
    for hook, question in questions.items():
        ways: dict[str, Callable[..., object]] = {
            "bare": lambda hook=hook, **_: getattr(policy, hook)(),
            "pluggy": partial(getattr(manager.hook, hook), clock=LocalClock()),
            "inline": getattr(inline, hook),
            "apart": getattr(apart, hook),
        }
        result[hook] = {way: measured(ask, question, rounds) for way, ask in ways.items()}
    assert not inline.faults
    result["faults_apart"] = len(apart.faults)
    apart.close()
    return result


def measured(ask: Callable[..., object], question: dict[str, Any], rounds: int) -> dict[str, float]:
    """Microseconds of one question."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        ask(**question)
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return {"median_us": statistics.median(times), "p99_us": times[rounds * 99 // 100]}


def request() -> RequestView:
    return RequestView(
        id="r",
        model="m0",
        tokens=100,
        max_tokens=100,
        weight_bytes=16 << 30,
        kv_bytes_per_token=128 << 10,
        slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
        request_class=RequestClass.INTERACTIVE,
        arrived=0.0,
    )


def instance(number: int) -> InstanceView:
    groups = tuple(
        GroupView(
            model=f"m{index}",
            first=f"r{index}",
            admitted=4,
            waiting=4,
            tokens=400,
            slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
            arrived=0.0,
            deadline=1.0,
            interactive=4,
        )
        for index in range(GROUPS)
    )
    return InstanceView(
        id=number,
        role=Role.MIXED,
        instance_class=InstanceClass.MIXED,
        models=None,
        up=True,
        current_model=None,
        groups=groups,
        batches=(),
        membership_version=0,
        turn=None,
        turn_began=0.0,
        last_turn=None,
        computing_tokens=0,
        prefills_since_turn=0,
        resident=frozenset(),
        total_bytes=80 << 30,
        free_bytes=40 << 30,
        kv_bytes=10 << 30,
    )


if __name__ == "__main__":
    main()
