"""What switches, swaps and prefetches cost on a GPU, beside the ceilings of the same run.

    python benchmarks/gpu_switch.py --json benchmarks/results/<date>-<gpu>-switch.json

Needs torch, CuPy, cuda-bindings and numpy, and nothing else of ours than plain Python. Models are
layouts of a real one's size filled with random bytes. `--smoke` runs all of the bookkeeping with
tiny sizes on the stand-in driver of the tests, or on the pretend driver: it says nothing about
speed, and writes no file, but for a rehearsal's counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.memory.arena import Arena, Region
from appliance.memory.ceilings.stopwatch import Stopwatch
from appliance.memory.cuda.driver import call
from appliance.memory.cuda.plain_copies import plain_copies
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferKind
from benchmarks.provenance import PRETENDS, made, write

MIB: Final = 1 << 20
RANDOM_BYTES: Final = 256 * MIB
STOPWATCH: Final = Stopwatch(0.0, 1)
"""Used with a number of rounds, not for a time."""


@dataclass(frozen=True)
class Model:
    """A dense bf16 model, as far as memory is concerned."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Output and input widths of one layer's matrices: Q, K and V, O, gate and up, down."""
        return [
            (self.hidden + 2 * self.kv_width, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.feed_forward, self.hidden),
            (self.hidden, self.feed_forward),
        ]

    @property
    def layer_bytes(self) -> int:
        return sum(2 * outputs * inputs for outputs, inputs in self.matrices)

    @property
    def first_bytes(self) -> int:
        """What lies before the first layer."""
        return 2 * self.vocabulary * self.hidden

    @property
    def nbytes(self) -> int:
        tables = 1 if self.tied else 2
        return tables * self.first_bytes + self.layers * self.layer_bytes

    def layer_end(self, layer: int) -> int:
        """Bytes that have to be there before a layer can run."""
        return self.first_bytes + (layer + 1) * self.layer_bytes

    def kv_block(self, tokens: int) -> int:
        """Bytes of K, or of V, of one layer's block."""
        return 2 * tokens * self.kv_width


MODELS: Final = {
    "1B": Model("1B", 16, 2048, 8192, 8, 64, 128256, tied=True),
    "8B": Model("8B", 32, 4096, 14336, 8, 128, 128256),
    "14B": Model("14B", 48, 5120, 13824, 8, 128, 152064),
}
SMOKE: Final = {
    "small": Model("small", 4, 256, 512, 2, 64, 1024, tied=True),
    "large": Model("large", 6, 512, 1024, 4, 64, 2048),
}
KV_SHAPES: Final = {  # planes (K and V of every layer), bytes of a plane's block of 16 tokens
    "1B": (32, 16384),
    "8B": (64, 32768),
    "14B": (96, 32768),
    "7B, all heads": (64, 131072),
}


class TorchCompute:
    """Prefills a layer at a time, with the weights where they lie."""

    def __init__(self, vmm: CudaVmm, device: int, tokens: int) -> None:
        import torch

        torch.cuda.set_device(device)
        self._weights: dict[tuple[int, int, int], Any] = {}
        self._torch = torch
        self._device = device
        self._tokens = tokens
        self._stream = torch.cuda.Stream()
        self._inputs: dict[int, Any] = {}
        vmm.compute_stream = self._stream.cuda_stream

    def layer(self, model: Model, region: Region, layer: int) -> None:
        """The matrix products of one layer, on the compute stream."""
        from appliance.kernels.arrays import device_bytes

        torch = self._torch
        start = region.address + model.first_bytes + layer * model.layer_bytes
        with torch.cuda.stream(self._stream), torch.no_grad():
            for outputs, inputs in model.matrices:
                size = 2 * outputs * inputs
                key = (start, outputs, inputs)
                if key not in self._weights:
                    raw_bytes = device_bytes(start, size, self._device)
                    self._weights[key] = raw_bytes.view(torch.bfloat16).view(outputs, inputs)
                if inputs not in self._inputs:
                    shape = (self._tokens, inputs)
                    # Zeros would flatter: a GPU computes them with less power.
                    self._inputs[inputs] = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
                self._inputs[inputs] @ self._weights[key].T
                start += size

    def wait(self) -> None:
        self._stream.synchronize()


class CopyCompute:
    """For the stand-in and the pretend driver, which have no kernels: reads a layer's
    bytes, on a stream of its own."""

    def __init__(self, vmm: CudaVmm) -> None:
        vmm.context.use()
        self._stream = call("cuStreamCreate", 1)
        self._sink = HostTier.create(64 * MIB)
        vmm.compute_stream = int(self._stream)

    def layer(self, model: Model, region: Region, layer: int) -> None:
        start = region.address + model.first_bytes + layer * model.layer_bytes
        sink = self._sink.address(0, model.layer_bytes)
        call("cuMemcpyAsync", sink, start, model.layer_bytes, self._stream)

    def wait(self) -> None:
        call("cuStreamSynchronize", self._stream)


class Rig:
    """One pool, one host tier, streams and compute; and how to look at what is where."""

    def __init__(self, options: argparse.Namespace, models: Iterable[Model]) -> None:
        self.smoke: bool = options.smoke
        self.rounds: int = options.rounds
        self.slab_bytes: int = options.slab_mib * MIB
        largest = max(model.nbytes for model in models)
        self.slabs = 2 * self.whole(largest) + self.whole(options.kv_mib * MIB) * 3
        self.host_bytes = (self.whole(largest) + self.whole(options.kv_mib * MIB)) * self.slab_bytes
        began = time.perf_counter()
        self.vmm = CudaVmm(options.device, self.slabs, self.slab_bytes)
        self.create_seconds = time.perf_counter() - began
        self.arena = Arena(self.vmm)
        self.host = HostTier.create(self.host_bytes)
        began = time.perf_counter()
        self.vmm.register(self.host.address(0, 1), self.host_bytes).wait()
        self.pin_seconds = time.perf_counter() - began
        self.streams = {kind: self.vmm.stream(f"swap-{kind}") for kind in TransferKind}
        self.compute: TorchCompute | CopyCompute
        if self.smoke:
            self.compute = CopyCompute(self.vmm)
        else:
            self.compute = TorchCompute(self.vmm, options.device, options.tokens)
        self._kernels: Any = None
        self._fill()

    def whole(self, nbytes: int) -> int:
        """Slabs that hold so many bytes."""
        return -(-nbytes // self.slab_bytes)

    def region(self, name: str, nbytes: int) -> Region:
        return self.arena.reserve(name, self.whole(nbytes))

    def run(self, kind: TransferKind, copies: Iterable[Copy], nbytes: int) -> Transfer:
        transfer = Transfer(kind, "benchmark", nbytes, time.monotonic())
        self.streams[kind].run(transfer, copies)
        return transfer

    @property
    def kernels(self) -> Any:
        if self._kernels is None:
            from appliance.kernels.loader import Kernels

            self._kernels = Kernels()
        return self._kernels

    def fingerprint(self, address: int, nbytes: int) -> int:
        """Of device memory."""
        if self.smoke:
            return self.host_fingerprint(address, nbytes)
        return int(self.kernels.fingerprint(address, nbytes))

    def host_fingerprint(self, address: int, nbytes: int) -> int:
        import torch

        from appliance.kernels import reference
        from appliance.memory import mapping

        view = torch.frombuffer(mapping.view(address, nbytes), dtype=torch.uint8)
        return reference.fingerprint(view)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()

    def _fill(self) -> None:
        """Random bytes, the same again after a while, every slab with its number in front."""
        import numpy as np

        noise = np.random.default_rng(1).bytes(min(RANDOM_BYTES, self.host_bytes))
        view = self.host.view(0, self.host_bytes)
        for start in range(0, self.host_bytes, len(noise)):
            part = view[start : start + len(noise)]
            part[:] = noise[: len(part)]
        for start in range(0, self.host_bytes, self.slab_bytes):
            view[start : start + 8] = start.to_bytes(8, "little")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slab-mib", type=int, default=2)
    parser.add_argument("--kv-mib", type=int, default=1024, help="KV moved by one swap")
    parser.add_argument("--tokens", type=int, default=8192, help="of a layer-ready prefill")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="bookkeeping only, no GPU")
    options = parser.parse_args()
    models = [MODELS[name] for name in options.models]
    if options.smoke:
        if not PRETENDS:
            from tests.stand_in.driver import stand_in

            stand_in().reset()
        if options.json and not PRETENDS:
            parser.error("--smoke measures nothing, so there is nothing to write")
        models, options.kv_mib, options.rounds = list(SMOKE.values()), 8, 2
    result = {"what": "switches and swaps on a GPU"} | about(options)
    rig = Rig(options, models)
    result["ceilings"] = tell("ceilings", ceilings(rig))
    write(result, options.json)
    bandwidth = result["ceilings"]["h2d_bytes_per_second"]
    result["switches"] = []
    for model in models:
        result["switches"].append(tell(model.name, switches(rig, model, bandwidth)))
        write(result, options.json)
    shapes = dict(list(KV_SHAPES.items())[:2]) if options.smoke else KV_SHAPES
    sizes = options.kv_mib * MIB
    result["kv"] = []
    for name, shape in shapes.items():
        result["kv"].append(tell(f"KV of {name}", kv(rig, name, *shape, sizes)))
        write(result, options.json)
    result["overlap"] = tell("overlap", overlap(rig, models[-1]))
    write(result, options.json)
    rig.close()


def tell(what: str, value: Any) -> Any:
    print(f"{what}: {json.dumps(value, indent=2)}", flush=True)
    return value


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Which machine, which versions, which commit."""
    told: dict[str, Any] = {
        **made(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "slab_bytes": options.slab_mib * MIB,
        "rounds": options.rounds,
    }
    if options.smoke and not PRETENDS:
        return told | {"device": "stand-in: no figure here means anything"}
    import cuda.bindings
    import cupy
    import torch

    return told | {
        "device": torch.cuda.get_device_name(options.device),
        "driver": call("cuDriverGetVersion"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": cupy.__version__,
        "cuda_bindings": cuda.bindings.__version__,
    }


def ceilings(rig: Rig) -> dict[str, Any]:
    """What the machine can do at best: copies, mapping, allocation, pinning."""
    size = min(1024 * MIB, rig.whole(rig.host_bytes // 2) * rig.slab_bytes)
    region = rig.region("ceiling", size)
    region.map(range(region.slots))
    half = size // 2
    chunks = [1, 2] if rig.smoke else [1, 4, 16, 64, 256]
    host, device = rig.host.address(0, size), region.address

    def raw(work: list[list[tuple[int, int]]], nbytes: int) -> None:
        plain_copies(rig.vmm.context, work, nbytes)

    rows = []
    for mib in chunks:
        step = mib * MIB
        row: dict[str, float] = {"chunk_bytes": step}
        for name, to, start in (("h2d", device, host), ("d2h", host, device)):
            places = [(to + offset, start + offset) for offset in range(0, size, step)]
            for streams in (1, 2):
                work = [places[i::streams] for i in range(streams)]
                row[f"{name}_{streams}_streams"] = best(rig, lambda w=work, n=step: raw(w, n), size)
        rows.append(row)
    device_copy = best(rig, lambda: raw([[(device, device + half)]], half), half)
    region.release()
    fastest = {
        name: max(value for row in rows for key, value in row.items() if key.startswith(name))
        for name in ("h2d_1", "d2h_1", "h2d", "d2h")
    }
    return {
        "h2d_bytes_per_second": fastest["h2d_1"],
        "d2h_bytes_per_second": fastest["d2h_1"],
        "h2d_two_streams_bytes_per_second": fastest["h2d"],
        "d2h_two_streams_bytes_per_second": fastest["d2h"],
        "d2d_bytes_per_second": device_copy,
        "by_chunk": rows,
        "mapping": [mapping_cost(rig, slabs) for slabs in (1, 8, 64, 512) if slabs * 2 < rig.slabs],
        "create_slab_seconds": rig.create_seconds / rig.slabs,
        "pin_bytes_per_second": rig.host_bytes / rig.pin_seconds,
    }


def best(rig: Rig, work: Callable[[], None], nbytes: int) -> float:
    """Bytes per second of the fastest round, the first not counted."""
    return nbytes / STOPWATCH.fastest(work, rig.rounds)


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def mapping_cost(rig: Rig, slabs: int) -> dict[str, float]:
    region = rig.region("mapping", slabs * rig.slab_bytes)
    mapped, unmapped = STOPWATCH.mapping(region, slabs, rig.rounds)
    region.release()
    return {
        "bytes": slabs * rig.slab_bytes,
        "map_seconds": mapped,
        "unmap_seconds": unmapped,
    }


def image(rig: Rig, region: Region, model: Model, *, mapping: bool = False) -> Iterator[Copy]:
    """A model's weights; every 64 MiB of slabs mapped just before their copy, if asked for."""
    batch = max(1, 64 * MIB // rig.slab_bytes)
    for first in range(0, region.slots, batch):
        slots = range(first, min(first + batch, region.slots))
        if mapping:
            region.map(slots)
        # Slabs that follow each other on both sides are one copy: fewer pieces for the driver.
        start = first * rig.slab_bytes
        size = min(len(slots) * rig.slab_bytes, model.nbytes - start)
        yield Copy(region.slot_address(first), rig.host.address(start, size), size)


def switches(rig: Rig, model: Model, bandwidth: float) -> dict[str, Any]:
    """Two models of one size in turn: loaded cold, found prefetched, computed while they land."""
    old, new = rig.region("old", model.nbytes), rig.region("new", model.nbytes)
    bound = model.nbytes / bandwidth

    def load(region: Region, mapping: bool) -> Transfer:
        copies = image(rig, region, model, mapping=mapping)
        return rig.run(TransferKind.WEIGHTS, copies, model.nbytes)

    def prefill(region: Region, transfer: Transfer | None = None) -> None:
        for layer in range(model.layers):
            if transfer is not None:
                rig.vmm.compute_waits(transfer, model.layer_end(layer))
            rig.compute.layer(model, region, layer)
        rig.compute.wait()

    def first_layer(region: Region, transfer: Transfer | None = None) -> None:
        if transfer is not None:
            rig.vmm.compute_waits(transfer)
        rig.compute.layer(model, region, 0)
        rig.compute.wait()

    expected = rig.host_fingerprint(rig.host.address(0, model.nbytes), model.nbytes)
    rounds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rounds.setdefault(name, []).append(value)

    load(old, mapping=True).wait()
    prefill(old)
    for _ in range(rig.rounds):
        # Cold: the old one's slabs go to the new one, all mapped before the first copy.
        began = time.perf_counter()
        old.unmap(range(old.slots))
        unmapped = time.perf_counter()
        new.map(range(new.slots))
        mapped = time.perf_counter()
        transfer = load(new, mapping=False)
        transfer.wait()
        ended = time.perf_counter()
        note("cold_seconds", ended - began)
        note("cold_unmap_seconds", unmapped - began)
        note("cold_map_seconds", mapped - unmapped)
        note("cold_copy_seconds", ended - mapped)
        trace = transfer.trace()
        note("cold_transfer_seconds", trace.ended - trace.began)
        if rig.fingerprint(new.address, model.nbytes) != expected:
            raise RuntimeError(f"{model.name}: what was loaded is not what the host has")
        note("prefill_seconds", seconds(lambda: prefill(new)))
        # Cold again, slabs mapped while the copy is under way.
        new.unmap(range(new.slots))
        note("pipelined_seconds", seconds(lambda: load(new, mapping=True).wait()))
        # Layer-ready: computed as it lands.
        new.unmap(range(new.slots))
        note("layer_ready_seconds", seconds(lambda: prefill(new, load(new, mapping=True))))
        # Prefetched: the other one is there already; the switch ends with its first layer's end.
        ahead = load(old, mapping=True)
        ahead.wait()
        note("first_layer_seconds", seconds(lambda: first_layer(old)))
        note("prefetched_seconds", seconds(lambda a=ahead: first_layer(old, a)))
        new.unmap(range(new.slots))
    old.release()
    new.release()
    told: dict[str, Any] = {name: statistics.median(values) for name, values in rounds.items()}
    cold = told["cold_seconds"] + told["first_layer_seconds"]
    separate = told["cold_copy_seconds"] + told["prefill_seconds"]
    return {
        "model": model.name,
        "bytes": model.nbytes,
        "bound_seconds": bound,
        "cold_over_bound": told["cold_seconds"] / bound,
        "pipelined_over_bound": told["pipelined_seconds"] / bound,
        "copy_bandwidth_of_ceiling": bound / told["cold_transfer_seconds"],
        "prefetched_over_cold": told["prefetched_seconds"] / cold,
        "layer_ready_over_copy_plus_prefill": told["layer_ready_seconds"] / separate,
        "fingerprints_equal": True,
    } | told


def kv(rig: Rig, name: str, planes: int, block_bytes: int, nbytes: int) -> dict[str, Any]:
    """KV of one shape out and in again: in rows as it lies, and packed by a kernel first."""
    count = nbytes // (planes * block_bytes)
    blocks = list(range(0, 2 * count, 2))  # every other block: nothing is contiguous
    plane_stride = 2 * count * block_bytes
    region = rig.region("kv", planes * plane_stride)
    packed = rig.region("packed", nbytes)
    region.map(range(region.slots))
    packed.map(range(packed.slots))
    size = count * planes * block_bytes
    source = rig.host.address(0, size)
    for start in range(0, planes * plane_stride, size):
        rig.vmm.copy(region.address + start, source, min(size, planes * plane_stride - start))
    place = rig.host.address(rig.host_bytes - size, size)
    before = rig.fingerprint(region.address, planes * plane_stride)

    def rows(out: bool) -> Iterator[Copy]:
        for plane in range(planes):
            there = region.address + plane * plane_stride
            here = place + plane * count * block_bytes
            if out:
                yield Copy(here, there, block_bytes, count, block_bytes, 2 * block_bytes)
            else:
                yield Copy(there, here, block_bytes, count, 2 * block_bytes, block_bytes)

    sizes = {
        "planes": planes,
        "block_bytes": block_bytes,
        "plane_stride": plane_stride,
        "block_stride": block_bytes,
        "packed_stride": planes * block_bytes,
    }

    def out_rows() -> None:
        rig.run(TransferKind.KV_OUT, rows(out=True), size).wait()

    def in_rows() -> None:
        rig.run(TransferKind.KV_IN, rows(out=False), size).wait()

    def out_packed() -> None:
        compute = rig.vmm.compute_stream
        order = list(range(count))
        rig.kernels.gather_blocks(
            packed.address, region.address, blocks, order, stream=compute, **sizes
        )
        rig.run(TransferKind.KV_OUT, [Copy(place, packed.address, size)], size).wait()

    def in_packed() -> None:
        compute = rig.vmm.compute_stream
        order = list(range(count))
        there = rig.run(TransferKind.KV_IN, [Copy(packed.address, place, size)], size)
        rig.vmm.compute_waits(there)
        rig.kernels.scatter_blocks(
            region.address, packed.address, blocks, order, stream=compute, **sizes
        )
        rig.compute.wait()

    told: dict[str, Any] = {"shape": name, "bytes": size, "planes": planes, "block": block_bytes}
    ways = {"rows": (out_rows, in_rows), "packed": (out_packed, in_packed)}
    for way, (out, back) in ways.items():
        if rig.smoke and way == "packed":
            continue  # neither the stand-in nor the pretend driver runs kernels
        outs, backs = [], []
        for _ in range(rig.rounds):
            outs.append(seconds(out))
            for plane in range(planes):  # what comes back has to have been away
                there = region.address + plane * plane_stride
                rig.vmm.copy(there, there + block_bytes, block_bytes)
            if rig.fingerprint(region.address, planes * plane_stride) == before:
                raise RuntimeError(f"KV of {name}: nothing was overwritten")
            backs.append(seconds(back))
            if rig.fingerprint(region.address, planes * plane_stride) != before:
                raise RuntimeError(f"KV of {name}: what came back is not what went out")
        told[f"{way}_out_bytes_per_second"] = size / statistics.median(outs)
        told[f"{way}_in_bytes_per_second"] = size / statistics.median(backs)
    region.release()
    packed.release()
    return told | {"fingerprints_equal": True}


def overlap(rig: Rig, model: Model) -> dict[str, Any]:
    """One model computes while the other is prefetched: both alone, and both at once."""
    old, new = rig.region("old", model.nbytes), rig.region("new", model.nbytes)
    rig.run(TransferKind.WEIGHTS, image(rig, old, model, mapping=True), model.nbytes).wait()
    new.map(range(new.slots))

    def compute() -> None:
        for layer in range(model.layers):
            rig.compute.layer(model, old, layer)
        rig.compute.wait()

    def fetch() -> Transfer:
        return rig.run(TransferKind.WEIGHTS, image(rig, new, model), model.nbytes)

    compute()
    alone = statistics.median(seconds(compute) for _ in range(rig.rounds))
    copies = statistics.median(seconds(lambda: fetch().wait()) for _ in range(rig.rounds))
    both, slowed, shared = [], [], []
    for _ in range(rig.rounds):
        began = time.monotonic()
        transfer = fetch()
        computed = 0
        while not transfer.done or not computed:
            started = time.monotonic()
            compute()
            computed += 1
            slowed.append(time.monotonic() - started)
        ended = time.monotonic()
        both.append((ended - began) / (computed * alone + copies))
        trace = transfer.trace()
        shared.append((trace.ended - trace.began) / copies)
    old.release()
    new.release()
    return {
        "model": model.name,
        "compute_alone_seconds": alone,
        "copy_alone_seconds": copies,
        "compute_beside_copy_over_alone": statistics.median(slowed) / alone,
        "copy_beside_compute_over_alone": statistics.median(shared),
        "both_over_one_after_the_other": statistics.median(both),
    }


if __name__ == "__main__":
    main()
