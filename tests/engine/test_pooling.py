"""Models that embed or score: their vectors are plain vLLM's, before and after others had the
memory; what cannot be pooled here is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.engines.protocol import SequenceSpec
from appliance.vocabulary import PrefillDone, RunPrefill, RunTurn, Task
from appliance.worker import frames
from appliance.worker.mailbox import Mailbox
from appliance.worker.worker import Worker
from tests.engine.house import (
    VOCAB,
    House,
    Sampling,
    make_checkpoint,
    make_house,
    save_tokenizer,
    sequence,
)
from tests.engine.pooled import vector, write_modules

PLENTY = 60
Pooling = dict[str, Any]
"""Arguments of vLLM's ``PoolingParams``."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
}
QUERY = "What flows through Rome?"
DOCUMENTS = ["The Tiber.", "A river, which is long, and flows through Rome.", "Nothing."]
TASKS = {
    "embedder": Task.EMBED,
    "headed": Task.EMBED,
    "means": Task.EMBED,
    "vectors": Task.EMBED,
    "scorer": Task.SCORE,
    "classifier": Task.SCORE,
    "classes": Task.SCORE,
    "rewarder": Task.SCORE,
}
POOLERS: dict[str, dict[str, Any]] = {
    "vectors": {"task": "token_embed"},
    "classes": {"task": "token_classify", "logit_mean": 0.5, "logit_sigma": 2.0},
    "rewarder": {"task": "token_classify"},
}
"""What is said of a model beside its checkpoint."""
EACH = tuple(POOLERS)
"""Those that pool each token of a prompt."""
WHOLE = ("means", *EACH)
"""Those that pool from all tokens of a prompt."""
MATCHING = ("embedder", "headed", "scorer")
"""Those that compare two texts."""
BASELINE = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from appliance.engines.vllm.layers.mends import mend_cpu_layers
mend_cpu_layers()
found, engines = {}, {}
for name, path, prompts, task, plain, pooler in json.load(sys.stdin):
    if name not in engines:
        engines[name] = LLM(
            path, runner="pooling", dtype="float32", block_size=32, enforce_eager=True,
            max_model_len=1024, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False,
            pooler_config=PoolerConfig(**pooler))
    llm = engines[name]
    if task == "score":
        scored = llm.score(*prompts, use_tqdm=False)
        found[name + " score"] = [[o.outputs.score] for o in scored]
        continue
    prompts = [{"prompt_token_ids": p} for p in prompts]
    params = PoolingParams(task=task, use_activation=False if plain else None)
    outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
    found.setdefault(name, []).extend(o.outputs.data.reshape(-1).tolist() for o in outputs)
print(json.dumps(found), file=answers, flush=True)
os._exit(0)
"""


def prompts(name: str) -> list[tuple[int, ...]]:
    """Shorter than a block, ending on one, over several."""
    start = sum(name.encode()) % 50
    return [tuple(3 + (start + i * 7) % (VOCAB - 3) for i in range(n)) for n in (5, 64, 90)]


def make(folder: Path, name: str, kind: str, config: str, mode: str = "", **shape: Any) -> str:
    """A random checkpoint of a class of transformers."""
    import torch
    import transformers

    torch.manual_seed(sum(name.encode()))
    path = folder / name
    made = getattr(transformers, kind)(getattr(transformers, config)(**(SHAPE | shape)))
    made.to(torch.float32).save_pretrained(path)
    save_tokenizer(path)
    if mode:
        write_modules(path, mode)
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two embedders, one with a head to be ignored, a scorer, one of three classes, and a model
    that generates."""
    folder = tmp_path_factory.mktemp("pooling")
    made = {
        "embedder": make(
            folder, "embedder", "Qwen3Model", "Qwen3Config", "lasttoken", is_matryoshka=True
        ),
        "headed": make(folder, "headed", "LlamaForCausalLM", "LlamaConfig"),
        "scorer": make(
            folder,
            "scorer",
            "Qwen3ForSequenceClassification",
            "Qwen3Config",
            num_labels=1,
            pad_token_id=0,
        ),
        "classifier": make(
            folder,
            "classifier",
            "Qwen3ForSequenceClassification",
            "Qwen3Config",
            num_labels=3,
            pad_token_id=0,
        ),
        "means": make(folder, "means", "Qwen3Model", "Qwen3Config", "mean_tokens"),
        "rewarder": make_rewarder(folder),
        "llama-mha": make_checkpoint(folder, "llama-mha"),
    }
    file = Path(made["embedder"]) / "config.json"
    described = json.loads(file.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    file.write_text(json.dumps(described))
    return made | {"vectors": made["embedder"], "classes": made["classifier"]}


def make_rewarder(folder: Path) -> str:
    """A model with a value for each token, which transformers has no class of."""
    import torch
    from safetensors.torch import load_file, save_file

    path = Path(make(folder, "rewarder", "Qwen2Model", "Qwen2Config", num_key_value_heads=2))
    weights = {f"model.{name}": one for name, one in load_file(path / "model.safetensors").items()}
    for layer, rows in ((0, 128), (2, 1)):
        weights[f"score.{layer}.weight"] = torch.randn(rows, 128) * 0.2
        weights[f"score.{layer}.bias"] = torch.randn(rows) * 0.2
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForRewardModel"]}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def expected(paths: dict[str, str]) -> dict[str, list[list[float]]]:
    """What unchanged vLLM makes of the prompts; of the scorer also without its activation."""
    jobs: list[Any] = [
        (name, paths[name], prompts(name), task_of(name), plain, POOLERS.get(name, {}))
        for name, task in TASKS.items()
        for plain in ((False, True) if task is Task.SCORE else (False,))
    ]
    jobs += [(name, paths[name], [QUERY, DOCUMENTS], "score", False, {}) for name in MATCHING]
    answer = subprocess.run(
        [sys.executable, "-c", BASELINE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[list[float]]] = json.loads(answer.stdout)
    return found


@pytest.fixture(scope="module")
def _pooled(paths: dict[str, str]) -> House:
    from appliance.engines.vllm.engine import VllmEngine

    house = make_house()
    for name, path in paths.items():
        house.engines[name] = engine = VllmEngine.build(
            name,
            path,
            dtype="float32",
            max_context=1024,
            max_batch=16,
            arena=house.arena,
            host=house.host,
            swapper=house.swapper,
            task=TASKS.get(name, Task.GENERATE),
            pooler_config=POOLERS.get(name, {}),
        )
        house.images[name] = house.places(engine.weight_slabs, house.arena.slab_bytes)
        engine.store_weights(house.images[name], fill=True)
    return house


@pytest.fixture
def pooled(_pooled: House) -> Iterator[House]:
    yield _pooled
    _pooled.idle()


def asked(
    name: str, request: str, prompt: tuple[int, ...], pooling: Pooling | None = None
) -> SequenceSpec:
    from vllm import PoolingParams

    from appliance.engines.vllm.messages import encode_params

    params = PoolingParams(**({"task": task_of(name)} | (pooling or {})))
    return SequenceSpec(request=request, model=name, prompt=prompt, body=encode_params(params))


def task_of(name: str) -> str:
    """vLLM's name for what a model's prompts are pooled to."""
    usual = "classify" if TASKS.get(name) is Task.SCORE else "embed"
    return str(POOLERS.get(name, {}).get("task", usual))


def pool(engine: Any, prompt: tuple[int, ...], pooling: Pooling | None = None) -> list[float]:
    engine.add(asked(engine.model, "r", prompt, pooling))
    values = vector(engine.prefill("r", PLENTY))
    assert not engine.knows("r")
    return values


def test_what_has_no_head_takes_no_room_for_one(pooled: House, paths: dict[str, str]) -> None:
    """Nor is one counted before there is an engine, though a checkpoint may have it."""
    for name, path in paths.items():
        task = TASKS.get(name, Task.GENERATE).value
        entry = read_checkpoint(name, Path(path), "float32", task)
        over = pooled.engines[name]._placed.weights.layout.nbytes - entry.weight_bytes
        assert 0 <= over < 128 * VOCAB * 4  # a head


@pytest.mark.parametrize("name", list(TASKS))
def test_vectors_are_those_of_plain_vllm(
    pooled: House, expected: dict[str, list[list[float]]], name: str
) -> None:
    """Before and after another model had all of the memory, also when the weights come in during
    the prompt; a second time from the prefix cache."""
    engine, other = pooled.engines[name], pooled.engines["llama-mha"]
    for _ in range(2):
        engine.begin_load()
        for prompt, wanted in zip(prompts(name) * 2, expected[name][:3] * 2, strict=True):
            np.testing.assert_allclose(pool(engine, prompt), wanted, rtol=1e-4, atol=1e-5)
        assert engine.trim(0).slabs == 0
        engine.evict_weights()
        pooled.overwrite_free_memory()
        other.begin_load().wait()
        other.add(sequence("llama-mha", "o", prompts(name)[2], Sampling(max_tokens=1)))
        assert other.prefill("o", PLENTY)[0].token >= 0
        assert other.trim(0).slabs == 0
        other.evict_weights()


def test_a_score_is_reported_without_its_activation(
    pooled: House, expected: dict[str, list[list[float]]]
) -> None:
    """A scorer has one number for a prompt, between 0 and 1 unless that is not wanted."""
    engine = pooled.engines["scorer"]
    engine.begin_load().wait()
    raw = [pool(engine, prompt, Pooling(use_activation=False)) for prompt in prompts("scorer")]

    np.testing.assert_allclose(raw, expected["scorer"][3:], rtol=1e-4, atol=1e-5)
    assert [len(one) for one in raw] == [1, 1, 1]
    assert all(0 < one[0] < 1 for one in expected["scorer"][:3])


@pytest.mark.parametrize("name", MATCHING)
def test_texts_are_matched_as_by_plain_vllm(
    pooled: House, paths: dict[str, str], expected: dict[str, list[list[float]]], name: str
) -> None:
    """A scorer reads both texts as a pair; embedders one by one, and the angle is the score."""
    tokenizer = Tokenizer.from_file(str(Path(paths[name], "tokenizer.json")))
    engine = pooled.engines[name]
    engine.begin_load().wait()
    if TASKS[name] is Task.SCORE:
        found = [pool(engine, tuple(tokenizer.encode(QUERY, text).ids))[0] for text in DOCUMENTS]
    else:
        query, *texts = (
            pool(engine, tuple(tokenizer.encode(text).ids)) for text in (QUERY, *DOCUMENTS)
        )
        found = [float(np.dot(query, text)) for text in texts]  # all of length 1

    wanted = [score for (score,) in expected[f"{name} score"]]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(set(wanted)) == len(DOCUMENTS)


def test_dimensions_are_the_first_ones(pooled: House) -> None:
    """A vector that is cut still has length 1; a model that does not know of it refuses."""
    engine = pooled.engines["embedder"]
    engine.begin_load().wait()
    prompt = prompts("embedder")[0]
    whole, cut = pool(engine, prompt), pool(engine, prompt, Pooling(dimensions=16))

    np.testing.assert_allclose(cut, np.array(whole[:16]) / np.linalg.norm(whole[:16]), rtol=1e-5)
    assert (len(whole), len(cut)) == (128, 16)
    with pytest.raises(ValueError, match="Matryoshka"):
        pooled.engines["headed"].add(asked("headed", "r", prompt, Pooling(dimensions=16)))


@pytest.mark.parametrize("name", ["embedder", *WHOLE])
def test_mixed_turns_pool(pooled: House, expected: dict[str, list[list[float]]], name: str) -> None:
    """In chunks, several at a time, under a worker: each has its vector once, and no decoding."""
    reports: list[Any] = []
    mailbox = Mailbox()
    configuration = frames.Configure(
        version=frames.PROTOCOL_VERSION,
        instance=0,
        cpus="",
        slabs=pooled.arena.slabs,
        slab_bytes=pooled.arena.slab_bytes,
        host_bytes=pooled.host.nbytes,
        models=[frames.WorkerModel(name, "", "float32", 1024, 16, task=TASKS[name])],
    )
    worker = Worker(
        configuration,
        pooled.arena,
        pooled.swapper,
        mailbox,
        lambda model: pooled.engines[model.name],
        reports.extend,
    )
    engine = worker._engines[name] = pooled.engines[name]
    engine.begin_load().wait()
    names = [f"r{i}" for i in range(3)]
    for request, prompt in zip(names, prompts(name), strict=True):
        mailbox.put(frames.AddSequence(asked(name, request, prompt)))
    mailbox.put(
        RunTurn(
            instance=0,
            model=name,
            turn=1,
            requests=(),
            quota_seconds=1.0,
            kv_slabs=PLENTY,
            prompts=tuple(names),
            chunk_tokens=33,
        )
    )
    mailbox.put(frames.AddSequence(asked(name, "alone", prompts(name)[1])))
    mailbox.put(RunPrefill(instance=0, model=name, request="alone", kv_slabs=PLENTY))
    mailbox.put(frames.Shutdown())
    worker.run()

    told = [
        one for report in reports if isinstance(report, frames.Tokens) for one in report.produced
    ]
    found = {one.request: vector([one]) for one in told}
    assert len(told) == 4
    for request, wanted in zip(
        [*names, "alone"], [*expected[name][:3], expected[name][1]], strict=True
    ):
        np.testing.assert_allclose(found[request], wanted, rtol=1e-4, atol=1e-5)
    done = [report.request for report in reports if isinstance(report, PrefillDone)]
    assert sorted(done) == sorted([*names, "alone"])


@pytest.mark.parametrize("name", EACH)
def test_each_token_has_its_own(pooled: House, name: str) -> None:
    """As many rows as the prompt has tokens; a token's is that of the prompt that ends with it."""
    engine, width = pooled.engines[name], {"vectors": 128, "classes": 3, "rewarder": 1}[name]
    engine.begin_load().wait()
    prompt = prompts(name)[2]
    rows = np.array(pool(engine, prompt)).reshape(len(prompt), width)

    shorter = np.array(pool(engine, prompt[:41])).reshape(41, width)
    np.testing.assert_allclose(shorter, rows[:41], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_that_fails_leaves_nothing_of_a_prompt(
    pooled: House, expected: dict[str, list[list[float]]], name: str, monkeypatch: Any
) -> None:
    """Computed again from its beginning, a prompt is pooled from each of its tokens once."""
    engine, prompt = pooled.engines[name], prompts(name)[2]
    engine.begin_load().wait()
    engine.add(asked(name, "r", prompt))
    engine.begin_prefill("r", PLENTY)
    assert engine.step((), PLENTY, ("r",), 40) == []

    def fail() -> None:
        raise RuntimeError("as good as any")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", fail)
        with pytest.raises(RuntimeError, match="as good as any"):
            engine.step((), PLENTY, ("r",), 40)

    found = vector(engine.prefill("r", PLENTY))
    np.testing.assert_allclose(found, expected[name][2], rtol=1e-4, atol=1e-5)


def test_what_is_too_large_is_refused_before(pooled: House, monkeypatch: Any) -> None:
    """A matrix that no output holds; nor are texts compared where they are computed."""
    from vllm.pooling_params import LateInteractionParams

    from appliance.engines.vllm import pooling

    engine, prompt = pooled.engines["vectors"], prompts("vectors")[2]
    late = LateInteractionParams(mode="cache_query", query_key="k", query_uses=1)
    with pytest.raises(ValueError, match="token by token"):
        engine.add(asked("vectors", "r", prompt, {"late_interaction_params": late}))
    monkeypatch.setattr(pooling, "MAX_POOLED_BYTES", len(prompt) * 128 * 4 - 1)
    with pytest.raises(ValueError, match=f"pooled from {len(prompt)} tokens takes 46080 bytes"):
        engine.add(asked("vectors", "r", prompt))
    monkeypatch.undo()
    monkeypatch.setattr(pooling, "MAX_STATES_BYTES", len(prompt) * 128 * 4 - 1)
    with pytest.raises(ValueError, match="ask for a shorter prompt"):
        pooled.engines["classes"].add(asked("classes", "r", prompt))
    assert not engine.knows("r")


def test_only_its_own_task(pooled: House) -> None:
    """A model that embeds does not generate, and the other way round; a prompt may be as long as
    the context, and not longer."""
    engine = pooled.engines["embedder"]
    with pytest.raises(ValueError, match="does not generate"):
        engine.add(sequence("embedder", "r", (5, 6), Sampling(max_tokens=4)))
    with pytest.raises(ValueError, match="generates text and nothing else"):
        pooled.engines["llama-mha"].add(asked("llama-mha", "r", (5, 6)))
    with pytest.raises(ValueError, match="1025 tokens leave no room in 1024"):
        engine.add(asked("embedder", "r", (5,) * 1025))
    engine.begin_load().wait()
    assert len(pool(engine, (5,) * 1024)) == 128


@pytest.mark.parametrize(
    ("name", "kind", "config", "mode", "task", "shape", "why"),
    [
        (
            "both",
            "Qwen3Model",
            "Qwen3Config",
            "mean_tokens",
            Task.EMBED,
            {"is_causal": False},
            "both directions",
        ),
        ("first", "Qwen3Model", "Qwen3Config", "cls_token", Task.EMBED, {}, "pools by CLS"),
    ],
)
def test_what_cannot_be_pooled_is_refused(
    tmp_path: Path, name: str, kind: str, config: str, mode: str, task: Task, shape: Any, why: str
) -> None:
    """When the engine is built, with the reason."""
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.engines.vllm.pooling import UnsupportedPooling

    house = make_house()
    path = make(tmp_path, name, kind, config, mode, **shape)
    with pytest.raises(UnsupportedPooling, match=why):
        VllmEngine.build(
            name,
            path,
            dtype="float32",
            max_context=512,
            max_batch=16,
            arena=house.arena,
            host=house.host,
            swapper=house.swapper,
            task=task,
        )
