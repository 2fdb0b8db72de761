"""Nothing that is acknowledged is lost, whatever goes wrong.

    python -m tests.chaos [--minutes 20] [--seed 1] [--json F]

A daemon with four models on two instances serves clients of several keys in all dialects, batches,
and a key that asks for a short answer every second. After a quiet minute something goes wrong every
few seconds, at random (`tests.chaos.disturbances`): processes are killed, frozen, or run out of
memory; the daemon is killed, bits are flipped in its files, and it starts again with a wrong clock;
the disk fills; clients vanish or do not read; hostile requests come. A quiet minute ends it.

Every answer has to be plain vLLM's, every partial answer its beginning. Every refusal has a name,
and what is cut off is explained by what was disturbed then. What was acknowledged of files and
batches is there, or is refused by name and a flipped bit explains it. The p99 of that key's TTFT is
at most three times that of the quiet minute, and the longest restart, until each model has answered
again. Memory and descriptors return; nothing outlives a daemon. Exit status 1 otherwise; what is
wrong is listed under `complaints`.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
from pathlib import Path

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import answered
from appliance.demo.traffic import burst
from benchmarks.provenance import made_on_cpu
from tests.chaos.daemon import MODELS
from tests.chaos.run import Plan, chaos

CHATS_PER_MODEL = 12
QUIET_SECONDS = 60.0
EVERY_SECONDS = 6.0
CONNECTIONS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="in which things go wrong")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # hostile clients need many
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))  # and takes all along
    machine = made_on_cpu()
    plan = Plan(options.minutes * 60, QUIET_SECONDS, EVERY_SECONDS, options.seed, CONNECTIONS)
    folder = Path(tempfile.mkdtemp(prefix="appliance-chaos-"))
    checkpoints = folder / "checkpoints"
    make_checkpoints(checkpoints, MODELS)
    chats = burst(MODELS, CHATS_PER_MODEL)
    truths = answered(load_config(write_config(checkpoints, MODELS)), chats)
    result = chaos(plan, folder, checkpoints, truths)
    shown = {"benchmark": "chaos", **machine, **result}
    if options.json is not None:
        options.json.write_text(json.dumps(shown, indent=1) + "\n")
    print(json.dumps({k: v for k, v in shown.items() if k != "disturbances"}, indent=1))
    for what, why in result["left_out"].items():
        print(f"left out: {what}: {why}", file=sys.stderr)
    if result["complaints"]:
        print(f"its log and files are in {folder}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
