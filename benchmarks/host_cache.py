"""How fast all models come from the files into the host tier, beside what `dd` makes of the files.

    python benchmarks/host_cache.py [--models 3] [--mebibytes 320] [--rounds 5] [--json FILE]

Makes checkpoints of random weights, in float32 and in bfloat16, reads them once so that they are in
the page cache, and builds an engine for each. Building reads headers only and is timed apart; so is
having the host tier's memory in place, which a daemon does in the background when it starts. Then,
in every round: `dd if=FILE of=/dev/null bs=4M` over the files of a type, which is the ceiling, and
the filling of all master images of these files, from the first to all whole: with weights as they
are stored (plain), with linear weights packed, as a CPU computes with them (packed), and with such
weights read from the images on disk that an earlier fill left (kept). What leaving them takes is
told apart: the first fill, which packs and sums, and writing, which goes on beside serving at the
lowest priority. A type that the CPU does not pack has no images. Times are medians; the ratio is
that of the bandwidths, in bytes of the checkpoints. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.recipes import Recipe
from appliance.engines.vllm import prepare_environment
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.vmm_host import HostVmm
from appliance.memory.weight_cache.image_file import prepare_folder
from appliance.memory.weight_cache.image_writer import ImageWriter
from appliance.memory.weight_cache.images import ImageFolder

if TYPE_CHECKING:
    import torch

    from appliance.engines.vllm.engine import VllmEngine

SLAB = 2 << 20
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--mebibytes", type=int, default=320, help="of one float32 checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the checkpoints; kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare_environment("auto")
    with tempfile.TemporaryDirectory() as temporary:
        paths = checkpoints(options.folder or Path(temporary), options.models, options.mebibytes)
        result = measure(paths, options.rounds, Path(temporary, "images"))
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def checkpoints(folder: Path, models: int, mebibytes: int) -> dict[str, list[Path]]:
    """Models of about so many MiB in float32, and the same in bfloat16."""
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2816
    layers = max(1, round(mebibytes * 2**20 / 4 / layer))
    recipes = [
        Recipe(
            name=f"float32-{seed}",
            family="llama",
            layers=layers,
            hidden=1024,
            intermediate=2816,
            heads=16,
            kv_heads=16,
            head_dim=64,
            seed=seed,
        )
        for seed in range(models)
    ]
    full = make_checkpoints(folder, recipes=recipes)
    return {"float32": full, "bfloat16": [halve(path) for path in full]}


def halve(path: Path) -> Path:
    """The same checkpoint in bfloat16, beside it."""
    import torch
    from safetensors.torch import load_file, save_file

    half = path.with_name(path.name.replace("float32", "bfloat16"))
    half.mkdir(exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tensors = load_file(path / "model.safetensors")
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, half / "model.safetensors")
    return half


def measure(paths: dict[str, list[Path]], rounds: int, folder: Path) -> dict[str, object]:
    import torch

    from appliance.engines.vllm.weights import packed

    sizes = {dtype: sum(file.stat().st_size for file in files(paths[dtype])) for dtype in DTYPES}
    # Packed, there is a little more.
    room = -(-max(sizes.values()) * 5 // 4 // SLAB) * SLAB
    host = HostTier.create(room)
    arena = Arena(HostVmm(1, SLAB))
    in_place = seconds(host.lock)
    writer = ImageWriter(host)
    prepare_folder(folder, ())
    images = ImageFolder(folder, 0, writer)
    built: dict[str, float] = {}
    engines: dict[tuple[str, str], list[VllmEngine]] = {}
    forms: dict[str, tuple[Callable[[torch.dtype], bool], ImageFolder | None]] = {
        "plain": (lambda dtype: False, None),
        "packed": (packed.supports, None),
        "kept": (packed.supports, images),
    }
    for dtype in DTYPES:
        for form, (packs, kept_in) in forms.items():
            if form == "kept" and not packed.supports(getattr(torch, dtype)):
                continue
            with patch.object(packed, "supports", packs):
                start = time.perf_counter()
                engines[dtype, form] = [
                    build(path, dtype, arena, host, kept_in) for path in paths[dtype]
                ]
                built[f"{dtype} {form}"] = time.perf_counter() - start
    results = []
    first: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        dd(files(paths[dtype]))
        fills: dict[str, list[float]] = {form: [] for form in forms if (dtype, form) in engines}
        if "kept" in fills:
            first[dtype] = {
                "fill_and_sum_seconds": seconds(lambda d=dtype: fill(engines[d, "kept"], room)),
                "writing_beside_seconds": seconds(writer.join),
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            }
        ceilings = []
        for _ in range(rounds):
            ceilings.append(dd(files(paths[dtype])))
            for form, taken in fills.items():
                taken.append(seconds(lambda key=(dtype, form): fill(engines[key], room)))
        if "kept" in fills:
            assert not any(engine._placed.kept.packed for engine in engines[dtype, "kept"])
        for form, taken in fills.items():
            ratios = [ceiling / ours for ceiling, ours in zip(ceilings, taken, strict=True)]
            results.append(
                {
                    "dtype": dtype,
                    "form": form,
                    "bytes": sizes[dtype],
                    "dd_gbytes_per_second": sizes[dtype] / statistics.median(ceilings) / 1e9,
                    "fill_gbytes_per_second": sizes[dtype] / statistics.median(taken) / 1e9,
                    "ratio_median": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                }
            )
    return {
        "what": "read bandwidth of dd and of filling all master images, warm page cache",
        "models": len(paths["float32"]),
        "rounds": rounds,
        "cpus": len(os.sched_getaffinity(os.getpid())),
        "host_tier": {"bytes": room, "in_place_before_seconds": in_place, "locked": host.locked},
        "built_before_seconds": built,
        "first_start_with_images": first,
        "results": results,
    }


def files(paths: list[Path]) -> list[Path]:
    return [file for path in paths for file in sorted(path.glob("*.safetensors"))]


def build(
    path: Path, dtype: str, arena: Arena, host: HostTier, images: ImageFolder | None
) -> VllmEngine:
    from appliance.engines.vllm.engine import VllmEngine

    return VllmEngine.build(
        path.name,
        str(path),
        dtype=dtype,
        max_context=128,
        max_batch=1,
        arena=arena,
        host=host,
        swapper=Swapper(arena.vmm.stream),
        images=images,
    )


def fill(engines: list[VllmEngine], room: int) -> None:
    """All master images, one behind the other."""
    end = 0
    for engine in engines:
        places = range(end, end + engine.host_slabs * SLAB, SLAB)
        end = places.stop
        assert end <= room, "the host tier is too small"
        engine.store_weights(places, fill=True)


def dd(paths: list[Path]) -> float:
    """Seconds that `dd` says it took to read the files, one after the other."""
    total = 0.0
    for path in paths:
        told = subprocess.run(
            ["dd", f"if={path}", "of=/dev/null", "bs=4M"],
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        total += float(told.splitlines()[-1].split(" copied, ")[1].split(" s,")[0])
    assert math.isfinite(total), "dd did not say how long it took"
    return total


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
