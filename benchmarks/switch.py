"""What a switch costs on the host: building, loading, evicting, swapping, beside a plain copy.

    python benchmarks/switch.py CHECKPOINT [CHECKPOINT ...]

Times are medians. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.engines.protocol import Sampling, SequenceSpec
from appliance.engines.vllm import prepare_environment
from appliance.memory.arena import Arena
from appliance.memory.hosttier import HostTier
from appliance.memory.vmm_host import HostVmm

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

SLAB = 2 * 1024 * 1024
PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pool-mib", type=int, default=2048)
    parser.add_argument("--host-mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()

    prepare_environment("auto")
    from appliance.engines.vllm.engine import VllmEngine

    arena = Arena(HostVmm(options.pool_mib * 1024 * 1024 // SLAB, SLAB))
    host = HostTier.create(options.host_mib * 1024 * 1024)
    offset = 0
    for path in options.checkpoints:
        start = time.perf_counter()
        engine = VllmEngine.build(
            path,
            path,
            dtype=options.dtype,
            max_context=2 * PROMPT,
            max_batch=8,
            arena=arena,
            host=host,
        )
        built = time.perf_counter() - start
        slabs = range(engine.weight_slabs)
        start = time.perf_counter()
        engine.store_weights([offset + slab * SLAB for slab in slabs], fill=True)
        stored = time.perf_counter() - start
        offset += engine.weight_host_bytes
        print(f"{path}\n  build {built:.2f} s, store {stored:.2f} s, {engine.weight_slabs} slabs")
        switch(engine, options.rounds)
        swap(engine, host, offset, options.rounds)
        engine.evict_weights()
        engine.trim()


def switch(engine: VllmEngine, rounds: int) -> None:
    """Load and evict the weights, beside a copy of as many bytes between mapped memory."""
    nbytes = engine.load_weights()
    source, target = (ctypes.create_string_buffer(nbytes) for _ in range(2))
    ctypes.memset(source, 1, nbytes)
    ctypes.memset(target, 1, nbytes)
    evict, load, copy = [], [], []
    for _ in range(rounds):
        evict.append(seconds(engine.evict_weights))
        load.append(seconds(engine.load_weights))
        copy.append(seconds(lambda: ctypes.memmove(target, source, nbytes)))
    print(
        f"  load {nbytes / 1e6:.1f} MB: {statistics.median(load) * 1e3:.2f} ms, "
        f"plain copy {statistics.median(copy) * 1e3:.2f} ms, "
        f"evict {statistics.median(evict) * 1e3:.2f} ms"
    )


def swap(engine: VllmEngine, host: HostTier, offset: int, rounds: int) -> None:
    """Move the KV of one request out and in again."""
    sampling = Sampling(max_tokens=PROMPT, temperature=0.0, ignore_eos=True)
    prompt = tuple(range(3, 3 + PROMPT))
    slabs = engine.kv.slabs(engine.kv.blocks(2 * PROMPT))
    engine.add(SequenceSpec(request="r", model=engine.model, prompt=prompt, sampling=sampling))
    engine.prefill("r", slabs)
    places = [offset + i * engine.kv.block_bytes for i in range(engine.kv.blocks(PROMPT))]
    host.address(places[-1], engine.kv.block_bytes)
    out, back = [], []
    for _ in range(rounds):
        out.append(seconds(lambda: engine.swap_out("r", places)))
        back.append(seconds(lambda: engine.swap_in("r", places, slabs)))
    nbytes = len(places) * engine.kv.block_bytes
    rates = [nbytes / statistics.median(times) / 1e9 for times in (out, back)]
    print(f"  swap {nbytes / 1e6:.1f} MB: out {rates[0]:.2f} GB/s, in {rates[1]:.2f} GB/s")
    engine.forget("r")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
