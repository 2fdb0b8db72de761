"""What LoRA adapters cost: a base's throughput with many adapters in one batch, over that without.

    python -m benchmarks.adapters [--adapters 32] [--requests 64] [--rank 16] [--json FILE]

Two engines of one checkpoint in this process, on one pool: one without adapters, and one with 32
that change every linear layer. Both compute the same prompts together and decode them to the end,
in turns within one run, the one first that was second before. With adapters, request `n` asks for
adapter `n` modulo their number. A ratio is of one round; the result is the median of them. Beside
it is that of the time of the processors, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.checkpoints.adapters import AdapterPlace, full_name
from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.recipes import RECIPES, Recipe
from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm.environment import prepare_environment
from benchmarks.pool_tax import LARGER
from benchmarks.provenance import made_on_cpu, write

SLAB: Final = 2 << 20
POOL_SLABS: Final = 1024
CONTEXT: Final = 512
WIDE: Final = Recipe(
    name="llama-2k",
    family="llama",
    layers=3,
    hidden=2048,
    intermediate=5632,
    heads=32,
    kv_heads=8,
    head_dim=64,
    seed=98,
)
BASE, ADAPTED = "base", "adapted"


class Run(NamedTuple):
    """Tokens per second, and seconds of the processors."""

    per_second: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=LARGER.name, help="a recipe's name, or llama-2k")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpus", default="auto", help="processors, such as 0-3")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare_environment(options.cpus)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoints(Path(directory), [options.model], [*RECIPES, LARGER, WIDE])
        engines = build(Path(directory), options)
        rounds = measure(engines, options)
    ratios = [one[ADAPTED].per_second / one[BASE].per_second for one in rounds]
    processor = [one[BASE].processor / one[ADAPTED].processor for one in rounds]
    result = {
        **made_on_cpu(),
        "what": "tokens per second, prompts included, with adapters / without",
        **{name: value for name, value in vars(options).items() if name != "json"},
        "tokens_per_second": {
            name: statistics.median(one[name].per_second for one in rounds)
            for name in (BASE, ADAPTED)
        },
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "processor_ratio_median": statistics.median(processor),
        "processor_ratios": processor,
    }
    for name, ratio in (("tokens/s", ratios), ("processor time", processor)):
        print(f"{name}: {statistics.median(ratio):.3f} ({min(ratio):.3f} - {max(ratio):.3f})")
    write(result, options.json)


def build(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The two engines, their weights loaded."""
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper
    from appliance.memory.vmm_host import HostVmm
    from tests.lora import make_adapter

    base = str(directory / options.model)
    places = [
        AdapterPlace(
            f"a{number}",
            make_adapter(directory / f"a{number}", base, rank=options.rank, seed=number, size=0.02),
            number,
        )
        for number in range(options.adapters)
    ]
    arena, host = Arena(HostVmm(POOL_SLABS, SLAB)), HostTier.create(16 * SLAB)
    engines = {}
    for name, adapters in ((BASE, []), (ADAPTED, places)):
        engines[name] = engine = VllmEngine.build(
            name,
            base,
            dtype=options.dtype,
            max_context=CONTEXT,
            max_batch=options.requests,
            arena=arena,
            host=host,
            swapper=Swapper(arena.vmm.stream),
            adapters=adapters,
        )
        engine.store_weights((), fill=False)
        engine.begin_load().wait()
    return engines


def measure(engines: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Run]]:
    """What each engine did, for each round but the first, which warms up."""
    rounds = []
    for number in range(options.rounds + 1):
        order = list(engines) if number % 2 else list(reversed(engines))
        told = {name: run(engines[name], number, options) for name in order}
        print(f"{number}: {told}", file=sys.stderr)
        rounds.append(told)
    return rounds[1:]


def run(engine: Any, number: int, options: argparse.Namespace) -> Run:
    names = [f"{number}-{one}" for one in range(options.requests)]
    for one, name in enumerate(names):
        dice = random.Random(number * 1000 + one)
        prompt = tuple(dice.randrange(3, 250) for _ in range(options.prompt))
        adapter = None if engine.model == BASE else f"a{one % options.adapters}"
        asked = body(engine, adapter, options)
        engine.add(SequenceSpec(request=name, model=engine.model, prompt=prompt, body=asked))
    slabs, tokens = POOL_SLABS, 0
    began, busy = time.perf_counter(), time.process_time()
    for name in names:
        engine.begin_prefill(name, slabs)
    waiting: Sequence[str] = names
    while waiting:
        drew = engine.step((), slabs, waiting, 2048)
        tokens += len(drew)
        done = {one.request for one in drew}
        waiting = [name for name in waiting if name not in done]
    while names:
        drew = engine.step(names, slabs)
        tokens += len(drew)
        if any(one.finished for one in drew):
            ended = {one.request for one in drew if one.finished}
            names = [name for name in names if name not in ended]
    assert tokens == options.requests * options.tokens
    return Run(tokens / (time.perf_counter() - began), time.process_time() - busy)


def body(engine: Any, adapter: str | None, options: argparse.Namespace) -> bytes:
    import msgspec
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from appliance.engines.vllm.messages import decode_request, encode_params, encode_request

    params = SamplingParams(
        max_tokens=options.tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    named = adapter and LoRARequest(full_name(engine.model, adapter), 1, "-")
    asked = decode_request(encode_params(params))
    return encode_request(msgspec.structs.replace(asked, lora_request=named))


if __name__ == "__main__":
    main()
