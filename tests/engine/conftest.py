"""Fixtures of the engine tests; one set of vLLM engines serves the whole session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from appliance.engines.protocol import Sampling
from appliance.engines.vllm import prepare_environment
from tests.engine.house import MODELS, Baseline, House, make_checkpoint, make_house

prepare_environment("auto")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file begins first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.path.stem != "test_ranks")


COMPARED = (
    "max_tokens",
    "temperature",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "top_k",
    "top_p",
    "min_tokens",
)
BASELINE = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own
from vllm import LLM, SamplingParams
engines = {}
for line in sys.stdin:
    job = json.loads(line)
    if job["path"] not in engines:
        engines[job["path"]] = LLM(
            job["path"], skip_tokenizer_init=True, dtype=job["dtype"], enforce_eager=True,
            max_model_len=1024, kv_cache_memory_bytes=64 << 20, block_size=32,
            enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
    sampling = [SamplingParams(detokenize=False, **s) for s in job["sampling"]]
    outputs = engines[job["path"]].generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([list(o.outputs[0].token_ids) for o in outputs]), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by model name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder, name) for name in MODELS}


@pytest.fixture(scope="session")
def plain_vllm(checkpoints: dict[str, str]) -> Iterator[Baseline]:
    """Outputs of unchanged vLLM, in a process of its own that stays for the session."""
    with subprocess.Popen(
        [sys.executable, "-c", BASELINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def run(
            model: str, prompts: list[tuple[int, ...]], sampling: list[Sampling]
        ) -> list[list[int]]:
            job = {
                "path": checkpoints[model],
                "dtype": MODELS[model][1],
                "prompts": prompts,
                "sampling": [{name: getattr(s, name) for name in COMPARED} for s in sampling],
            }
            print(json.dumps(job), file=questions, flush=True)
            outputs: list[list[int]] = json.loads(answers.readline())
            return outputs

        yield run
        questions.close()


@pytest.fixture(scope="session")
def _house(checkpoints: dict[str, str]) -> House:
    house = make_house()
    for name, path in checkpoints.items():
        house.build(name, path)
    return house


@pytest.fixture(scope="session")
def _twin(_house: House, checkpoints: dict[str, str]) -> House:
    """A second instance: an arena of its own, the same host tier, the same master images."""
    house = make_house()
    house.host = _house.host
    house._next = 128 << 20
    for name in ("qwen2-gqa", "llama-96"):
        house.build(name, checkpoints[name], image=_house.images[name])
    house.images.clear()
    house.images["reserved"] = (128 << 20,)
    return house


@pytest.fixture
def house(_house: House) -> Iterator[House]:
    """Five models in a pool that holds one or two of them; empty before and after every test."""
    yield _house
    _house.idle()


@pytest.fixture
def twin(_twin: House) -> Iterator[House]:
    """Another instance of two of the models."""
    yield _twin
    _twin.idle()
