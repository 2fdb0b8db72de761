"""What a pool costs that has KV for six of 48 requests: tokens/s, over those with KV for all.

    python -m benchmarks.kv_short [--models 1] [--pairs 3] [--ttft 10s] [--json F]

A real daemon on one instance, with the weights of all its models in the pool; 48 requests of about
200 + 300 tokens at once, over HTTP. The two sizes of pool are run in turns. Every output is
compared with plain vLLM's, as far as that goes (it ends at an end-of-text token; the requests do
not). From the journal: the KV blocks that left the device a second time or more often, over the
blocks of all requests. Exit status 1 if an output is wrong. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from appliance import journal
from appliance.config.loader import load_config
from appliance.config.sizing import least, read_model
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import Known, answered, free_port, metrics_by_model, running_daemon
from appliance.demo.traffic import ChatRequest, send
from appliance.memory.kv_pool import BLOCK_TOKENS
from appliance.vocabulary import Direction, MoveKv
from benchmarks.provenance import made_on_cpu

REQUESTS: Final = 48
FITTING: Final = 6
"""Requests whose KV the short pool holds."""
OUTPUT_TOKENS: Final = 300
MAX_CONTEXT: Final = 544
TTFT: Final = "10s"
"""The target that `write_config` writes."""
WORDS: Final = ("a long winter", "the frozen river", "an old bridge", "maps of glass", "a ship")


def main() -> int:
    options = _options()
    models = [recipe.name for recipe in RECIPES[: options.models]]
    with tempfile.TemporaryDirectory(prefix="appliance-kv-short-") as directory:
        place = Path(directory)
        make_checkpoints(place, models)
        chats = chats_for(models)
        truths = answered(load_config(_write(place, models, REQUESTS, options.ttft)), chats)
        runs: dict[str, list[dict[str, float]]] = {"all": [], "short": []}
        for _ in range(options.pairs):
            for name, fitting in (("all", REQUESTS), ("short", FITTING)):
                file = _write(place, models, fitting, options.ttft)
                runs[name].append(_run(file, chats, truths))
                print(name, runs[name][-1], flush=True)
    rates = {
        name: statistics.median(_each(made, "tokens_per_second")) for name, made in runs.items()
    }
    result = {
        "benchmark": "kv_short",
        **made_on_cpu(),
        "models": len(models),
        "requests": REQUESTS,
        "fitting": FITTING,
        "ttft_target": options.ttft,
        "ratio": rates["short"] / rates["all"],
        "moved_again_share": max(_each(runs["short"], "moved_again_share")),
        "runs": runs,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if any(_each([*runs["all"], *runs["short"]], "wrong")) else 0


def _each(made: Sequence[Mapping[str, float]], figure: str) -> list[float]:
    return [run[figure] for run in made]


def chats_for(models: Sequence[str]) -> list[ChatRequest]:
    """The requests: all different, some 200 tokens each, dealt out to the models."""
    return [
        ChatRequest(
            models[number % len(models)],
            f"{number}: " + f"Tell me about {WORDS[number % len(WORDS)]}, as before. " * 14,
            OUTPUT_TOKENS,
            ignore_eos=True,
        )
        for number in range(REQUESTS)
    ]


def _write(place: Path, models: Sequence[str], fitting: int, ttft: str) -> Path:
    """A configuration whose pool holds all weights, and the KV of so many requests."""
    bind = f"127.0.0.1:{free_port()}"
    sizes = {"instances": 1, "max_context": MAX_CONTEXT}
    roomy = load_config(write_config(place, models, memory="4GiB", **sizes))  # type: ignore[arg-type]
    needs = [least(read_model(m, roomy.devices), MAX_CONTEXT, roomy.devices) for m in roomy.models]
    slabs = sum(need.weights for need in needs) + fitting * max(need.kv for need in needs)
    memory = f"{slabs * roomy.devices.slab_bytes >> 10}KiB"
    file = write_config(place, models, memory=memory, bind=bind, **sizes)  # type: ignore[arg-type]
    written = file.read_text().replace(f'ttft = "{TTFT}"', f'ttft = "{ttft}"')
    file.write_text(f'{written}\n[journal]\npath = "journal.jsonl"\n')
    return file


def _run(
    file: Path, chats: Sequence[ChatRequest], truths: Mapping[ChatRequest, Known]
) -> dict[str, float]:
    recorded = file.parent / "journal.jsonl"
    recorded.unlink(missing_ok=True)
    with running_daemon(file, load_config(file)) as (url, _):
        warm = [ChatRequest(model, "Hello", 8) for model in {chat.model for chat in chats}]
        asyncio.run(send(url, warm, lambda _: None))
        began = time.monotonic()
        answers = asyncio.run(send(url, chats, lambda _: None))
        seconds = time.monotonic() - began
        counts = metrics_by_model(url)
    wrong = 0
    for answer in answers:
        known = truths[answer.chat].tokens
        wrong += len(answer.tokens) != OUTPUT_TOKENS or answer.tokens[: len(known)] != known
    recomputed = (v for (n, _), v in counts.items() if n == "appliance_kv_recomputed_tokens_total")
    return {
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        "moved_again_share": _moved_again_share(recorded),
        "recomputed_tokens": sum(recomputed),
        "wrong": wrong,
    }


def _moved_again_share(recorded: Path) -> float:
    """Blocks that left the device again after the first time, over the blocks that all requests
    have at their end."""
    _, entries = journal.read(recorded)
    moved: set[str] = set()
    again = 0
    for entry in entries:
        for command in entry.commands:
            if isinstance(command, MoveKv) and command.direction is Direction.OUT:
                for move in command.moves:
                    again += len(move.host_offsets) if move.request in moved else 0
                    moved.add(move.request)
    return again / (REQUESTS * -(-MAX_CONTEXT // BLOCK_TOKENS))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=1, choices=range(1, len(RECIPES) + 1))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ttft", default=TTFT, help="the TTFT target of all models")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
