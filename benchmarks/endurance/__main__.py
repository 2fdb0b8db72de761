"""Every answer stays right while everything changes under it.

    python -m benchmarks.endurance daemon [--minutes 30] [--connections 200] [--short]
    python -m benchmarks.endurance memory [--minutes 10] [--slab 16KiB] [--kinds --pool 24MiB]

Both take `--seed 1` and `--json F`.

`daemon` disturbs a whole daemon (`benchmarks.endurance.daemon`); `memory` runs engines on two small
pools in this process, under a random schedule (`benchmarks.endurance.memory`). Both compare every
token, and every vector of an embedder, with plain vLLM's. Exit status 1 if anything is wrong; it is
listed under `complaints`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from appliance.engines.vllm import prepare_environment
from appliance.units import Bytes
from benchmarks.endurance.daemon import endure_daemon
from benchmarks.endurance.memory.schedule import endure
from benchmarks.provenance import made_on_cpu


def main() -> int:
    options = _options()
    machine = made_on_cpu()
    if options.layer == "daemon":
        result = endure_daemon(
            options.minutes, options.connections, options.seed, short=options.short
        )
    else:
        prepare_environment("auto")
        seconds, count = options.minutes * 60, options.operations
        sizes = options.pool, options.slab
        result = endure(options.seed, seconds, count, *sizes, options.families, kinds=options.kinds)
    shown = {"benchmark": f"endurance {options.layer}", **machine, **result}
    if options.json is not None:
        options.json.write_text(json.dumps(shown, indent=1) + "\n")
    print(json.dumps({k: v for k, v in shown.items() if k != "samples"}, indent=1))
    return 1 if result["complaints"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    layers = parser.add_subparsers(dest="layer", required=True)
    daemon, memory = layers.add_parser("daemon"), layers.add_parser("memory")
    for layer, minutes in ((daemon, 30.0), (memory, 10.0)):
        layer.add_argument("--minutes", type=float, default=minutes)
        layer.add_argument("--seed", type=int, default=1)
        layer.add_argument("--json", type=Path)
    daemon.add_argument("--connections", type=int, default=200)
    daemon.add_argument("--short", action="store_true", help="little room for KV, no max_tokens")
    memory.add_argument("--operations", type=int, help="end after so many, whatever the time")
    memory.add_argument("--slab", type=Bytes.read, default="16KiB")
    memory.add_argument("--pool", type=Bytes.read, default="12MiB")
    memory.add_argument("--families", type=int, default=12, help="of prompts, for each model")
    memory.add_argument("--kinds", action="store_true", help="other kinds of model as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
