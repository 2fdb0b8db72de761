"""What a GPU's driver does where its documentation is silent, and what that costs.

    python benchmarks/gpu_probes.py --json benchmarks/results/<date>-<gpu>-probes.json

Every probe is a process of its own, as some may break the context they run in: its answer is what
it found, or how it failed. Needs torch and cuda-bindings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.memory.cuda.driver import CudaContext, CudaError, call, driver, relaxed_capture
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.host_tier import HostTier
from appliance.worker.engines import SWITCH_SECONDS
from benchmarks.provenance import PRETENDS, made, write

MIB: Final = 1 << 20
SLAB: Final = 2 * MIB
ROUNDS: Final = 7
PROBE_SECONDS: Final = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("probes", nargs="*", metavar="PROBE", help="default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(PROBES[options.one]()), flush=True)
        return
    result: dict[str, Any] = {"what": "what the driver does", **made(), "probes": {}}
    for name in options.probes or PROBES:
        result["probes"][name] = found = probe(name)
        print(f"{name}: {json.dumps(found)}", flush=True)
        write(result, options.json)
    # Of a GPU it is an answer how a probe failed. Of a rehearsal it is not.
    sys.exit(PRETENDS and any("failed" in found for found in result["probes"].values()))


def probe(name: str) -> Any:
    """What a probe finds, in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"ran longer than {PROBE_SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def outcome(work: Callable[[], object]) -> str:
    """``ok``, or the name of the error."""
    try:
        work()
    except CudaError as error:
        return error.name
    return "ok"


def mapped_twice() -> dict[str, str]:
    """Are an address that has a slab, and one that has none, refused?"""
    vmm = CudaVmm(0, 4, SLAB)
    base = vmm.reserve(4 * SLAB)
    vmm.map(base, 0)
    return {
        "map again": outcome(lambda: vmm.map(base, 1)),
        "unmap one without": outcome(lambda: call("cuMemUnmap", base + SLAB, SLAB)),
        "unmap one with and one without": outcome(lambda: call("cuMemUnmap", base, 2 * SLAB)),
        "unmap again": outcome(lambda: call("cuMemUnmap", base, SLAB)),
    }


def mapping_costs() -> dict[str, Any]:
    """Seconds for 512 slabs (1 GiB): mapping, access by slab or by run, unmapping likewise."""
    count = 512
    vmm = CudaVmm(0, count, SLAB)
    base = vmm.reserve(count * SLAB)
    places = range(base, base + count * SLAB, SLAB)

    def map_all() -> None:
        for place, handle in zip(places, vmm._handles, strict=True):
            call("cuMemMap", place, SLAB, 0, handle, 0)

    def access(run: int) -> None:
        for start in range(0, count, run):
            call("cuMemSetAccess", base + start * SLAB, run * SLAB, [vmm._access], 1)

    def unmap(run: int) -> None:
        for start in range(0, count, run):
            call("cuMemUnmap", base + start * SLAB, run * SLAB)

    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for run in (1, 32, 512):
            found.setdefault("map", []).append(timed(map_all))
            found.setdefault(f"access in runs of {run}", []).append(timed(lambda n=run: access(n)))
            found.setdefault(f"unmap in runs of {run}", []).append(timed(lambda n=run: unmap(n)))
    return {name: statistics.median(values) for name, values in found.items()}


def larger_slabs() -> dict[str, float]:
    """Seconds to map and to unmap 1 GiB in slabs of other sizes."""
    found = {}
    for mib in (2, 4, 8, 16, 32, 64):
        count = 1024 // mib
        vmm = CudaVmm(0, count, mib * MIB)
        base = vmm.reserve(1024 * MIB)
        maps, unmaps = [], []
        for _ in range(ROUNDS):
            maps.append(timed(lambda v=vmm, b=base, n=count: v.map(b, 0, n)))
            unmaps.append(timed(lambda v=vmm, b=base, n=count: v.unmap(b, n)))
        found[f"map in slabs of {mib} MiB"] = statistics.median(maps)
        found[f"unmap in slabs of {mib} MiB"] = statistics.median(unmaps)
        vmm.release(base, 1024 * MIB)
        vmm.close()
    return found


def mapping_during_copies() -> dict[str, float]:
    """Bytes per second of a copy of 4 GiB from page-locked memory: by itself, and while another
    thread maps and unmaps; and seconds of a mapping of 64 MiB: by itself, and during the copy."""
    vmm = CudaVmm(0, 2048 + 64, SLAB)
    host = HostTier.create(1024 * MIB)
    vmm.register(host.address(0, 1), host.nbytes).wait()
    base = vmm.reserve(2048 * SLAB)
    vmm.map(base, 0, 2048)
    other = vmm.reserve(64 * SLAB)
    stream = call("cuStreamCreate", 1)

    size = 256 * MIB  # a copy must not cross from one page-locked chunk to another

    def copy() -> float:
        began = time.perf_counter()
        for part in range(16):
            source = host.address(part % 4 * size, size)
            call("cuMemcpyAsync", base + part * size, source, size, stream)
        call("cuStreamSynchronize", stream)
        return 16 * size / (time.perf_counter() - began)

    def remap() -> float:
        took = timed(lambda: vmm.map(other, 2048, 32))
        vmm.unmap(other, 32)
        return took

    copy()
    alone, quiet = copy(), statistics.median(remap() for _ in range(20))
    stop = threading.Event()
    during: list[float] = []

    def go_on() -> None:
        vmm.context.use()
        while not stop.is_set():
            during.append(remap())

    mapper = threading.Thread(target=go_on)
    mapper.start()
    beside = copy()
    stop.set()
    mapper.join()
    return {
        "copy alone": alone,
        "copy during mapping": beside,
        "map 64 MiB": quiet,
        "map 64 MiB during a copy": statistics.median(during),
    }


def page_locking() -> dict[str, float]:
    """Bytes per second of page-locking 2 GiB by size of chunk: memory that was never touched, and
    memory that was written before."""
    found = {}
    context = CudaContext(0)
    context.use()
    for touched in (False, True):
        for mib in (32, 64, 256, 1024):
            host = HostTier.create(2048 * MIB)
            if touched:
                view = host.view(0, host.nbytes)
                view[:] = bytes(host.nbytes)
            size = mib * MIB
            address = host.address(0, 1)
            places = range(address, address + host.nbytes, size)
            took = timed(lambda p=places, n=size: [call("cuMemHostRegister", a, n, 1) for a in p])
            for place in places:
                call("cuMemHostUnregister", place)
            state = "written" if touched else "untouched"
            found[f"{state}, chunks of {mib} MiB"] = host.nbytes / took
    return found


def during_capture() -> dict[str, Any]:
    """What calls of another thread do to a capture in global mode: by default, and relaxed."""
    import torch

    context = CudaContext(0)
    found: dict[str, Any] = {}
    host = HostTier.create(64 * MIB)
    x = torch.ones(1 << 20, device="cuda")
    vmm = CudaVmm(0, 4, SLAB)
    base = vmm.reserve(4 * SLAB)
    event = call("cuEventCreate", driver().CUevent_flags.CU_EVENT_BLOCKING_SYNC)
    call("cuEventRecord", event, 0)

    def register() -> None:
        call("cuMemHostRegister", host.address(0, 1), host.nbytes, 1)
        call("cuMemHostUnregister", host.address(0, 1))

    def remap() -> None:
        vmm.map(base, 0, 2)
        vmm.unmap(base, 2)

    calls: dict[str, Callable[[], object]] = {
        "cuMemHostRegister": register,
        "cuEventSynchronize": lambda: call("cuEventSynchronize", event),
        "cuMemMap, cuMemSetAccess, cuMemUnmap": remap,
        "cuMemcpyAsync": lambda: call(
            "cuMemcpyAsync", x.data_ptr(), host.address(0, 1), 4096, other.cuda_stream
        ),
        "cuCtxSynchronize": lambda: call("cuCtxSynchronize"),
    }
    other = torch.cuda.Stream()
    for name, work in calls.items():
        for mode in ("default", "relaxed"):
            said: list[str] = []

            def there(
                work: Callable[[], object] = work, mode: str = mode, said: list[str] = said
            ) -> None:
                context.use()
                with relaxed_capture() if mode == "relaxed" else nullcontext():
                    said.append(outcome(work))

            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph):
                    x.add_(1)
                    thread = threading.Thread(target=there)
                    thread.start()
                    thread.join()
                    x.add_(1)
                captured = "ok"
            except Exception as error:
                captured = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            found[f"{name}, {mode}"] = {"call": said[0], "capture": captured}
    return found


def unmap_under_work() -> dict[str, Any]:
    """Does unmapping memory that a kernel still reads wait for the kernel, or break it?"""
    import torch

    from appliance.kernels.arrays import device_bytes

    vmm = CudaVmm(0, 4, SLAB)
    base = vmm.reserve(4 * SLAB)
    vmm.map(base, 0, 4)
    tensor = device_bytes(base, 4 * SLAB).view(torch.float32)
    tensor.fill_(1.0)
    sink = torch.zeros_like(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # some 0.2 s
    for _ in range(50):
        sink += tensor
    queued = timed(lambda: None)
    took = timed(lambda: vmm.unmap(base, 4))
    try:
        torch.cuda.synchronize()
        after = "ok"
    except Exception as error:
        after = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {"queued": queued, "unmap_seconds": took, "the kernels": after}


def computing_during_mapping() -> dict[str, float]:
    """Seconds of a loop of small kernels with a wait each: by itself, and while another thread maps
    and unmaps 64 MiB, or page-locks 64 MiB and lets go, in a loop."""
    import torch

    sys.setswitchinterval(SWITCH_SECONDS)  # as a worker does
    vmm = CudaVmm(0, 32, SLAB)
    base = vmm.reserve(32 * SLAB)
    host = HostTier.create(64 * MIB)
    x = torch.ones(1 << 16, device="cuda")

    def loop() -> float:
        began = time.perf_counter()
        for _ in range(100):
            for _ in range(10):
                x.mul_(1.0001)
            torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - began) / 100

    def remap() -> None:
        vmm.map(base, 0, 32)
        vmm.unmap(base, 32)

    def relock() -> None:
        call("cuMemHostRegister", host.address(0, 1), host.nbytes, 1)
        call("cuMemHostUnregister", host.address(0, 1))

    loop()
    found = {"by itself": loop()}
    for name, work in (("while mapping", remap), ("while page-locking", relock)):
        stop = threading.Event()

        def go_on(work: Callable[[], None] = work, stop: threading.Event = stop) -> None:
            vmm.context.use()
            while not stop.is_set():
                work()

        thread = threading.Thread(target=go_on)
        thread.start()
        found[name] = loop()
        stop.set()
        thread.join()
    return found


def noise_offsets() -> dict[str, Any]:
    """By how much a row of exponential noise moves a generator, by the size of the vocabulary; and
    whether a generator set there goes on as the one that drew."""
    import torch

    found: dict[str, Any] = {}
    for vocabulary in (2048, 32000, 128256, 152064, 262144):
        row = torch.empty(vocabulary, device="cuda")
        drawn = torch.Generator(device="cuda").manual_seed(7)
        offsets = []
        for _ in range(4):
            row.exponential_(generator=drawn)
            offsets.append(drawn.get_offset())
        expected = row.clone()
        placed = torch.Generator(device="cuda").manual_seed(7)
        placed.set_offset(3 * offsets[0])
        row.exponential_(generator=placed)
        found[str(vocabulary)] = {"offsets": offsets, "same": bool(torch.equal(row, expected))}
    return found


PROBES: Final[dict[str, Callable[[], Any]]] = {
    "mapped_twice": mapped_twice,
    "mapping_costs": mapping_costs,
    "larger_slabs": larger_slabs,
    "mapping_during_copies": mapping_during_copies,
    "page_locking": page_locking,
    "during_capture": during_capture,
    "unmap_under_work": unmap_under_work,
    "computing_during_mapping": computing_during_mapping,
    "noise_offsets": noise_offsets,
}


if __name__ == "__main__":
    main()
