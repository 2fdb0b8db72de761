"""What a switch costs with weights in 4 bits, over that in bfloat16: the bytes, and the time.

    python -m benchmarks.switch_quantized [--layers 2] [--method gptq] [--rounds 20] [--json FILE]

Makes two checkpoints of random bits with the layers of a Llama 7B (hidden 4096, intermediate 11008,
32 heads): one in bfloat16, one with its linear layers in 4 bits, groups of 128. There are fewer
layers, and as much less of a vocabulary, so embedding and head are the share of the model that they
are in 32 layers with 32000 tokens. Both engines have their images in one host tier and load them to
one pool. A switch is the eviction of a model and the load of one as large, to the last byte: here
the same one, as the time does not depend on which it is. In every round, both models switch, in
turns, the one first that was second before; a ratio is of one round, and the result is the median.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.engines.vllm.environment import prepare_environment
from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.vmm_host import HostVmm
from benchmarks.provenance import made_on_cpu, write

if TYPE_CHECKING:
    import torch

    from appliance.engines.vllm.engine import VllmEngine

SLAB: Final = 2 << 20
GROUP: Final = 128
HIDDEN, INTERMEDIATE, HEADS = 4096, 11008, 32
LAYERS, VOCABULARY = 32, 32000
"""Of the whole model."""
PLAIN: Final = "bfloat16"
METHODS: Final[dict[str, dict[str, Any]]] = {
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--method", default="gptq", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where to make the checkpoints")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (environment := mapping.environment(os.environ)) != os.environ:
        # Set when a process starts, as the daemon does for its workers.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.switch_quantized", *sys.argv[1:]],
            environment,
        )
    prepare_environment("auto")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folders = {PLAIN: Path(temporary, PLAIN), options.method: Path(temporary, options.method)}
        for method, folder in folders.items():
            make_checkpoint(folder, options.layers, method)
        result = measure(folders, options.method, options.rounds)
    result |= {"layers": options.layers, **made_on_cpu()}
    print(json.dumps(result, indent=2))
    write(result, options.json)


def make_checkpoint(folder: Path, layers: int, method: str) -> None:
    """Random bits of the right shapes: what they answer is of no matter here."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    vocabulary = max(1, VOCABULARY * layers // LAYERS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": PLAIN,
    }
    if method in METHODS:
        config["quantization_config"] = {"quant_method": method, **METHODS[method]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")  # none is read: there are no prompts
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)
        for name, shape in (
            ("model.embed_tokens.weight", (vocabulary, HIDDEN)),
            ("lm_head.weight", (vocabulary, HIDDEN)),
        )
    }
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= linear(f"{stem}.self_attn.{name}", HIDDEN, HIDDEN, method)
        for name in ("gate_proj", "up_proj"):
            tensors |= linear(f"{stem}.mlp.{name}", HIDDEN, INTERMEDIATE, method)
        tensors |= linear(f"{stem}.mlp.down_proj", INTERMEDIATE, HIDDEN, method)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def linear(name: str, rows: int, columns: int, method: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer with so many inputs and outputs."""
    import torch

    if method == PLAIN:
        weight = torch.randn((columns, rows), dtype=torch.bfloat16).mul_(0.02)
        return {f"{name}.weight": weight}
    groups = rows // GROUP
    words = (rows // 8, columns) if method == "gptq" else (rows, columns // 8)
    made = {
        f"{name}.qweight": bits(words),
        f"{name}.qzeros": bits((groups, columns // 8)),
        f"{name}.scales": torch.rand((groups, columns), dtype=torch.bfloat16).mul_(0.01),
    }
    if method == "gptq":
        made[f"{name}.g_idx"] = (torch.arange(rows) // GROUP).to(torch.int32)
    return made


def bits(shape: tuple[int, int]) -> torch.Tensor:
    """Random words of 32 bits."""
    import torch

    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def measure(folders: dict[str, Path], method: str, rounds: int) -> dict[str, Any]:
    known = {name: read_checkpoint(name, path).weight_bytes for name, path in folders.items()}
    slabs = {name: -(-nbytes * 17 // 16 // SLAB) for name, nbytes in known.items()}
    arena = Arena(HostVmm(max(slabs.values()), SLAB))
    host = HostTier.create(sum(slabs.values()) * SLAB)
    swapper = Swapper(arena.vmm.stream)
    engines, end = {}, 0
    for name, path in folders.items():
        engines[name] = build(name, path, arena, host, swapper)
        places = range(end, end + engines[name].host_slabs * SLAB, SLAB)
        end = places.stop
        engines[name].store_weights(places, fill=True)
    sizes = {name: moved(engine) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    copies: dict[str, list[float]] = {name: [] for name in engines}
    bare = arena.reserve("bare", -(-max(sizes.values()) // SLAB))
    for number in range(rounds):
        for name in sorted(engines, reverse=bool(number % 2)):
            engine = engines[name]
            load(engine)
            times[name].append(seconds(partial(change, engine)))
            engine.evict_weights()
            bare.map(range(bare.slots))
            copy = partial(ctypes.memmove, bare.address, host.address(0, sizes[name]), sizes[name])
            copies[name].append(seconds(copy))
            bare.unmap(range(bare.slots))
    bare.release()

    def over(taken: dict[str, list[float]]) -> list[float]:
        return sorted(a / b for a, b in zip(taken[method], taken[PLAIN], strict=True))

    ratios = over(times)
    return {
        "what": f"switch with {method} in 4 bits / in bfloat16, everything in the host tier",
        "method": method,
        "rounds": rounds,
        "bytes": sizes,
        "bytes_ratio": sizes[method] / sizes[PLAIN],
        "bytes_of_linear_layers_ratio": of_layers(engines[method]) / of_layers(engines[PLAIN]),
        "bytes_the_scheduler_is_told_ratio": known[method] / known[PLAIN],
        "switch_ms": {name: statistics.median(taken) * 1e3 for name, taken in times.items()},
        "gbytes_per_second": {
            name: sizes[name] / statistics.median(taken) / 1e9 for name, taken in times.items()
        },
        "time_ratio_median": statistics.median(ratios),
        "time_ratio_p10_p90": [ratios[len(ratios) // 10], ratios[len(ratios) * 9 // 10]],
        "memcpy_time_ratio_median": statistics.median(over(copies)),
    }


def build(name: str, path: Path, arena: Arena, host: HostTier, swapper: Swapper) -> VllmEngine:
    from appliance.engines.vllm.engine import VllmEngine

    return VllmEngine.build(
        name,
        str(path),
        dtype=PLAIN,
        max_context=128,
        max_batch=1,
        arena=arena,
        host=host,
        swapper=swapper,
    )


def of_layers(engine: VllmEngine) -> int:
    """Bytes of the linear layers within decoder layers."""
    tensors = engine._placed.weights.layout.tensors
    return sum(one.nbytes for one in tensors if "_proj." in one.name)


def moved(engine: VllmEngine) -> int:
    """Bytes of a load."""
    transfer = engine.begin_load()
    transfer.wait()
    engine.evict_weights()
    return transfer.nbytes


def load(engine: VllmEngine) -> None:
    engine.begin_load().wait()


def change(engine: VllmEngine) -> None:
    """Evict a model, and load one as large."""
    engine.evict_weights()
    load(engine)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
