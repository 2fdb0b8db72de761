"""How fast the lab is: events a second and wall seconds of one run, and where the time goes.

    python benchmarks/lab_speed.py [--models 70] [--gpus 16] [--rate 0.1] [--seconds 600]
                                   [--policy aegaeon] [--lengths FILE] [--profile]

Models as in Aegaeon's evaluation, by index modulo ten: six Qwen2.5-7B, two Yi-9B, two Llama-2-13B,
on H800s. Without a file, lengths are drawn from two exponentials with the means of its data.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from pathlib import Path

import numpy as np

from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.metrics import measure
from appliance.lab.simulator import simulate
from appliance.lab.workload import Lengths, drawn
from appliance.memory.ledger import HostLedger
from appliance.policies import load_stack
from appliance.scheduling.machine import Machine
from appliance.vocabulary import ModelSpec, Slo

MIX = ["Qwen2.5-7B"] * 6 + ["Yi-9B"] * 2 + ["Llama-2-13B"] * 2
CONTEXT = 4096


def exponential(prompt_tokens: int = 700, output_tokens: int = 295) -> Lengths:
    """Stand-in for real lengths, the same every time."""
    random = np.random.Generator(np.random.PCG64(0))
    prompts = random.exponential(prompt_tokens, 2000)
    outputs = random.exponential(output_tokens, 2000)
    return Lengths([(1 + int(p), 1 + int(o)) for p, o in zip(prompts, outputs, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=70)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--policy", default="aegaeon")
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()

    box = Box(gpu=gpu("H800"), instances=given.gpus, host_bytes=4 << 40)
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
    arrivals = drawn(
        dict.fromkeys(names, given.rate), lengths.within(CONTEXT), given.seconds, given.seed
    )
    host = HostLedger(box.host_bytes, box.slab_bytes)
    machine = Machine(specs, box.instances, host, load_stack([given.policy], {}))
    profiler = cProfile.Profile() if given.profile else None
    began = time.perf_counter()
    if profiler is not None:
        profiler.enable()
    run = simulate(machine, box, profiles, arrivals, given.seconds)
    if profiler is not None:
        profiler.disable()
    wall = time.perf_counter() - began
    began = time.perf_counter()
    metrics = measure(run)
    measuring = time.perf_counter() - began
    machine.check_integrity()
    print(
        json.dumps(
            {
                "requests": len(arrivals),
                "machine_events": run.events,
                "segments": len(run.recorder.counts),
                "wall_seconds": round(wall, 3),
                "events_per_second": round(run.events / wall),
                "simulated_per_wall_second": round(given.seconds / wall, 1),
                "measuring_seconds": round(measuring, 3),
                "metrics": metrics.rounded(),
            },
            indent=2,
        )
    )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
