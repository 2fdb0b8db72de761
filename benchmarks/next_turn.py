"""What snapshots of states bring: seconds to the first token of a chat's second turn without a
prefix cache over those with it.

    python -m benchmarks.next_turn [--model granite|lfm2] [--pairs 5] [--prompt 1500] [--json F]

An engine of a model with states computes the prompt of a second turn: the first prompt, its answer
and a new question. Before, all that is cached was given up (without), or the first turn was served
(with). The answers have to be the same. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from appliance.engines.vllm import prepare_environment

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

SLAB_BYTES: Final = 2 << 20
SLABS: Final = (3 << 30) // SLAB_BYTES
CONTEXT: Final = 4096
VOCABULARY: Final = 8192
ANSWER: Final = 64
QUESTION: Final = 100
HIDDEN: Final = 1024
KINDS: Final[dict[str, dict[str, Any]]] = {
    "granite": {
        "model_type": "granitemoehybrid",
        "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 5, "attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2 * HIDDEN,
        "shared_intermediate_size": 2 * HIDDEN,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
    },
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "conv", "full_attention"] * 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 4 * HIDDEN,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 4 * HIDDEN,
        **dict.fromkeys(("block_dim", "conv_dim"), HIDDEN),
        "conv_L_cache": 3,
    },
}
"""Shaped as Granite 4 H and LFM2 are, with fewer layers."""


def main() -> int:
    options = _options()
    prepare_environment("auto")
    with tempfile.TemporaryDirectory(prefix="appliance-next-turn-") as directory:
        _make(directory, options)
        engine = _engine(directory, options.dtype)
        prompt = tuple(3 + i * 7 % (VOCABULARY - 3) for i in range(options.prompt))
        pairs: list[tuple[float, float]] = []
        for pair in range(options.pairs + 1):  # the first warms up
            engine.trim(0)
            _, answer = _run(engine, prompt, ANSWER)
            asked = (*prompt, *answer, *prompt[:QUESTION])
            cached, found = _run(engine, asked, 8)
            engine.trim(0)
            without, plain = _run(engine, asked, 8)
            assert plain == found, "a hit changed the output"
            pairs += [(without, cached)] * bool(pair)
            print(f"without {without:.3f} s, with {cached:.3f} s", flush=True)
    _write(options, pairs, len(asked), engine)
    return 0


def _write(
    options: argparse.Namespace, pairs: list[tuple[float, float]], asked: int, engine: VllmEngine
) -> None:
    from benchmarks.provenance import made_on_cpu, write

    layers = len(KINDS[options.model]["layer_types"])
    result = {
        "benchmark": "next_turn",
        **made_on_cpu(),
        "model": f"{options.model}, {layers} layers, hidden {HIDDEN}, random, {options.dtype}",
        "prompt_tokens": asked,
        "snapshot_bytes": engine.kv.snapshot_blocks * engine.kv.block_bytes,
        "ratio": statistics.median(without / cached for without, cached in pairs),
        "ttft_seconds": pairs,
    }
    write(result, options.json)
    print(json.dumps({key: result[key] for key in ("prompt_tokens", "snapshot_bytes", "ratio")}))


def _make(path: str, options: argparse.Namespace) -> None:
    import torch
    import transformers

    described = dict(KINDS[options.model])
    auto: Any = transformers.AutoConfig
    config = auto.for_model(
        described.pop("model_type"),
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=len(described["layer_types"]),
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        torch_dtype=options.dtype,
        **described,
    )
    torch.manual_seed(1)
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_config(config).to(getattr(torch, options.dtype)).save_pretrained(path)


def _engine(path: str, dtype: str) -> VllmEngine:
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper
    from appliance.memory.vmm_host import HostVmm

    arena = Arena(HostVmm(SLABS, SLAB_BYTES))
    engine = VllmEngine.build(
        "model",
        path,
        dtype=dtype,
        max_context=CONTEXT,
        max_batch=4,
        arena=arena,
        host=HostTier.create(SLAB_BYTES),
        swapper=Swapper(arena.vmm.stream),
    )
    engine.store_weights((), fill=True)
    engine.begin_load().wait()
    return engine


def _run(engine: VllmEngine, prompt: tuple[int, ...], tokens: int) -> tuple[float, list[int]]:
    """Seconds to the first token, and all of them."""
    from vllm import SamplingParams

    from appliance.engines.protocol import SequenceSpec
    from appliance.engines.vllm.messages import encode_params

    sampling = SamplingParams(detokenize=False, temperature=0.0, max_tokens=tokens, ignore_eos=True)
    body = encode_params(sampling)
    engine.add(SequenceSpec(request="r", model=engine.model, prompt=prompt, body=body))
    began = time.perf_counter()
    produced = engine.prefill("r", SLABS)
    seconds = time.perf_counter() - began
    requests = ["r"]
    while produced[-1].finished is None:
        produced += engine.step(requests, SLABS)
    return seconds, [one.token for one in produced]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(KINDS), default="granite")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the first prompt")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
