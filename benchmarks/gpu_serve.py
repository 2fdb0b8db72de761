"""The daemon itself on a GPU: six models in a pool for two, every token beside plain vLLM's.

    python benchmarks/gpu_serve.py --json benchmarks/results/<date>-<gpu>-serve.json

Needs vLLM's CUDA build and the daemon's own dependencies. What `appliance demo` does on a CPU: it
makes checkpoints of random weights, has plain vLLM answer chats in bfloat16, starts a daemon, sends
it all chats at once through its API, and compares. vLLM is in batch-invariant mode in both.

`--smoke` does all of it with tiny models: for a driver that computes nothing. Tokens mean nothing
then, and neither do times, so it writes no file, but for a rehearsal's counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from appliance.config.loader import load_config
from appliance.config.schema import Config, Model
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES, Recipe
from appliance.demo.run import (
    answered,
    free_port,
    metrics_by_model,
    percentile,
    rows_by_model,
    running_daemon,
)
from appliance.demo.traffic import ChatRequest, TimedAnswer, burst, send
from benchmarks.gpu_pool import BATCH_INVARIANT, about
from benchmarks.provenance import PRETENDS, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--chats", type=int, default=8, help="for each model, all at once")
    parser.add_argument("--pool-mib", type=int, default=1536, help="for weights and KV cache")
    parser.add_argument("--runtime-mib", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny models, no figures")
    options = parser.parse_args()
    if options.smoke:
        if options.json and not PRETENDS:
            parser.error("--smoke measures nothing, so there is nothing to write")
        options.hidden, options.layers, options.chats = 256, 4, 2
        options.pool_mib, options.runtime_mib = 128, 2048
    os.environ |= BATCH_INVARIANT
    result: dict[str, Any] = {"what": "six models served in a pool for two"} | about()
    with tempfile.TemporaryDirectory() as directory:
        config, file = prepare(Path(directory), options)
        result["pool_bytes"] = options.pool_mib << 20
        result["weights_bytes"] = [weights(Path(model.path)) for model in config.models]
        chats = burst([model.name for model in config.models], options.chats)
        began = time.perf_counter()
        # Tokens of a smoke are not compared, and each process compiles vLLM's kernels: one will do.
        compared = config.models[:1] if options.smoke else config.models
        asked = msgspec.structs.replace(config, models=compared)
        expected = {chat: list[int]() for chat in chats} | reference(asked, chats)
        print(f"plain vLLM: {time.perf_counter() - began:.1f} s", flush=True)
        write(result, options.json)
        result |= served(config, file, chats, expected)
    print(json.dumps(result, indent=2), flush=True)
    write(result, options.json)
    whole = not result["errors"] and (options.smoke or result["identical"] == len(chats))
    sys.exit(0 if whole else 1)


def prepare(directory: Path, options: argparse.Namespace) -> tuple[Config, Path]:
    """Checkpoints of the demonstration's six architectures, larger, and a daemon's configuration
    for them."""
    recipes = [sized(recipe, options.hidden, options.layers) for recipe in RECIPES]
    began = time.perf_counter()
    make_checkpoints(directory, recipes=recipes)
    print(f"six checkpoints in {time.perf_counter() - began:.1f} s", flush=True)
    file = write_config(
        directory,
        bind=f"127.0.0.1:{free_port()}",
        kind="cuda",
        instances=1,
        memory=f"{options.pool_mib + options.runtime_mib}MiB",
        runtime=f"{options.runtime_mib}MiB",
        slab="2MiB",
        host_cache="16GiB" if not options.smoke else "1GiB",
        dtype="bfloat16",
    )
    if options.json:  # what is known of a daemon that this process does not outlive
        (directory / "daemon.log").symlink_to(options.json.with_suffix(".daemon.log").absolute())
    return load_config(file), file


def sized(recipe: Recipe, hidden: int, layers: int) -> Recipe:
    """The same family and share of KV heads, with heads of 64."""
    heads = hidden // 64
    share = heads * recipe.kv_heads // recipe.heads
    return Recipe(
        name=recipe.name,
        family=recipe.family,
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        kv_heads=next(count for count in range(max(1, share), 0, -1) if heads % count == 0),
        head_dim=64,
        seed=recipe.seed,
    )


def weights(path: Path) -> int:
    """Of a checkpoint in bfloat16, whose file has float32."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) // 2


def reference(config: Config, chats: list[ChatRequest]) -> dict[ChatRequest, list[int]]:
    """What plain vLLM answers: a process for each model, all at the same time, as most of theirs
    goes to starting."""

    def ask(model: Model) -> dict[ChatRequest, list[int]]:
        mine = [chat for chat in chats if chat.model == model.name]
        alone = msgspec.structs.replace(config, models=(model,))
        return {chat: answer.tokens for chat, answer in answered(alone, mine).items()}

    with ThreadPoolExecutor(len(config.models)) as executor:
        return {
            chat: tokens
            for told in executor.map(ask, config.models)
            for chat, tokens in told.items()
        }


def served(
    config: Config, file: Path, chats: list[ChatRequest], expected: dict[ChatRequest, list[int]]
) -> dict[str, Any]:
    """The same chats through the daemon's API, all at once, twice: vLLM compiles kernels during
    the first burst."""
    began = time.perf_counter()
    with running_daemon(file, config) as (url, _):
        started = time.perf_counter() - began
        print(f"daemon ready in {started:.1f} s", flush=True)
        rounds = []
        for _ in range(2):
            before = time.perf_counter()
            answers = asyncio.run(send(url, chats, lambda answer: None))
            rounds.append(measured(answers, time.perf_counter() - before, expected))
            print(json.dumps(rounds[-1]), flush=True)
        rows = rows_by_model(config, answers, expected, metrics_by_model(url))
    log = file.with_name("daemon.log").read_text(errors="replace")
    print("\n".join(line for line in log.splitlines()[-40:]), flush=True)
    return {
        "ready_seconds": started,
        "chats": len(chats),
        "identical": min(one["identical"] for one in rounds),
        "errors": [error for one in rounds for error in one["errors"]],
        "rounds": rounds,
        "models": [asdict(row) for row in rows],
    }


def measured(
    answers: list[TimedAnswer], seconds: float, expected: dict[ChatRequest, list[int]]
) -> dict[str, Any]:
    """One burst, as its clients saw it."""
    gaps = [gap for answer in answers for gap in answer.gaps_seconds]
    ttfts = [answer.ttft_seconds for answer in answers]
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ttft_seconds": {f"p{p}": percentile(ttfts, p) for p in (50, 99)},
        "tbt_seconds": {f"p{p}": percentile(gaps, p) for p in (50, 99)},
        "identical": sum(answer.tokens == expected[answer.chat] for answer in answers),
        "errors": [answer.error for answer in answers if answer.error is not None],
    }


if __name__ == "__main__":
    main()
