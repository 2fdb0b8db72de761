"""The daemon in use for half an hour: six models in all dialects, clients that leave, kills.

The daemon with the six demo models and an embedder, on two instances whose pools hold a third of
the weights. Many connections ask for chats that plain vLLM has answered before, whole or streamed,
in OpenAI's, Anthropic's and Ollama's dialect, and for embeddings, guided answers, tool calls and
seeded sampling, which the daemon answered before anything disturbed it; batches run in parallel.
Clients hang up at any time, in any way, or stop reading for a while; an operator cancels requests;
a worker is killed every minute, and the policy changes every two.

Every answer has to be what it is undisturbed, every partial answer its beginning. The daemon's log
and journal have to agree with what clients saw: each request taken in ends once. Memory,
descriptors and threads have to stay flat, and nothing may be left at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import STOP_SECONDS, answered, free_port, running_daemon
from appliance.demo.traffic import ChatRequest, burst
from appliance.policies.loader import installed
from benchmarks.endurance.asks import EMBEDDER, with_tool_parser
from benchmarks.endurance.run import Plan, Result, endure, judge
from benchmarks.endurance.watch import Watch

CHATS_PER_MODEL = 12
LONG = "It was a long winter, and the river was frozen from bank to bank. " * 30
_MORE = """
[[model]]
name = "{embedder}"
path = "qwen3-a"
max_context = 512
dtype = "float32"
task = "embed"
[journal]
path = "journal.jsonl"
[batches]
directory = "batches"
concurrency = 8
"""

SHORT: Final = {"memory": "40MiB", "host_cache": "20MiB"}
"""Pools for one model each and the KV of few requests, and a host cache that holds no weights."""

PARTIAL: Final = "muxserve"
"""It refuses models that do not fit on the devices together, as it should; here those are most."""


def endure_daemon(
    minutes: float, connections: int, seed: int, *, short: bool = False
) -> dict[str, object]:
    """Start the daemon, disturb it for so long, stop it; the plan and what happened. If memory is
    to be `short`, KV has little room everywhere, and most chats name no `max_tokens`."""
    plan = Plan(
        seconds=minutes * 60,
        connections=connections,
        seed=seed,
        kill_every=60.0,
        policy_every=120.0,
        cancel_every=2.0,
        sample_every=10.0,
        nap_seconds=45.0,  # the daemon gives up a client that reads nothing for a minute
        batches=3,
        policies=[
            p.name for p in installed() if p.shipped and not p.lab_only and p.name != PARTIAL
        ],
        unbounded=short,
    )
    with tempfile.TemporaryDirectory(prefix="appliance-endurance-") as directory:
        result = disturbed(plan, Path(directory))
    return {"plan": asdict(plan), **asdict(result)}


def disturbed(plan: Plan, place: Path) -> Result:
    """All of it, in an empty folder."""
    models = [path.name for path in make_checkpoints(place)]
    chats = burst(models, CHATS_PER_MODEL)
    chats += [
        ChatRequest(model, f"{LONG} Go on with number {i}.", 64) for model in models for i in (1, 2)
    ]
    truths = answered(load_config(write_config(place)), chats)
    sizes = SHORT if plan.unbounded else {}
    file = write_config(place, bind=f"127.0.0.1:{free_port()}", **sizes)
    # So few that some requests are refused.
    limit = f"max_queue = {plan.connections * 6 // 5}\n"
    text = file.read_text().replace("[api]\n", f"[api]\n{limit}")
    file.write_text(with_tool_parser(text, "hermes") + _MORE.format(embedder=EMBEDDER))
    scratch = place / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = str(scratch)
    log = place / "daemon.log"
    with running_daemon(file, load_config(file)) as (url, pid):
        watch = Watch(pid, url, place / "journal.jsonl")
        life = asyncio.run(endure(plan, watch, truths=truths, checkpoints=place, log=log))
        ending = time.monotonic()
    stop_seconds = time.monotonic() - ending
    result = judge(life, watch, log)
    if stop_seconds >= STOP_SECONDS:
        result.complaints.append("the daemon did not end by itself")
    result.complaints += [
        f"{name} is not flat: {said}" for name, said in result.flatness.items() if not said["flat"]
    ]
    if not result.stalls:
        result.complaints.append("no client was found not to read")
    result.complaints += [f"{left.name} is left behind" for left in scratch.iterdir()]
    if result.complaints:
        kept = Path(tempfile.mkdtemp(prefix="appliance-endurance-failed-", dir="/tmp"))
        for name in ("daemon.log", "journal.jsonl", "appliance.toml"):
            (place / name).rename(kept / name)
        print(f"its log and journal are in {kept}", file=sys.stderr)
    return result
