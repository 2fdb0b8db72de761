"""Fixtures of the engine tests; one set of vLLM engines serves the whole session."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

from appliance.engines.vllm import prepare_environment
from appliance.engines.vllm.images.libraries import inspect_here, provide_torchvision
from tests.engine.house import (
    MODELS,
    Baseline,
    House,
    PlainAnswers,
    Sampling,
    make_checkpoint,
    make_house,
)

prepare_environment("auto")
provide_torchvision()
inspect_here()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file begins first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.path.stem != "test_ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Behind a file, engines that are not used any more go: vLLM has the collector leave alone what
    there is when a model was built, and a file's engines take hundreds of megabytes."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)


BASELINE = """
import gc, json, os, sys
gc.disable()  # nothing that is imported is garbage
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own
from vllm import LLM, SamplingParams
from appliance.engines.vllm.layers.mends import mend_cpu_layers
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
mend_cpu_layers()
gc.freeze()
gc.enable()
engines = {}

def asked(given):
    bad_words = given.pop("bad_words_token_ids", None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "repetition_detection" in given:
        given["repetition_detection"] = RepetitionDetectionParams(**given["repetition_detection"])
    if "logit_bias" in given:  # whose keys JSON made strings
        given["logit_bias"] = {int(token): by for token, by in given["logit_bias"].items()}
    params = SamplingParams(detokenize=False, **given)
    params._bad_words_token_ids = bad_words
    return params

def scores(positions):
    return positions and [
        position and {token: (one.logprob, one.rank) for token, one in position.items()}
        for position in positions]

def told(answer):
    return {
        "prompt": list(answer.prompt_token_ids),
        "sequences": [list(one.token_ids) for one in answer.outputs],
        "logprobs": scores(answer.outputs[0].logprobs),
        "prompt_logprobs": scores(answer.prompt_logprobs),
        "finish_reason": answer.outputs[0].finish_reason,
        "stop_reason": answer.outputs[0].stop_reason,
    }

for line in sys.stdin:
    job = json.loads(line)
    engine = job["path"], json.dumps(job["arguments"])
    if engine not in engines:
        engines[engine] = LLM(
            job["path"], dtype=job["dtype"], enforce_eager=True,
            kv_cache_memory_bytes=64 << 20, block_size=32, enable_prefix_caching=False,
            **{"max_model_len": 1024, **job["arguments"]})
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
    sampling = [asked(s) for s in job["sampling"]]
    adapters = [one and LoRARequest(*one) for one in job["adapters"]] or None
    outputs = engines[engine].generate(
        prompts, sampling, use_tqdm=False, lora_request=adapters)
    print(json.dumps(list(map(told, outputs))), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by model name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder, name) for name in MODELS}


class PlainVllm:
    """What unchanged vLLM tells of prompts, in a process of its own, which runs `first` first. It
    keeps each model, so another takes its place when it has `most_models`, if that is not 0."""

    def __init__(self, first: str = "", most_models: int = 0) -> None:
        self._first = first
        self._most_models = most_models
        self._process: subprocess.Popen[str] | None = None
        self._models: set[str] = set()

    def __call__(
        self,
        path: str,
        dtype: str,
        prompts: list[tuple[int, ...]],
        sampling: list[Sampling],
        adapters: Sequence[tuple[str, int, str] | None] = (),
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        job = {
            "adapters": adapters,
            "path": path,
            "dtype": dtype,
            "prompts": prompts,
            "sampling": sampling,
            "arguments": arguments or {"skip_tokenizer_init": True},
        }
        model = f"{path} {arguments}"
        if model not in self._models and 0 < self._most_models <= len(self._models):
            self.end()
        self._models.add(model)
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(job), file=process.stdin, flush=True)
        outputs: list[dict[str, Any]] = json.loads(process.stdout.readline())
        return outputs

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self._first + BASELINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def end(self) -> None:
        """The next question starts another process."""
        if self._process is not None:
            self._process.kill()  # to end in order takes it half a minute, and nothing is kept
            self._process.communicate()
            self._process = None
            self._models.clear()


@contextmanager
def plain_process(first: str = "", most_models: int = 0) -> Iterator[PlainAnswers]:
    """`PlainVllm`, of which nothing is left afterwards."""
    plain = PlainVllm(first, most_models)
    try:
        yield plain
    finally:
        plain.end()


MOST_MODELS: Final = 24
"""Of the session's process: each takes a tenth of a gigabyte, and there are other processes."""


@pytest.fixture(scope="session")
def plain_answers() -> Iterator[PlainAnswers]:
    """What unchanged vLLM tells of prompts, in a process that stays for the session."""
    with plain_process(most_models=MOST_MODELS) as answers:
        yield answers


@pytest.fixture(scope="session")
def plain_vllm(checkpoints: dict[str, str], plain_answers: PlainAnswers) -> Baseline:
    """Outputs of unchanged vLLM."""

    def run(
        model: str, prompts: list[tuple[int, ...]], sampling: list[Sampling]
    ) -> list[list[int]]:
        answers = plain_answers(checkpoints[model], MODELS[model][1], prompts, sampling)
        return [answer["sequences"][0] for answer in answers]

    return run


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
