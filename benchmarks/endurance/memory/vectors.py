"""Vectors that plain vLLM makes of prompts: those that an encoder's have to equal.

``python -m benchmarks.endurance.memory.vectors`` reads a `VectorTask` as JSON from standard input,
and prints a vector for each prompt. It is a process of its own because the adapter changes
process-wide settings of vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from math import isclose
from pathlib import Path

import msgspec

from appliance.engines.vllm.environment import prepare_environment


class VectorTask(msgspec.Struct):
    """A checkpoint, and prompts of up to `max_context` tokens."""

    path: str
    max_context: int
    prompts: list[tuple[int, ...]]


def vectors_of(
    path: Path, max_context: int, prompts: Sequence[tuple[int, ...]]
) -> list[list[float]]:
    """One for each prompt. Raises `SystemExit` if plain vLLM fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.endurance.memory.vectors"],
        input=msgspec.json.encode(VectorTask(str(path), max_context, list(prompts))),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"plain vLLM failed:\n{done.stderr.decode(errors='replace')[-4000:]}")
    return msgspec.json.decode(done.stdout, type=list[list[float]])


def equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """But for the last bits, which other company in a step may change."""
    return len(one) == len(other) and all(
        isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in zip(one, other, strict=True)
    )


def main() -> None:
    """Answer the task on standard input."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=VectorTask)
    prepare_environment("auto")
    # vLLM and its libraries write to standard output; it is kept for the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    from vllm import LLM, PoolingParams, TokensPrompt

    llm = LLM(
        task.path,
        runner="pooling",
        dtype="float32",
        max_model_len=task.max_context,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    outputs = llm.encode(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in task.prompts],
        PoolingParams(task="embed"),
        pooling_task="embed",
        use_tqdm=False,
    )
    vectors = [output.outputs.data.reshape(-1).tolist() for output in outputs]
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.json.encode(vectors))
    os._exit(0)  # vLLM's threads may outlast its engine


if __name__ == "__main__":
    main()
