"""What drafts by n-grams bring: tokens a second with them over those without.

    python -m benchmarks.drafts [--pairs 5] [--tokens 256] [--dtype float32] [--json F]

Two engines of one checkpoint in one process take turns on the same processor: one drafts. A request
is alone, as decoding is then bound by reading the weights. Greedy output of random weights goes in
circles: it repeats itself. A request that draws has no drafts, and shows what the rest costs. The
output has to be the same with and without. Nothing else should run on the machine.
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

HIDDEN: Final = 2048
LAYERS: Final = 4
VOCABULARY: Final = 8192
INITIALIZER_RANGE: Final = 0.01
"""Small enough for circles."""
SLAB_BYTES: Final = 2 << 20
CONTEXT: Final = 1024
PROMPT: Final = tuple(range(10, 60)) * 2
REPETITIVE: Final = {"temperature": 0.0, "ignore_eos": True}
DRAWN: Final = {"temperature": 1.0, "seed": 1, "ignore_eos": True}


def main() -> int:
    options = _options()
    prepare_environment("auto")
    with tempfile.TemporaryDirectory(prefix="appliance-drafts-") as directory:
        _make(Path(directory), options.dtype)
        engines = _engines(directory, options)
        runs: dict[str, list[tuple[float, float]]] = {"repetitive": [], "drawn": []}
        for pair in range(options.pairs + 1):  # the first warms up
            for kind, sampling in (("repetitive", REPETITIVE), ("drawn", DRAWN)):
                without, plain = _run(engines[0], sampling | {"max_tokens": options.tokens})
                drafted, found = _run(engines[1], sampling | {"max_tokens": options.tokens})
                assert plain == found, "drafts changed the output"
                runs[kind] += [(without, drafted)] * bool(pair)
                print(f"{kind}: without {without:.1f}, with {drafted:.1f} tokens/s", flush=True)
    _write(options, runs, engines[1])
    return 0


def _write(
    options: argparse.Namespace, runs: dict[str, list[tuple[float, float]]], engine: VllmEngine
) -> None:
    from benchmarks.provenance import made_on_cpu, write

    use = engine.draft_use()
    result = {
        "benchmark": "drafts",
        **made_on_cpu(),
        "model": f"Llama, {LAYERS} layers, hidden {HIDDEN}, random, {options.dtype}",
        "tokens": options.tokens,
        "draft_tokens": options.draft,
        "drafted": use.drafted,
        "accepted": use.accepted,
        "ratio": {
            kind: statistics.median(drafted / without for without, drafted in pairs)
            for kind, pairs in runs.items()
        },
        "tokens_per_second": runs,
    }
    write(result, options.json)
    print(json.dumps(result["ratio"]), f"{use.accepted} of {use.drafted} drafted were right")


def _make(path: Path, dtype: str) -> None:
    import torch
    import transformers

    kind: Any = transformers.LlamaConfig
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=INITIALIZER_RANGE,
        torch_dtype=dtype,
    )
    torch.manual_seed(1)
    make: Any = transformers.LlamaForCausalLM
    model = make(config)
    model.to(getattr(torch, dtype)).save_pretrained(path)


def _engines(path: str, options: argparse.Namespace) -> list[VllmEngine]:
    """Without drafts, and with them."""
    from appliance.checkpoints.drafts import Speculation
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.memory.arena import Arena
    from appliance.memory.host_tier import HostTier
    from appliance.memory.swapper import Swapper
    from appliance.memory.vmm_host import HostVmm

    arena = Arena(HostVmm((4 << 30) // SLAB_BYTES, SLAB_BYTES))
    swapper = Swapper(arena.vmm.stream)
    host = HostTier.create(SLAB_BYTES)
    engines: list[VllmEngine] = []
    for speculation in (None, Speculation(options.draft, 2, 5)):
        engine = VllmEngine.build(
            f"model-{len(engines)}",
            path,
            dtype=options.dtype,
            max_context=CONTEXT,
            max_batch=4,
            arena=arena,
            host=host,
            swapper=swapper,
            speculation=speculation,
        )
        engine.store_weights((), fill=True)
        engine.begin_load().wait()
        engines.append(engine)
    return engines


def _run(engine: VllmEngine, sampling: dict[str, Any]) -> tuple[float, list[int]]:
    """Tokens a second behind the first, and all of them."""
    from vllm import SamplingParams

    from appliance.engines.protocol import SequenceSpec
    from appliance.engines.vllm.messages import encode_params

    body = encode_params(SamplingParams(detokenize=False, **sampling))
    engine.add(SequenceSpec(request="r", model=engine.model, prompt=PROMPT, body=body))
    slabs = (1 << 30) // SLAB_BYTES
    produced = engine.prefill("r", slabs)
    requests = ["r"]
    began = time.perf_counter()
    while produced[-1].finished is None:
        produced += engine.step(requests, slabs)
    seconds = time.perf_counter() - began
    engine.trim(0)
    return (len(produced) - 1) / seconds, [one.token for one in produced]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draft", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
