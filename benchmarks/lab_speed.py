"""A quick look at policies: what each is worth on one workload, and how fast the lab is.

    python benchmarks/lab_speed.py [--models 70] [--gpus 16] [--rate 0.1] [--seconds 600]
                                   [--policy aegaeon --policy qlm …] [--lengths FILE] [--profile]

A policy is a name under which one is installed, or ``module:Class`` of one that is not. Models as
in Aegaeon's evaluation, by index modulo ten: six Qwen2.5-7B, two Yi-9B, two Llama-2-13B, on H800s.
Without a file, lengths are drawn from two exponentials with the means of its data.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Contender, Setting, play
from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.workload import Lengths, drawn
from appliance.vocabulary import ModelSpec, Slo

MIX = ["Qwen2.5-7B"] * 6 + ["Yi-9B"] * 2 + ["Llama-2-13B"] * 2
CONTEXT = 4096


def exponential(prompt_tokens: int = 700, output_tokens: int = 295) -> Lengths:
    """Stand-in for real lengths, the same every time."""
    random = np.random.Generator(np.random.PCG64(0))
    prompts = random.exponential(prompt_tokens, 2000)
    outputs = random.exponential(output_tokens, 2000)
    return Lengths([(1 + int(p), 1 + int(o)) for p, o in zip(prompts, outputs, strict=True)])


def setting(given: argparse.Namespace) -> Setting:
    names = [f"m{index:03}" for index in range(given.models)]
    profiles = {name: profile(MIX[index % 10], "H800") for index, name in enumerate(names)}
    specs = [
        ModelSpec(
            name=name,
            weight_bytes=profiles[name].weight_bytes,
            max_context_tokens=CONTEXT,
            max_batch=256,
            slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
        )
        for name in names
    ]
    lengths = Lengths.read(given.lengths) if given.lengths else exponential()
    return Setting(
        models=specs,
        box=Box(gpu=gpu("H800"), instances=given.gpus, host_bytes=4 << 40),
        profiles=profiles,
        arrivals=drawn(
            dict.fromkeys(names, given.rate), lengths.within(CONTEXT), given.seconds, given.seed
        ),
        seconds=given.seconds,
    )


def contender(name: str) -> Contender:
    module, colon, attribute = name.partition(":")
    if not colon:
        return Contender(name, (name,))
    return Contender(attribute, policy=getattr(importlib.import_module(module), attribute)())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=70)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()

    workload = setting(given)
    table = Table(
        *("policy", "tokens", "by time", "TTFT", "TPOT", "goodput/s", "p50 TTFT", "p99 TTFT"),
        *("p99 TBT", "busy", "switches", "instant", "refused", "faults", "events", "wall"),
        box=None,
        title=f"{len(workload.arrivals)} requests",
    )
    profiler = cProfile.Profile() if given.profile else None
    for name in given.policy or ["aegaeon"]:
        began = time.perf_counter()
        if profiler is not None:
            profiler.enable()
        trial = play(workload, contender(name))
        if profiler is not None:
            profiler.disable()
        wall = time.perf_counter() - began
        found = measure(trial.run)
        table.add_row(
            name,
            *(
                f"{share:.1%}"
                for share in (
                    *(found.token_attainment, found.time_attainment),
                    *(found.ttft_attainment, found.tpot_attainment),
                )
            ),
            f"{found.goodput_per_second:.3f}",
            f"{found.ttft_p50_seconds:.3f}",
            f"{found.ttft_p99_seconds:.3f}",
            f"{found.tbt_p99_seconds:.4f}",
            f"{found.busy_share:.1%}",
            str(found.switches),
            f"{found.switch_instant_share:.1%}",
            str(found.rejected),
            str(len(trial.faults)),
            str(trial.run.events),
            f"{wall:.1f}",
        )
        for fault in trial.faults[:1]:
            print(f"{fault.policy}: {fault.hook}: {fault.reason}")
    Console(width=200).print(table)
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
