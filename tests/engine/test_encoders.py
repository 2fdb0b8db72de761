"""Models whose tokens attend in both directions: what they embed and score is plain vLLM's, though
their weights leave the device between prompts; they keep no KV, and compute whole prompts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from appliance.checkpoints.families import ENCODERS
from appliance.checkpoints.model_config import VLLM_NAMES
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.engines.protocol import SequenceSpec
from appliance.units import Bytes, Memory
from appliance.vocabulary import Task
from tests.configs import CONFIGS
from tests.engine.house import POOL_SLABS, SLAB, House, make_house
from tests.engine.pooled import vector, write_modules
from tests.engine.published_encoders import RENAMED, PublishedEncoder, make_published
from tests.engine.shrunken import HIDDEN, VOCAB, make_shrunken

CONTEXT = 1024
SLABS = 8
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
MODELS = sorted(
    {
        config["architectures"][0]: name
        for name, config in CONFIGS.items()
        if config["architectures"][0] in ENCODERS and "auto_map" not in config
    }.values()
)
"""One model of each architecture, and those whose files come with code."""
DENSE = "embeddinggemma-300m"
"""Its vectors go through dense layers."""
PLAIN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own
from vllm import LLM, PoolingParams
from appliance.checkpoints.overrides import language_config
from appliance.engines.vllm.configs.types import register_types
from appliance.engines.vllm.layers.mends import mend_cpu_layers
register_types()
mend_cpu_layers()
found, engines = {}, []
for name, path, task, prompts, second in json.load(sys.stdin):
    llm = LLM(
        path, runner="pooling", dtype="float32", enforce_eager=True, max_model_len=1024,
        hf_overrides=language_config,
    )
    engines.append(llm)  # one that Python collects would end the others' process groups
    params = [
        PoolingParams(task=task, extra_kwargs={"compressed_token_type_ids": at} if at else None)
        for at in second
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
    found[name] = [output.outputs.data.reshape(-1).tolist() for output in outputs]
print(json.dumps(found), file=answers, flush=True)
os._exit(0)
"""


class Prompt(NamedTuple):
    tokens: tuple[int, ...]
    second: int = 0
    """Where a second text begins, if the model is to see two; 0: nowhere."""


def prompts_of(name: str) -> list[Prompt]:
    """Of one token, of some, and of hundreds; one as a pair, if the model can tell texts apart."""
    found = [
        Prompt(tuple(3 + (sum(name.encode()) + i * 7) % (VOCAB - 3) for i in range(length)))
        for length in (1, 5, 64, 90, 700)
    ]
    if CONFIGS[name].get("type_vocab_size", 0) > 1 and task_of(name) is Task.SCORE:
        found.append(Prompt(found[3].tokens, 40))
    return found


def task_of(name: str) -> Task:
    scores = CONFIGS[name]["architectures"][0].endswith("ForSequenceClassification")
    return Task.SCORE if scores else Task.EMBED


def pooling_task(name: str) -> str:
    return "classify" if task_of(name) is Task.SCORE else "embed"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PublishedEncoder]:
    folder = tmp_path_factory.mktemp("published")
    return {name: make_published(folder, name, CONFIGS[name]) for name in RENAMED}


@pytest.fixture(scope="module")
def paths(
    tmp_path_factory: pytest.TempPathFactory, published: dict[str, PublishedEncoder]
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("encoders")
    made = {name: make_shrunken(folder, name, CONFIGS[name]) for name in MODELS}
    made |= {name: encoder.path for name, encoder in published.items()}
    add_dense_layers(Path(made[DENSE]))
    return made


def add_dense_layers(path: Path) -> None:
    """As sentence-transformers writes them: means, which go through two layers."""
    from safetensors.numpy import save_file

    write_modules(path, "mean_tokens", ["Dense", "Dense", "Normalize"])
    numbers = np.random.default_rng(7)
    for number, (inputs, outputs) in ((2, (HIDDEN, 2 * HIDDEN)), (3, (2 * HIDDEN, HIDDEN))):
        layer = path / f"{number}_Dense"
        layer.mkdir()
        described = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": number == 3,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (layer / "config.json").write_text(json.dumps(described))
        weights = {"linear.weight": numbers.normal(size=(outputs, inputs)).astype(np.float32)}
        if number == 3:
            weights["linear.bias"] = numbers.normal(size=outputs).astype(np.float32)
        save_file(weights, layer / "model.safetensors")


@pytest.fixture(scope="module")
def plain(paths: dict[str, str]) -> dict[str, list[list[float]]]:
    """What unchanged vLLM makes of each model's prompts."""
    jobs = [
        (
            name,
            path,
            pooling_task(name),
            [prompt.tokens for prompt in prompts_of(name)],
            [prompt.second for prompt in prompts_of(name)],
        )
        for name, path in paths.items()
    ]
    answer = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found: dict[str, list[list[float]]] = json.loads(answer.stdout)
    return found


def asked(name: str, request: str, prompt: Prompt, **pooling: Any) -> SequenceSpec:
    """`pooling` are further arguments of vLLM's ``PoolingParams``."""
    from vllm import PoolingParams

    from appliance.engines.vllm.messages import encode_params

    kinds = {"compressed_token_type_ids": prompt.second} if prompt.second else None
    arguments = {"task": pooling_task(name), "extra_kwargs": kinds} | pooling
    params = PoolingParams(**arguments)
    return SequenceSpec(
        request=request, model=name, prompt=prompt.tokens, body=encode_params(params)
    )


def build(house: House, name: str, path: str) -> Any:
    return house.build(name, path, dtype="float32", task=task_of(name), max_context=CONTEXT)


@pytest.mark.parametrize("name", RENAMED)
def test_plain_vllm_equals_transformers(
    published: dict[str, PublishedEncoder], plain: dict[str, list[list[float]]], name: str
) -> None:
    """With the keys and names of published files, which are read by other classes."""
    prompts = [prompt.tokens for prompt in prompts_of(name)]

    np.testing.assert_allclose(plain[name], published[name].pooled(prompts), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*MODELS, *RENAMED])
def test_outcomes_equal_plain_vllm(
    paths: dict[str, str], plain: dict[str, list[list[float]]], name: str
) -> None:
    """One by one, with other bytes where its weights were before each; then many in one turn, in
    chunks that are smaller than some of them."""
    house = make_house()
    model = Model(name=name, path=paths[name], dtype="float32", max_context=CONTEXT)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    engine = build(house, name, paths[name])
    assert engine.kv.blocks(CONTEXT) == known.kv == 0
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    prompts = prompts_of(name)
    found: list[list[float]] = []
    for prompt in prompts:
        house.overwrite_free_memory()
        engine.begin_load()
        engine.add(asked(name, "r", prompt))
        found.append(vector(engine.prefill("r", 0)))
        engine.evict_weights()
        assert house.arena.usage()["free"] == house.arena.slabs, "memory is kept"
    np.testing.assert_allclose(found, plain[name], rtol=1e-4, atol=1e-5)

    engine.begin_load()
    together: dict[str, list[float]] = {}
    for index, prompt in enumerate(prompts):
        engine.add(asked(name, str(index), prompt))
        engine.begin_prefill(str(index), 0)
    steps = 0
    while waiting := [str(i) for i in range(len(prompts)) if str(i) not in together]:
        for one in engine.step((), 0, waiting, 100):
            together[one.request] = vector([one])
        steps += 1
    assert 2 < steps <= len(prompts), "short ones share a step, and a long one has its own"
    ordered = [together[str(index)] for index in range(len(prompts))]
    np.testing.assert_allclose(ordered, plain[name], rtol=1e-4, atol=1e-5)
    engine.retire()


def test_each_architecture_is_tried() -> None:
    names = [CONFIGS[name]["architectures"][0] for name in (*MODELS, *RENAMED)]
    assert {VLLM_NAMES.get(name, name) for name in names} == ENCODERS


def test_each_token_can_be_pooled(paths: dict[str, str]) -> None:
    """All vectors at once; and a vector is cut, if the model says that it may be."""
    name = "all-minilm-l6-v2"
    file = Path(paths[name]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_matryoshka": True}))
    house = make_house()
    each = house.build(
        name,
        paths[name],
        dtype="float32",
        task=Task.EMBED,
        pooler_config={"task": "token_embed", "pooling_type": "ALL"},
    )
    one = house.build("one", paths[name], dtype="float32", task=Task.EMBED)
    prompt = prompts_of(name)[3]
    for engine, pooling in ((each, {"task": "token_embed"}), (one, {"dimensions": 32})):
        engine.begin_load()
        engine.add(asked(name, "r", prompt, **pooling))
    rows = np.array(vector(each.prefill("r", 0))).reshape(len(prompt.tokens), -1)
    (cut,) = np.array([vector(one.prefill("r", 0))])

    assert rows.shape == (90, 128)
    np.testing.assert_allclose(cut, rows[0][:32] / np.linalg.norm(rows[0][:32]), rtol=1e-4)


@pytest.mark.parametrize("name", ["ms-marco-minilm-l6-v2", "gte-reranker-modernbert-base"])
def test_classes_of_each_token_come_with_the_weights(paths: dict[str, str], name: str) -> None:
    """They do not go through the layers that classes of a prompt go through: none is waited for."""
    engine = make_house().build(
        name,
        paths[name],
        dtype="float32",
        task=Task.SCORE,
        pooler_config={"task": "token_classify", "pooling_type": "ALL"},
    )
    prompt = prompts_of(name)[1]
    found = []
    for _ in range(2):
        engine.begin_load()
        engine.add(asked(name, "r", prompt, task="token_classify"))
        found.append(vector(engine.prefill("r", 0)))
        engine.evict_weights()

    assert found[0] == found[1]
    assert len(found[0]) == len(prompt.tokens)


def test_dense_layers_that_vllm_does_not_make_are_refused(
    paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs why, and goes on without them; here the build of the engine fails, also for a reason
    that is not known before."""
    from appliance.checkpoints import task
    from appliance.engines.vllm.weights.recipe import UnsupportedCheckpoint

    monkeypatch.setattr(task, "_check_dense", lambda file: None)
    path = tmp_path / "damaged"
    shutil.copytree(paths[DENSE], path)
    file = path / "modules.json"
    file.write_text(file.read_text().replace("2_Dense", "4_Dense"))
    (path / "2_Dense").rename(path / "4_Dense")
    (path / "4_Dense" / "config.json").write_text(
        '{"in_features": 128, "out_features": 256, "activation_function": "unheard of"}'
    )

    with pytest.raises(UnsupportedCheckpoint, match="makes no dense layers of 4_Dense, 3_Dense"):
        build(make_house(), DENSE, str(path))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("all-minilm-l6-v2", {"compressed_token_type_ids": 3}),
        ("bge-reranker-v2-m3", {"compressed_token_type_ids": 3}),
        ("ms-marco-minilm-l6-v2", {"compressed_token_type_ids": -1}),
        ("ms-marco-minilm-l6-v2", {"compressed_token_type_ids": "3"}),
        ("ms-marco-minilm-l6-v2", {"others": 3}),
    ],
)
def test_types_that_a_model_has_not_are_refused(
    paths: dict[str, str], name: str, extra: dict[str, Any]
) -> None:
    """Before a step, which would fail for all of its prompts."""
    engine = build(make_house(), name, paths[name])

    with pytest.raises(ValueError, match=r"types of their tokens|no such arguments"):
        engine.add(asked(name, "r", Prompt((5, 6, 7, 8, 9)), extra_kwargs=extra))
    engine.add(asked(name, "r", Prompt((5, 6, 7)), extra_kwargs={"compressed_token_type_ids": 3}))
