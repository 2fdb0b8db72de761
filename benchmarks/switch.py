"""What a switch costs on the host, everything in the host tier, beside a plain copy of its bytes.

    python benchmarks/switch.py [--models llama-b qwen3-a] [--rounds 30] [--json FILE]

A switch evicts one model and loads the other. It is compared with the sum of its parts, measured
on their own in the same round: `memcpy` of as many bytes between memory that is in place, and the
mapping of as many slabs (and the unmapping of those evicted) without any copy. Times are medians.
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.demo.checkpoints import make_checkpoints
from appliance.engines.protocol import Sampling, SequenceSpec
from appliance.engines.vllm import prepare_environment
from appliance.memory.arena import Arena
from appliance.memory.hosttier import HostTier
from appliance.memory.vmm_host import HostVmm

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

SLAB = 2 << 20
POOL = 512 << 20
HOST = 1 << 30
PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs=2, default=["llama-b", "qwen3-a"])
    parser.add_argument("--checkpoints", nargs=2, type=Path, help="two directories instead")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare_environment("auto")
    arena = Arena(HostVmm(POOL // SLAB, SLAB))
    host = HostTier.create(HOST)
    with tempfile.TemporaryDirectory() as directory:
        paths = options.checkpoints or make_checkpoints(Path(directory), options.models)
        engines = build(paths, options.dtype, arena, host)
        result = switch(engines, arena, options.rounds)
        used = sum(engine.host_slabs * SLAB for engine in engines)
        result["kv"] = [swap(engine, used, options.rounds) for engine in engines]
    result |= {"models": [Path(path).name for path in paths], "dtype": options.dtype}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def build(paths: list[Path], dtype: str, arena: Arena, host: HostTier) -> list[VllmEngine]:
    """Both engines, their weights in the host tier one behind the other."""
    from appliance.engines.vllm.engine import VllmEngine

    engines, offset = [], 0
    for path in paths:
        engine = VllmEngine.build(
            path.name,
            str(path),
            dtype=dtype,
            max_context=2 * PROMPT,
            max_batch=8,
            arena=arena,
            host=host,
        )
        places = [offset + slab * SLAB for slab in range(engine.weight_slabs)]
        engine.store_weights(places, fill=True)
        offset += engine.host_slabs * SLAB
        engines.append(engine)
    return engines


def switch(engines: list[VllmEngine], arena: Arena, rounds: int) -> dict[str, object]:
    """Switch back and forth; seconds of a switch and of its parts."""
    bare = [arena.reserve("bare", engine.weight_slabs) for engine in engines]
    sizes = [load(engine) for engine in engines]
    source, target = (ctypes.create_string_buffer(max(sizes)) for _ in range(2))
    ctypes.memset(source, 1, max(sizes))
    ctypes.memset(target, 1, max(sizes))
    engines[1].evict_weights()
    bare[0].map(range(bare[0].slots))
    switches, copies, mappings = [], [], []
    for number in range(2 * rounds):
        old, new = (0, 1) if number % 2 == 0 else (1, 0)
        copies.append(seconds(lambda new=new: ctypes.memmove(target, source, sizes[new])))
        mappings.append(seconds(lambda old=old, new=new: remap(bare[old], bare[new])))
        switches.append(seconds(lambda old=old, new=new: change(engines[old], engines[new])))
    ratios = [s / (c + m) for s, c, m in zip(switches, copies, mappings, strict=True)]
    return {
        "what": "switch / (memcpy + mapping)",
        "bytes": sizes,
        "slab_bytes": SLAB,
        "switch_ms": statistics.median(switches) * 1e3,
        "memcpy_ms": statistics.median(copies) * 1e3,
        "mapping_ms": statistics.median(mappings) * 1e3,
        "ratio_median": statistics.median(ratios),
        "ratio_p90": sorted(ratios)[len(ratios) * 9 // 10],
        "rounds": len(ratios),
    }


def load(engine: VllmEngine) -> int:
    """Bytes of a load."""
    transfer = engine.begin_load()
    transfer.wait()
    return transfer.nbytes


def remap(old: object, new: object) -> None:
    """What a switch does to the page tables, and nothing else."""
    old.unmap(range(old.slots))  # type: ignore[attr-defined]
    new.map(range(new.slots))  # type: ignore[attr-defined]


def change(old: VllmEngine, new: VllmEngine) -> None:
    old.evict_weights()
    new.begin_load().wait()


def swap(engine: VllmEngine, offset: int, rounds: int) -> dict[str, float]:
    """Move the KV of one request of `PROMPT` tokens out and in again."""
    engine.begin_load().wait()
    sampling = Sampling(max_tokens=PROMPT, temperature=0.0, ignore_eos=True)
    prompt = tuple(range(3, 3 + PROMPT))
    slabs = engine.kv.slabs(engine.kv.blocks(2 * PROMPT))
    engine.add(SequenceSpec(request="r", model=engine.model, prompt=prompt, sampling=sampling))
    engine.prefill("r", slabs)
    places = [offset + i * engine.kv.block_bytes for i in range(engine.kv.blocks(PROMPT))]
    out, back = [], []
    for _ in range(rounds):
        out.append(seconds(lambda: engine.swap_out("r", places)))
        back.append(seconds(lambda: engine.swap_in("r", places, slabs)))
    engine.forget("r")
    engine.trim()
    engine.evict_weights()
    nbytes = len(places) * engine.kv.block_bytes
    return {
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
