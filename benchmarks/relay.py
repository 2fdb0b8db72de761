"""What relaying a load through idle peers would be worth: a simulation, on the lab's links.

    python -m benchmarks.relay [--json FILE]

One of eight GPUs loads a model. Of its seven peers 0, 1, 3 or 7 are idle; the others copy KV
inwards all the time. Nothing here ran on a GPU: the figures are those of the lab's model of links,
with its planner of relays, for the GPUs' rates as the data sheets have them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.sim.event_queue import Agenda
from appliance.lab.sim.link import LinkTransfer
from appliance.lab.sim.topology import KV_IN, WEIGHTS, Wiring
from benchmarks.provenance import made, write

KINDS = ("A100", "H800", "H20")
MODEL = "Qwen2.5-7B"
GPUS = 8
IDLE_PEERS = (0, 1, 3, 7)
GPUS_PER_ROOT = (1, 2)
KV_BYTES = 1 << 40
"""Of each busy peer: more than arrives while the model loads."""
HOST_BYTES_PER_SECOND = 614.4e9
"""As the lab assumes for a host of eight GPUs."""


def load_seconds(box: Box, weight_bytes: int, idle_peers: int) -> float:
    """From the order to the last byte, while the peers that are not idle copy KV."""
    agenda = Agenda()
    wiring = Wiring(agenda, box)
    inwards = [wiring.inwards(number) for number in range(GPUS)]
    for busy in inwards[1 + idle_peers :]:
        busy.start(KV_IN, KV_BYTES, lambda _: None)
    over: list[LinkTransfer] = []
    inwards[0].start(WEIGHTS, weight_bytes, over.append)
    while not over:
        agenda.step(float("inf"))
    return agenda.now


def row(kind: str, gpus_per_root: int, idle_peers: int, weight_bytes: int) -> dict[str, Any]:
    """One switch, with and without."""
    box = Box(
        gpu=gpu(kind),
        instances=GPUS,
        host_bytes=1 << 40,
        host_bytes_per_second=HOST_BYTES_PER_SECOND,
        gpus_per_root=gpus_per_root,
    )
    without = load_seconds(box, weight_bytes, idle_peers)
    relayed = load_seconds(replace(box, relay=True), weight_bytes, idle_peers)
    return {
        "gpu": kind,
        "gpus_per_root": gpus_per_root,
        "idle_peers": idle_peers,
        "simulated_seconds_without": round(without, 4),
        "simulated_seconds_with_relay": round(relayed, 4),
        "simulated_ratio": round(without / relayed, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    weight_bytes = profile(MODEL, "H800").weight_bytes
    rows = [
        row(kind, gpus_per_root, idle, weight_bytes)
        for kind in KINDS
        for gpus_per_root in GPUS_PER_ROOT
        for idle in IDLE_PEERS
    ]
    result = {
        **made(),
        "what": "simulation of the lab; no GPU was used",
        "model": MODEL,
        "weight_bytes": weight_bytes,
        "gpus": GPUS,
        "rows": rows,
    }
    print("SIMULATED  GPU   TO A ROOT  IDLE PEERS  WITHOUT   WITH      RATIO")
    for one in rows:
        kind, together, idle, without, relayed, ratio = list(one.values())
        print(
            f"           {kind:5} {together:9} {idle:11}  {without:.4f} s  {relayed:.4f} s"
            f"  {ratio:5.2f}"
        )
    write(result, given.json)


if __name__ == "__main__":
    main()
