"""What a switch costs on the host, everything in the host tier, beside a plain copy of its bytes.

    python benchmarks/switch.py [--mebibytes 256] [--dtype float32] [--rounds 20] [--json FILE]

Two models of about that size each. In every round, in turns:

* cold         evict the one, load the other, to the last byte. Compared with a copy of as many
               bytes between the same memories with everything mapped; the mapping (and unmapping)
               of as many slabs is shown apart, but it is part of the switch.
* prefetched   the same when the other was brought in before, beside the first.
* layer-ready  a prompt on a cold model, while its weights come in, compared with the sum of the
               load and of the same prompt on the loaded model. The prompt is made so long that the
               two take about as long. Compute has one processor, copies have the others.
* kv           the KV of one request out and in again.

Times are medians. Nothing else should run on the machine, which needs two processors: two threads
of one core do not compute and copy at once. `overlap` says what this machine gives: a copy and a
sum over as many bytes side by side, over the sum of both one after the other; 0.5 is perfect.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.recipes import Recipe
from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm import prepare_environment
from appliance.memory import mapping
from appliance.memory.arena import Arena, Region
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.vmm_host import HostVmm

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

SLAB = 2 << 20
CONTEXT = 2048
KV_PROMPT = 512
VOCABULARY = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (environment := mapping.environment(os.environ)) != os.environ:
        # Set when a process starts, as the daemon does for its workers.
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        parser.error("copies need a processor beside that of compute")
    room = 3 * (options.mebibytes << 20)
    # Made before the process is bound, so that its streams are not.
    vmm = HostVmm(room // SLAB, SLAB)
    arena = Arena(vmm)
    swapper = Swapper(arena.vmm.stream)
    host = HostTier.create(room)
    host.lock()
    prepare_environment(str(processors[0]))
    with tempfile.TemporaryDirectory() as directory:
        paths = make_checkpoints(Path(directory), recipes=recipes(options.mebibytes))
        bench = Bench(arena, host, swapper)
        engines = [bench.build(path, options.dtype) for path in paths]
        result = {
            "slab_bytes": SLAB,
            "huge_pages": vmm.huge,
            "bytes": [engine.begin_load().nbytes for engine in engines],
            "dtype": options.dtype,
            "rounds": options.rounds,
        }
        for engine in engines:
            engine.evict_weights()
        result["overlap"] = overlap(bench, processors, options.mebibytes << 20, options.rounds)
        result["cold"] = cold(bench, engines, options.rounds)
        result["prefetched"] = prefetched(bench, engines, options.rounds, result["cold"])
        result["layer_ready"] = layer_ready(bench, engines[0], options.rounds)
        result["kv"] = [swap(bench, engine, options.rounds) for engine in engines]
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def recipes(mebibytes: int) -> list[Recipe]:
    """Two models of about so many MiB in float32, of different shapes."""
    wide = (1024, 2816, 16, 16, 64, "llama")
    lean = (1024, 3072, 8, 4, 128, "qwen3")
    made = []
    for seed, (hidden, intermediate, heads, kv_heads, head_dim, family) in enumerate((wide, lean)):
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        layer = attention + 3 * hidden * intermediate
        made.append(
            Recipe(
                name=f"{family}-{mebibytes}",
                family=family,
                layers=max(1, round(mebibytes * 2**20 / 4 / layer)),
                hidden=hidden,
                intermediate=intermediate,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                seed=40 + seed,
            )
        )
    return made


class Bench:
    """What the engines share, and prompts that no cache knows."""

    def __init__(self, arena: Arena, host: HostTier, swapper: Swapper) -> None:
        self.arena = arena
        self.host = host
        self.swapper = swapper
        self.used = 0
        """Bytes of the host tier that are taken."""
        self._random = random.Random(7)
        self._asked = 0

    def build(self, path: Path, dtype: str) -> VllmEngine:
        from appliance.engines.vllm.engine import VllmEngine

        engine = VllmEngine.build(
            path.name,
            str(path),
            dtype=dtype,
            max_context=CONTEXT,
            max_batch=8,
            arena=self.arena,
            host=self.host,
            swapper=self.swapper,
        )
        places = [self.used + slab * SLAB for slab in range(engine.host_slabs)]
        engine.store_weights(places, fill=True)
        self.used += engine.host_slabs * SLAB
        return engine

    def ask(self, engine: VllmEngine, length: int) -> str:
        """A request of so many random tokens, known to the engine."""
        from vllm import SamplingParams

        from appliance.engines.vllm.messages import encode_params

        self._asked += 1
        name = f"r{self._asked}"
        prompt = tuple(self._random.randrange(3, VOCABULARY) for _ in range(length))
        params = SamplingParams(max_tokens=CONTEXT, temperature=0.0, ignore_eos=True)
        engine.add(
            SequenceSpec(
                request=name, model=engine.model, prompt=prompt, body=encode_params(params)
            )
        )
        return name

    def prompt(self, engine: VllmEngine, length: int) -> float:
        """Seconds of a prefill; the weights may be on their way."""
        name = self.ask(engine, length)
        slabs = engine.kv.slabs(engine.kv.prompt_blocks(length + 1))
        taken = seconds(lambda: engine.prefill(name, slabs))
        engine.forget(name)
        engine.trim(0)
        return taken


def overlap(bench: Bench, processors: list[int], nbytes: int, rounds: int) -> dict[str, object]:
    """A copy and a sum over as many bytes, each on a processor: both at once over one by one."""
    place = bench.arena.reserve("bare", nbytes // SLAB)
    place.map(range(place.slots))
    numbers = np.ones(nbytes // 4, np.float32)

    def copy() -> None:
        os.sched_setaffinity(0, processors[1:])
        ctypes.memmove(place.address, bench.host.address(0, nbytes), nbytes)

    def compute() -> None:
        os.sched_setaffinity(0, processors[:1])
        numbers.sum()

    copies, sums, both = [], [], []
    for _ in range(rounds):
        copies.append(seconds(lambda: at_once(copy)))
        sums.append(seconds(lambda: at_once(compute)))
        both.append(seconds(lambda: at_once(copy, compute)))
    place.unmap(range(place.slots))
    place.release()
    ratios = [b / (c + s) for b, c, s in zip(both, copies, sums, strict=True)]
    return {
        "what": "a copy and a sum at once / one after the other",
        "copy_ms": statistics.median(copies) * 1e3,
        "sum_ms": statistics.median(sums) * 1e3,
        "both_ms": statistics.median(both) * 1e3,
        "ratio_median": statistics.median(ratios),
    }


def at_once(*actions: Callable[[], None]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def load(engine: VllmEngine) -> None:
    engine.begin_load().wait()


def cold(bench: Bench, engines: list[VllmEngine], rounds: int) -> dict[str, object]:
    """Switch back and forth."""
    bare = [bench.arena.reserve("bare", engine.weight_slabs) for engine in engines]
    sizes = [engine.begin_load().nbytes for engine in engines]
    for engine in engines:
        load(engine)
        engine.evict_weights()
    switches, copies, mappings = [], [], []
    load(engines[0])
    for number in range(2 * rounds):
        old, new = (0, 1) if number % 2 == 0 else (1, 0)
        switches.append(seconds(lambda old=old, new=new: change(engines[old], engines[new])))
        # The same bytes again, from the host tier to where they are; the tier's first slabs will
        # do for a source, whatever they hold.
        place = bare[new]
        place.map(range(place.slots))
        source = bench.host.address(0, sizes[new])
        address = place.address
        copies.append(
            seconds(lambda new=new, a=address, s=source: ctypes.memmove(a, s, sizes[new]))
        )
        place.unmap(range(place.slots))
        bare[old].map(range(bare[old].slots))
        mappings.append(seconds(lambda old=old, new=new: remap(bare[old], bare[new])))
        bare[new].unmap(range(bare[new].slots))
    engines[0].evict_weights()
    for region in bare:
        region.release()
    ratios = [s / c for s, c in zip(switches, copies, strict=True)]
    return {
        "what": "switch, mapping included / memcpy",
        "switch_ms": statistics.median(switches) * 1e3,
        "memcpy_ms": statistics.median(copies) * 1e3,
        "mapping_ms": statistics.median(mappings) * 1e3,
        "ratio_median": statistics.median(ratios),
        "ratio_p90": sorted(ratios)[len(ratios) * 9 // 10],
    }


def remap(old: Region, new: Region) -> None:
    """What a switch does to the page tables, and nothing else."""
    old.unmap(range(old.slots))
    new.map(range(new.slots))


def change(old: VllmEngine, new: VllmEngine) -> None:
    old.evict_weights()
    load(new)


def prefetched(
    bench: Bench, engines: list[VllmEngine], rounds: int, cold_switch: object
) -> dict[str, object]:
    """Switch to a model whose weights came in before; the old one's go afterwards."""
    assert isinstance(cold_switch, dict)
    load(engines[0])
    switches = []
    for number in range(2 * rounds):
        old, new = (0, 1) if number % 2 == 0 else (1, 0)
        load(engines[new])  # beside whatever the old one does
        bench.swapper.reap()
        switches.append(seconds(lambda new=new: load(engines[new])))
        engines[old].evict_weights()
    engines[0].evict_weights()
    median = statistics.median(switches) * 1e3
    return {
        "what": "prefetched switch / cold switch",
        "switch_ms": median,
        "ratio_median": median / cold_switch["switch_ms"],
    }


def layer_ready(bench: Bench, engine: VllmEngine, rounds: int) -> list[dict[str, object]]:
    """Prompts that take about as long as the load: the nearest, and its neighbours."""
    return [overlapped(bench, engine, length, rounds) for length in alike(bench, engine)]


def overlapped(bench: Bench, engine: VllmEngine, length: int, rounds: int) -> dict[str, object]:
    """A prompt during the load, against load and prompt one after the other."""
    copies, prompts, both = [], [], []
    for _ in range(rounds):
        copies.append(seconds(lambda: load(engine)))
        prompts.append(bench.prompt(engine, length))
        engine.evict_weights()
        start = time.perf_counter()
        engine.begin_load()
        bench.prompt(engine, length)
        both.append(time.perf_counter() - start)
        engine.evict_weights()
    ratios = [b / (c + p) for b, c, p in zip(both, copies, prompts, strict=True)]
    return {
        "what": "first token of a cold model / (load + prompt)",
        "prompt_tokens": length,
        "load_ms": statistics.median(copies) * 1e3,
        "prompt_ms": statistics.median(prompts) * 1e3,
        "both_ms": statistics.median(both) * 1e3,
        "ratio_median": statistics.median(ratios),
        "ratio_p90": sorted(ratios)[len(ratios) * 9 // 10],
    }


def alike(bench: Bench, engine: VllmEngine) -> list[int]:
    """The length of the prompt that takes most nearly as long as the load, and those beside it."""
    loads = []
    for _ in range(5):
        loads.append(seconds(lambda: load(engine)))
        engine.evict_weights()
    wanted = statistics.median(loads)
    load(engine)
    lengths = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]
    found = {}
    for length in lengths:
        found[length] = statistics.median(bench.prompt(engine, length) for _ in range(5))
        if found[length] > 2 * wanted:
            break
    engine.evict_weights()
    nearest = lengths.index(min(found, key=lambda length: abs(found[length] - wanted)))
    return lengths[max(0, nearest - 1) : nearest + 2]


def swap(bench: Bench, engine: VllmEngine, rounds: int) -> dict[str, object]:
    """Move the KV of one request of `KV_PROMPT` tokens out and in again."""
    load(engine)
    name = bench.ask(engine, KV_PROMPT)
    slabs = engine.kv.slabs(engine.kv.prompt_blocks(KV_PROMPT + 1))
    engine.prefill(name, slabs)
    blocks = engine.kv.blocks(KV_PROMPT)
    places = [bench.used + i * engine.kv.block_bytes for i in range(blocks)]
    out, back = [], []
    for _ in range(rounds):
        out.append(seconds(lambda: bench.swapper.settle([engine.swap_out(name, places)])))
        engine.trim(0)
        back.append(seconds(lambda: bench.swapper.settle([engine.swap_in(name, places, slabs)])))
    engine.forget(name)
    engine.trim(0)
    engine.evict_weights()
    nbytes = blocks * engine.kv.block_bytes
    return {
        "model": engine.model,
        "bytes": nbytes,
        "out_gbytes_per_second": nbytes / statistics.median(out) / 1e9,
        "in_gbytes_per_second": nbytes / statistics.median(back) / 1e9,
    }


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
