"""A worker's engines on one GPU, made as a worker makes them.

A process of its own: it must not have loaded torch before its environment is set. On the pretend
driver, which computes nothing, ``PRETEND=1`` has the tests check all but the tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.protocol import SequenceSpec
from appliance.memory.host_tier import HostTier
from appliance.platform.cpus import show_cpus
from appliance.worker import frames
from appliance.worker.rank_messages import Seat

SLAB = 2 << 20
CONTEXT = 512
BATCH = 4
COMPUTES = os.environ.get("PRETEND") != "1"

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
for number, (name, kv, layers) in enumerate((("dense-a", 4, 4), ("dense-b", 2, 3))):
    torch.manual_seed(number)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv, vocab_size=2048, max_position_embeddings=2048,
        tie_word_embeddings=False, initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{sys.argv[1]}/{name}")
config = Qwen3MoeConfig(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
    num_experts_per_tok=2, vocab_size=2048, max_position_embeddings=2048, decoder_sparse_step=1,
    mlp_only_layers=[], initializer_range=0.2,
)
Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{sys.argv[1]}/moe")
"""


class Worker:
    """What a worker has: engines, one pool, one host tier."""

    def __init__(self, checkpoints: Path, host_bytes: int) -> None:
        self.host = HostTier.create(host_bytes)
        from appliance.worker.engines import engines

        configuration = frames.Configure(
            version=frames.PROTOCOL_VERSION,
            instance=0,
            cpus=show_cpus(sorted(os.sched_getaffinity(0))),
            slabs=400,
            slab_bytes=SLAB,
            host_bytes=self.host.nbytes,
            models=[],
            device="cuda:0",
            runtime_slabs=1500,
        )
        self._build, self.arena, self.swapper = engines(
            configuration, self.host, Seat(0, 1, configuration.cpus)
        )
        self._checkpoints = checkpoints
        self._taken = 0

    def engine(self, name: str) -> Engine:
        """A new engine of a checkpoint, with its weights in the host tier."""
        path = self._checkpoints / name
        engine = self._build(frames.WorkerModel(name, str(path), "bfloat16", CONTEXT, BATCH))
        places = self.places(engine.weight_slabs, SLAB)
        engine.store_weights(places, fill=True)
        return Engine(self, engine)

    def places(self, count: int, nbytes: int) -> list[int]:
        """Of the host tier; they are never given back."""
        start = -(-self._taken // SLAB) * SLAB
        self._taken = start + count * nbytes
        return [start + number * nbytes for number in range(count)]


class Engine:
    """One model's engine, and the requests of a test."""

    def __init__(self, worker: Worker, engine: Any) -> None:
        self.worker = worker
        self.raw = engine

    def load(self) -> None:
        self.raw.begin_load().wait()

    def add(
        self, name: str, prompt: int = 64, output: tuple[int, ...] = (), **sampling: Any
    ) -> None:
        """A request with a prompt of so many tokens; greedy unless `sampling` says otherwise."""
        from vllm import SamplingParams

        from appliance.engines.vllm.messages import encode_params

        params = SamplingParams(
            **({"temperature": 0.0, "max_tokens": 64, "ignore_eos": True} | sampling)
        )
        tokens = tuple(5 + i * i % 1999 for i in range(prompt))
        self.raw.add(
            SequenceSpec(
                request=name,
                model=self.raw.model,
                prompt=tokens,
                output=output,
                body=encode_params(params),
                prefix_salt=name,
            )
        )

    def prefill(self, name: str) -> int:
        (made,) = self.raw.prefill(name, 1 << 20)
        return int(made.token)

    def steps(self, name: str, count: int) -> list[int]:
        """The next tokens of a resident request."""
        return [int(self.raw.step([name], 1 << 20)[0].token) for _ in range(count)]

    def answer(self, name: str, tokens: int, prompt: int = 64, **sampling: Any) -> list[int]:
        """The first tokens of a new request, which is forgotten."""
        self.add(name, prompt, **sampling)
        made = [self.prefill(name), *self.steps(name, tokens - 1)]
        self.forget(name)
        return made

    def forget(self, name: str) -> None:
        self.raw.forget(name)
        self.raw.trim()

    def go(self) -> None:
        """Give all of the device back, as at the end of a turn."""
        self.worker.swapper.settle()
        self.raw.trim(0)
        self.raw.evict_weights()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def worker(checkpoints: Path) -> Iterator[Worker]:
    """One for all tests. Its host tier is large, so that the first engines are built while it is
    still being page-locked."""
    return Worker(checkpoints, int(os.environ.get("HOST_MIB", "8192")) << 20)


@pytest.fixture(scope="session")
def dense(worker: Worker) -> Engine:
    return worker.engine("dense-a")


@pytest.fixture(scope="session")
def other(worker: Worker, dense: Engine) -> Engine:
    return worker.engine("dense-b")
