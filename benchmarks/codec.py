"""What encoded weights (`host_cache_codec = "exp7"`) save, and what decoding them costs.

    python benchmarks/codec.py --json FILE            on the CPU, with vLLM: sizes, rates, switches
    python benchmarks/codec.py --values 1e9           a round trip of so many numbers, and no more
    python benchmarks/codec.py --cuda --json FILE     on a GPU: the kernel and its switch
    python benchmarks/codec.py --cuda --smoke         the kernel's bookkeeping, without a GPU

On the CPU: the share that five kinds of weights take, encoding and decoding of them by one thread
(in its processor time), and two engines of one bf16 checkpoint, plain and encoded, switched in
turns: the ratio of a pair's times is what counts, as other work may run beside. How many such
models a host cache has room for is counted in the ledger, by the slabs that their images took. On a
GPU, in turns: 8 GB of weights are copied plain, and copied encoded, piece by piece, each decoded
while the next is copied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.kernels.exp7 import BLOCK_BYTES, ENTRY, VALUES, Bytes, Decoder, Encoder, Table
from benchmarks.provenance import made, made_on_cpu, write

SLAB: Final = 2 << 20
HOST_SLABS: Final = 5000
GPU_BLOCKS: Final = 61440
"""8 GB of plain weights."""
PIECE_BLOCKS: Final = 512
"""Blocks of a copy to the device: 64 MiB plain."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=float, help="round trip of so many numbers, and no more")
    parser.add_argument("--cuda", action="store_true", help="the kernel, on a GPU")
    parser.add_argument("--smoke", action="store_true", help="with --cuda: as C++, a few blocks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.values:
        told = tell("round trip", round_trip(int(options.values)))
        write(made_on_cpu() | {"round_trip": told}, options.json)
        return
    result: dict[str, Any] = {"what": "encoded weights"}
    if options.cuda:
        result |= made()
        result["gpu"] = tell("gpu", smoke() if options.smoke else on_gpu(options.rounds))
    else:
        result |= made_on_cpu()
        result["kinds"] = tell("kinds", [rates(*kind) for kind in kinds().items()])
        write(result, options.json)
        result |= tell("engines", engines(options.rounds))
    write(result, options.json)


def tell(what: str, value: Any) -> Any:
    print(f"{what}: {json.dumps(value, indent=2)}", flush=True)
    return value


def bf16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """As torch makes them: the nearest."""
    words = numbers.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def kinds() -> dict[str, Bytes]:
    """Five kinds of weights as models have them, of 32 MiB each."""
    dice = np.random.default_rng(5)
    normal = dice.standard_normal((4096, 4096), np.float32)
    made = {
        "normal, 0.02": normal * 0.02,
        "normal, 1 / sqrt(4096)": normal / 64,
        "normal, as wide as embeddings": normal * 0.7,
        "uniform, 1 / sqrt(4096)": dice.uniform(-1, 1, normal.shape) / 64,
        "rows of scales of their own": normal * 0.02 * np.exp(dice.normal(0, 0.3, (4096, 1))),
    }
    return {name: bf16(numbers).reshape(-1).view(np.uint8) for name, numbers in made.items()}


def encoded(plain: Bytes) -> tuple[list[Bytes], Table]:
    """The blocks of some plain bytes, to lie one behind the other, and their table."""
    encoder, parts, end = Encoder(), [], 0
    table = np.zeros(len(plain) // BLOCK_BYTES, ENTRY)
    for block in range(len(table)):
        found = encoder.encode(plain[block * BLOCK_BYTES :][:BLOCK_BYTES])
        found.enter(table, block, end)
        parts.append(found.data)
        end += len(found.data)
    return parts, table


def rates(kind: str, plain: Bytes) -> dict[str, Any]:
    """One thread's, of plain bytes, in its processor time; the best of five rounds."""
    decoder, target = Decoder(), np.empty(BLOCK_BYTES, np.uint8)
    parts, table = encoded(plain)

    def decode() -> None:
        for block, part in enumerate(parts):
            decoder.decode(table[block : block + 1], part, target)

    return {
        "kind": kind,
        "share": (int(table["nbytes"].sum()) + table.nbytes) / len(plain),
        "encode_gbytes_per_second": len(plain) / best(lambda: encoded(plain)) / 1e9,
        "decode_gbytes_per_second": len(plain) / best(decode) / 1e9,
        "copy_gbytes_per_second": len(plain) / best(lambda: plain.copy()) / 1e9,
    }


def best(action: Callable[[], object], rounds: int = 5) -> float:
    taken = []
    for _ in range(rounds):
        start = time.thread_time()
        action()
        taken.append(time.thread_time() - start)
    return min(taken)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def round_trip(count: int) -> dict[str, Any]:
    """Numbers of all scales, with shares of any others strewn among them or in a row: blocks with
    no escape, with as many as there may be, and such as are kept as they are."""
    began, kept, bytes_encoded = time.perf_counter(), 0, 0
    encoder, decoder, table = Encoder(), Decoder(), np.zeros(1, ENTRY)
    target = np.empty(BLOCK_BYTES, np.uint8)
    blocks = -(-count // VALUES)
    every = np.arange(1 << 16, dtype=np.uint16)
    dice = np.random.default_rng(21)
    for block in range(blocks):
        scale = np.float32(10.0 ** dice.uniform(-40, 38))
        with np.errstate(over="ignore"):
            numbers = bf16(dice.standard_normal(VALUES, np.float32) * scale)
        others = int(VALUES * dice.choice([0, 0.01, 0.1, 0.3, 0.36, 0.367, 1.0]))
        strange = every[dice.integers(0, 1 << 16) :][:others] if block % 2 else every[:others]
        at = dice.integers(0, VALUES, len(strange)) if block % 3 else slice(0, len(strange))
        numbers[at] = strange
        plain = numbers.view(np.uint8)
        found = encoder.encode(plain)
        found.enter(table, 0, 0)
        target.fill(0xA5)
        decoder.decode(table, found.data, target)
        if not np.array_equal(target, plain):
            raise SystemExit(f"block {block} does not come back")
        kept += len(found.data) == BLOCK_BYTES
        bytes_encoded += len(found.data)
    return {
        "numbers": blocks * VALUES,
        "blocks": blocks,
        "blocks_kept_as_they_are": kept,
        "share": bytes_encoded / (blocks * BLOCK_BYTES),
        "different": 0,
        "seconds": time.perf_counter() - began,
    }


def engines(rounds: int) -> dict[str, Any]:
    """Two engines of one checkpoint over one pool and one host tier."""
    from appliance.engines.vllm import prepare_environment

    prepare_environment("auto")
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper
    from appliance.memory.vmm_host import HostVmm
    from benchmarks.host_cache import checkpoints

    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints(Path(folder), 1, 800)["bfloat16"][0]
        host = HostTier.create(1 << 30)
        arena = Arena(HostVmm(400, SLAB))
        host.lock()
        swapper = Swapper(arena.vmm.stream)
        both = {
            form: engine(path, arena, host, swapper, form == "encoded")
            for form in ("plain", "encoded")
        }
        slabs, fills, end = {}, {}, 0
        for form, one in both.items():
            places = range(end, end + one.host_slabs * SLAB, SLAB)
            fills[form] = [seconds(lambda o=one, p=places: o.store_weights(p, fill=True))]
            slabs[form] = one.store_weights(places, fill=True)
            fills[form].append(seconds(lambda o=one, p=places: o.store_weights(p, fill=True)))
            end = places.stop
        switches: dict[str, list[float]] = {form: [] for form in both}
        processors: dict[str, list[float]] = {form: [] for form in both}
        for _ in range(rounds + 1):
            for form, one in both.items():
                start = time.process_time()
                switches[form].append(seconds(lambda o=one: o.begin_load().wait()))
                processors[form].append(time.process_time() - start)
                one.evict_weights()
        both["encoded"].begin_load().wait()
        verdict = str(both["encoded"].verify())
    nbytes = both["plain"]._placed.weights.layout.nbytes
    ratios = [e / p for e, p in list(zip(switches["encoded"], switches["plain"], strict=True))[1:]]
    return {
        "bytes": nbytes,
        "slabs": slabs,
        "share": slabs["encoded"] / slabs["plain"],
        "verdict": verdict,
        "fill_seconds": {form: min(times) for form, times in fills.items()},
        "switch_seconds": {form: statistics.median(t[1:]) for form, t in switches.items()},
        "switch_processor_seconds": {
            form: statistics.median(times[1:]) for form, times in processors.items()
        },
        "switch_encoded_over_plain": statistics.median(ratios),
        "switch_ratio_min_max": [min(ratios), max(ratios)],
        "load_gbytes_per_second": {
            form: nbytes / statistics.median(times[1:]) / 1e9 for form, times in switches.items()
        },
        "models_in_host_cache": {
            "host_cache_slabs": HOST_SLABS,
            "kv_floor_slabs": HOST_SLABS // 10,
            **{form: models(both["plain"].host_slabs, slabs[form], form) for form in both},
        },
    }


def engine(path: Path, arena: Any, host: Any, swapper: Any, encoded: bool) -> Any:
    from appliance.engines.vllm.engine import VllmEngine

    return VllmEngine.build(
        f"{path.name}-{encoded}",
        str(path),
        dtype="bfloat16",
        max_context=128,
        max_batch=1,
        arena=arena,
        host=host,
        swapper=swapper,
        encoded=encoded,
    )


def models(plain_slabs: int, slabs: int, form: str) -> int:
    """How many images find room, each of which is written plain first."""
    from appliance.memory.ledger import HostLedger

    ledger = HostLedger(HOST_SLABS * SLAB, SLAB, HOST_SLABS // 10)
    first = plain_slabs + (form == "encoded")
    count = 0
    while ledger.take_weights(f"m{count}", first) is not None:
        ledger.shrink_weights(f"m{count}", slabs)
        count += 1
    return count


def smoke() -> dict[str, Any]:
    """The same kernel as C++: nothing here says how fast it is."""
    from tests.stand_in.kernels import decode_exp7

    plain = kinds()["normal, 0.02"][: 8 * BLOCK_BYTES]
    parts, table = encoded(plain)
    same = np.array_equal(decode_exp7(np.concatenate(parts), table, len(plain)), plain)
    return {"device": "as C++: no figure here means anything", "equal": same}


def on_gpu(rounds: int) -> dict[str, Any]:
    """The kernel by itself, and a switch with it beside one of plain weights."""
    import torch

    from appliance.kernels.loader import Kernels

    kernels = Kernels()
    plain = kinds()["normal, 0.02"]
    parts, table = encoded(plain)
    # The same 256 blocks over and over: what they hold does not change how long they take.
    repeats = GPU_BLOCKS // len(table)
    one = np.concatenate(parts)
    entries = np.tile(table, repeats)
    entries["offset"] += np.repeat(np.arange(repeats, dtype=np.uint64) * len(one), len(table))
    host = torch.from_numpy(np.tile(one, repeats)).pin_memory()
    host_plain = torch.from_numpy(np.tile(plain, repeats)).pin_memory()
    device = torch.empty(len(host), dtype=torch.uint8, device="cuda")
    target = torch.empty(len(host_plain), dtype=torch.uint8, device="cuda")
    on_device = torch.from_numpy(entries.view(np.uint8)).cuda()
    stream = torch.cuda.Stream()
    ends = [int(entries["offset"][i]) for i in range(0, GPU_BLOCKS, PIECE_BLOCKS)] + [len(host)]

    def decode(first: int, count: int) -> None:
        to = target.data_ptr() + first * BLOCK_BYTES
        places = (device.data_ptr(), on_device.data_ptr())
        kernels.decode_exp7(to, *places, first, count, stream=stream.cuda_stream)

    def switch_plain() -> None:
        with torch.cuda.stream(stream):
            target.copy_(host_plain, non_blocking=True)
        stream.synchronize()

    def switch_encoded() -> None:
        copies = torch.cuda.Stream()
        for piece, (start, end) in enumerate(pairwise(ends)):
            with torch.cuda.stream(copies):
                device[start:end].copy_(host[start:end], non_blocking=True)
            stream.wait_stream(copies)
            decode(piece * PIECE_BLOCKS, PIECE_BLOCKS)
        stream.synchronize()

    def decode_all() -> None:
        decode(0, GPU_BLOCKS)
        stream.synchronize()

    times: dict[str, list[float]] = {"plain": [], "encoded": [], "decode": []}
    for _ in range(rounds + 1):
        target.zero_()
        torch.cuda.synchronize()
        times["encoded"].append(seconds(switch_encoded))
        equal = bool((target.view(repeats, -1) == torch.from_numpy(plain).cuda()).all())
        times["decode"].append(seconds(decode_all))
        times["plain"].append(seconds(switch_plain))
        if not equal:
            raise SystemExit("what was decoded is not what was encoded")
    taken = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "device": torch.cuda.get_device_name(),
        "plain_bytes": len(host_plain),
        "share": len(host) / len(host_plain),
        "decode_gbytes_per_second": len(host_plain) / taken["decode"] / 1e9,
        "switch_seconds": {"plain": taken["plain"], "encoded": taken["encoded"]},
        "switch_encoded_over_plain": taken["encoded"] / taken["plain"],
        "equal": True,
    }


if __name__ == "__main__":
    main()
