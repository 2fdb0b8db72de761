"""Eight models on one GPU whose pool fits two, on real vLLM, beside each of them alone.

    python benchmarks/gpu_pool.py --json benchmarks/results/<date>-<gpu>-pool.json

Needs torch, transformers, cuda-bindings, nvidia-ml-py and vLLM's CUDA build. Checkpoints of random
weights are made on the spot. Every model answers the same prompts twice: alone in a process of its
own, on stock vLLM, and in turns in one process on our memory, where its weights and its KV cache
are away between two turns. vLLM is in batch-invariant mode, so the tokens must be the same.

`--smoke` does all of it with tiny models and few turns: for a driver that computes nothing. Tokens
mean nothing then, and neither do times, so it writes no file, but for a rehearsal's counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.engines.protocol import SequenceSpec
from appliance.memory.host_tier import HostTier
from appliance.platform import gpus
from appliance.platform.cpus import show_cpus
from appliance.worker import frames
from appliance.worker.rank_messages import Seat
from benchmarks.provenance import PRETENDS, made, write

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.memory.arena import Arena
    from appliance.memory.swapper import Swapper

SLAB: Final = 2 << 20
BATCH: Final = 4
PROMPT: Final = 512
CONTEXT: Final = 2048
FIT: Final = 2
BATCH_INVARIANT: Final = {"VLLM_BATCH_INVARIANT": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--turn", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--runtime-mib", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny models, no figures")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        if options.json and not PRETENDS:
            parser.error("--smoke measures nothing, so there is nothing to write")
        options.hidden, options.layers, options.tokens, options.turn = 256, 4, 8, 4
        options.runtime_mib, options.models = 1024, 3
    if options.alone:
        print(json.dumps(alone(options.alone, options)))
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads may outlast its engine
    result = {"what": f"{options.models} models in a pool for {FIT}"} | about()
    with tempfile.TemporaryDirectory() as directory:
        paths = make_checkpoints(Path(directory), options)
        # Tokens of a smoke are not compared, and each process compiles vLLM's kernels: one will do.
        asked = paths[:1] if options.smoke else paths
        dedicated = [reference(path, options) for path in asked]
        result["tbt_alone_ms"] = [found["tbt_ms"] for found in dedicated]
        write(result, options.json)
        result |= pooled(paths, dedicated, options)
    print(json.dumps(result, indent=2), flush=True)
    write(result, options.json)
    # The engines end with their process.
    identical = options.smoke or result["tokens_identical"]
    os._exit(0 if identical and result["graphs"]["kept"] else 1)


def make_checkpoints(directory: Path, options: argparse.Namespace) -> list[Path]:
    """Random weights, of shapes that differ in KV heads and depth. A process of its own: it must
    not be the one that becomes a worker."""
    script = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
for number in range({options.models}):
    torch.manual_seed(number)
    heads = {options.hidden} // 64
    config = LlamaConfig(
        hidden_size={options.hidden}, intermediate_size={options.hidden * 11 // 4 // 64 * 64},
        num_hidden_layers={options.layers} - number % 3, num_attention_heads=heads,
        num_key_value_heads=heads // (1, 2, 4)[number % 3], vocab_size=32000,
        max_position_embeddings={CONTEXT}, tie_word_embeddings=number % 2 == 1,
    )
    with torch.device("cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained({str(directory)!r} + f"/model-{{number}}")
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    return [directory / f"model-{number}" for number in range(options.models)]


def prompts(model: int) -> list[list[int]]:
    return [
        [5 + (model * 7919 + request * 104729 + i * i * 31) % 31000 for i in range(PROMPT)]
        for request in range(BATCH)
    ]


def reference(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `alone` finds, in a process of its own."""
    command = [sys.executable, __file__, "--alone", str(path), "--tokens", str(options.tokens)]
    answer = subprocess.run(
        command, env=os.environ | BATCH_INVARIANT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    print(f"{path.name} alone: {found['tbt_ms']:.2f} ms a step", flush=True)
    return found


def alone(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Stock vLLM on one checkpoint: its tokens, and the time of a step of the whole batch."""
    from appliance.engines.vllm.environment import prepare_environment

    prepare_environment("auto", "cuda:0")
    from vllm import LLM, SamplingParams, TokensPrompt

    from appliance.memory.kv_pool import BLOCK_TOKENS

    llm = LLM(
        str(path),
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=BATCH,
        block_size=BLOCK_TOKENS,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        kv_cache_memory_bytes=2 << 30,
        disable_log_stats=True,
    )
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts(_number(path))]
    seconds = []
    for tokens in (1, options.tokens):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        answers = llm.generate(asked, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "tbt_ms": (seconds[1] - seconds[0]) / (options.tokens - 1) * 1e3,
    }


def pooled(
    paths: list[Path], dedicated: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """All of them in this process, in turns, as a worker has them."""
    os.environ |= BATCH_INVARIANT
    sizes = [sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in paths]
    kv_slabs = 2 * BATCH * (PROMPT + options.tokens) * 4 * options.hidden * options.layers // SLAB
    # A tied head is stored once, and so it is in memory.
    slabs = FIT * (max(sizes) // SLAB + 1) + kv_slabs
    host_slabs = sum(size // SLAB + 2 for size in sizes) + len(paths) * kv_slabs
    host = HostTier.create(host_slabs * SLAB)
    from appliance.worker.engines import engines

    configuration = frames.Configure(
        version=frames.PROTOCOL_VERSION,
        instance=0,
        cpus=show_cpus(sorted(os.sched_getaffinity(0))),
        slabs=slabs,
        slab_bytes=SLAB,
        host_bytes=host.nbytes,
        models=[],
        device="cuda:0",
        runtime_slabs=options.runtime_mib * (1 << 20) // SLAB,
    )
    build, arena, swapper = engines(configuration, host, Seat(0, 1, configuration.cpus))
    floor = ceilings(host, arena)
    models: list[Any] = []
    offset = 0
    for path in paths:
        began = time.perf_counter()
        model = build(frames.WorkerModel(path.name, str(path), "bfloat16", CONTEXT, BATCH))
        places = [offset + slab * SLAB for slab in range(model.weight_slabs)]
        model.store_weights(places, fill=True)
        offset += len(places) * SLAB
        models.append(model)
        print(f"{path.name}: built in {time.perf_counter() - began:.1f} s", flush=True)
    before = graphs(models)
    turns = Turns(models, arena, swapper, offset, options)
    turns.run()
    after = graphs(models)
    same = [turns.answers[number] == found["tokens"] for number, found in enumerate(dedicated)]
    return {
        "models": len(paths),
        "fit": FIT,
        "weights_bytes": sizes,
        "pool_slabs": slabs,
        "slab_bytes": SLAB,
        "usage_slabs": arena.usage(),
        "high_water_slabs": arena.high_water,
        "ceilings": floor,
        "tokens_identical": all(same),
        "identical_by_model": same,
        "graphs": {
            "before": len(before),
            "after": len(after),
            "kept": bool(before) and before == after,
        },
        "switches_cdf_ms": cdf(turns.switches),
        "switch_over_copy_bound": over_bound(turns.switches, turns.bytes, floor),
        "load_over_copy_bound": over_bound(turns.loads, turns.bytes, floor),
        "ttft_cdf_ms": cdf(turns.ttfts),
        "tbt_cdf_ms": cdf(turns.tbts),
    }


class Turns:
    """Every model in turn, all others away: weights unmapped, KV in the host tier."""

    def __init__(
        self,
        models: list[VllmEngine],
        arena: Arena,
        swapper: Swapper,
        kv_offset: int,
        options: argparse.Namespace,
    ) -> None:
        self.switches: list[float] = []
        """From the first byte that another model gives back to the last that has landed."""
        self.loads: list[float] = []
        """The second part of it."""
        self.bytes: list[int] = []
        self.ttfts: list[float] = []
        self.tbts: list[float] = []
        self.answers: list[list[list[int]]] = [[[] for _ in range(BATCH)] for _ in models]
        self._models = models
        self._arena = arena
        self._swapper = swapper
        self._tokens = options.tokens
        self._turn = options.turn
        self._places: dict[str, list[int]] = {}
        """Of a request's KV in the host tier: one for each block."""
        for number, model in enumerate(models):
            for request in range(BATCH):
                blocks = -(-(PROMPT + self._tokens) // model.kv.block_tokens)
                size = model.kv.block_bytes
                self._places[f"{number}.{request}"] = [kv_offset + i * size for i in range(blocks)]
                kv_offset += blocks * size

    def run(self) -> None:
        resident: list[VllmEngine] = []
        while any(len(answer[0]) < self._tokens for answer in self.answers):
            for number, model in enumerate(self._models):
                began = time.monotonic()
                if len(resident) == FIT:
                    resident.pop(0).evict_weights()
                    if PRETENDS:  # to that driver, the next kernels may touch what is unmapped
                        self._arena.settle()
                transfer = model.begin_load()
                resident.append(model)
                self._take_turn(number, model, began)
                trace = transfer.trace()
                self.switches.append(trace.ended - began)
                self.loads.append(trace.ended - trace.queued)
                self.bytes.append(trace.moved_bytes)

    def _take_turn(self, number: int, model: VllmEngine, began: float) -> None:
        from vllm import SamplingParams

        from appliance.engines.vllm.messages import encode_params

        params = SamplingParams(temperature=0.0, max_tokens=self._tokens + 1, ignore_eos=True)
        names = [f"{number}.{request}" for request in range(BATCH)]
        first = not self.answers[number][0]
        if first:
            for request, (name, prompt) in enumerate(zip(names, prompts(number), strict=True)):
                model.add(
                    SequenceSpec(
                        request=name,
                        model=model.model,
                        prompt=tuple(prompt),
                        body=encode_params(params),
                    )
                )
                self._note(number, model.prefill(name, 1 << 20))
                if not request:
                    self.ttfts.append(time.monotonic() - began)
        else:
            for name in names:
                model.swap_in(name, self._places[name], 1 << 20)
        steps = min(self._turn, self._tokens - len(self.answers[number][0]))
        for step in range(steps):
            start = time.perf_counter()
            self._note(number, model.step(names, 1 << 20))
            if step:  # the first one of a turn waits for what is on its way
                self.tbts.append(time.perf_counter() - start)
        if len(self.answers[number][0]) < self._tokens:
            for name in names:
                model.swap_out(name, self._places[name])
        else:
            for name in names:
                model.forget(name)
        self._swapper.settle()
        model.trim()

    def _note(self, number: int, produced: list[Any]) -> None:
        for token in produced:
            self.answers[number][int(token.request.rpartition(".")[2])].append(token.token)


def graphs(models: list[Any]) -> list[int]:
    """The identities of the engines' CUDA graphs, which live as long as these: none is used twice.

    Looked up where vLLM replays them from; there are none if that has another form.
    """
    wrappers = [model._runner.model for model in models]
    entries = [getattr(wrapper, "concrete_cudagraph_entries", {}) for wrapper in wrappers]
    return sorted(id(entry.cudagraph) for each in entries for entry in each.values())


def ceilings(host: HostTier, arena: Any) -> dict[str, float]:
    """Host to device, page-locked, in one copy of at most 256 MiB."""
    from appliance.memory.cuda.driver import call

    slabs = min(128, arena.free, host.nbytes // SLAB)
    region = arena.reserve("ceiling", slabs)
    region.map(range(slabs))
    for pinning in arena.vmm._pinnings:
        pinning.wait()
    stream = call("cuStreamCreate", 1)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        call("cuMemcpyAsync", region.address, host.address(0, slabs * SLAB), slabs * SLAB, stream)
        call("cuStreamSynchronize", stream)
        seconds.append(time.perf_counter() - began)
    region.release()
    return {"bytes": slabs * SLAB, "h2d_bytes_per_second": slabs * SLAB / min(seconds[1:])}


def over_bound(seconds: list[float], sizes: list[int], floor: dict[str, float]) -> dict[str, float]:
    """Times over those that the copies alone would take at the ceiling of the same run."""
    bounds = [nbytes / floor["h2d_bytes_per_second"] for nbytes in sizes]
    return cdf([one / bound / 1e3 for one, bound in zip(seconds, bounds, strict=True)])


def cdf(seconds: list[float]) -> dict[str, float]:
    """Milliseconds at some of a sample's percentiles."""
    ordered = sorted(value * 1e3 for value in seconds)
    marks = (1, 10, 25, 50, 75, 90, 99)
    return {
        f"p{mark}": ordered[min(len(ordered) - 1, len(ordered) * mark // 100)] for mark in marks
    } | {
        "mean": statistics.fmean(ordered),
        "samples": len(ordered),
    }


def about() -> dict[str, Any]:
    """Which machine, which versions, which commit. Asks without loading any of it."""
    from importlib.metadata import version

    (gpu, *_) = gpus.list_gpus()
    return {
        **made(),
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory_bytes,
        "driver": gpus.driver_version(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm"),
        "cuda_bindings": version("cuda-bindings"),
        "batch": BATCH,
        "prompt_tokens": PROMPT,
    }


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


if __name__ == "__main__":
    main()
