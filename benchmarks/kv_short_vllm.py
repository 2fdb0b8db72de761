"""What plain vLLM makes of KV for six of 48 requests: tokens/s, over those with KV for all.

    python -m benchmarks.kv_short_vllm [--pairs 2] [--json F]

The model, the requests, and the bound on a batch of `benchmarks.kv_short` with one model, given to
`vllm.LLM` in a process of its own. Where KV blocks run out, vLLM gives up all blocks of its newest
request and computes it again. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.recipes import RECIPES
from appliance.memory.kv_pool import BLOCK_TOKENS
from benchmarks.kv_short import FITTING, MAX_CONTEXT, OUTPUT_TOKENS, REQUESTS, chats_for
from benchmarks.provenance import made_on_cpu

MAX_BATCH = 32
"""`max_batch` of a model, unless a configuration says otherwise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("CHECKPOINT", "FITTING"))
    options = parser.parse_args()
    if options.measure is not None:
        checkpoint, fitting = options.measure
        print(_tokens_per_second(Path(checkpoint), int(fitting)))
        return 0
    model = RECIPES[0].name
    runs: dict[str, list[float]] = {"all": [], "short": []}
    with tempfile.TemporaryDirectory(prefix="appliance-kv-short-") as directory:
        make_checkpoints(Path(directory), [model])
        for _ in range(options.pairs):
            for name, fitting in (("all", REQUESTS), ("short", FITTING)):
                runs[name].append(_measured(Path(directory) / model, fitting))
                print(name, runs[name][-1], flush=True)
    ratio = statistics.median(runs["short"]) / statistics.median(runs["all"])
    result = {"benchmark": "kv_short_vllm", **made_on_cpu(), "ratio": ratio, "runs": runs}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def _measured(checkpoint: Path, fitting: int) -> float:
    """In a process of its own, as memory of one engine stays with its process."""
    command = [sys.executable, "-m", "benchmarks.kv_short_vllm", "--measure"]
    done = subprocess.run(
        [*command, str(checkpoint), str(fitting)],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    return float(done.stdout.split()[-1])


def _tokens_per_second(checkpoint: Path, fitting: int) -> float:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        dtype="float32",
        max_model_len=MAX_CONTEXT,
        max_num_seqs=MAX_BATCH,
        block_size=BLOCK_TOKENS,
        # One block more than fits: vLLM keeps one that it never fills.
        num_gpu_blocks_override=fitting * -(-MAX_CONTEXT // BLOCK_TOKENS) + 1,
        enforce_eager=True,
    )
    chats = [[{"role": "user", "content": chat.prompt}] for chat in chats_for([RECIPES[0].name])]
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.chat(chats[:1], SamplingParams(max_tokens=8), use_tqdm=False)
    began = time.monotonic()
    answers = llm.chat(chats, sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds


if __name__ == "__main__":
    sys.exit(main())
