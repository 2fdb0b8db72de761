"""Checkpoints with an adapter for each task (Jina's embeddings v3): what is served of them, what is
refused, and how a task is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.architectures.task_adapters import TaskRefused, served_task
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.model_config import read_model_config
from appliance.config.loader import load_config
from appliance.config.schema import Model
from appliance.daemon.served_model import served_model
from appliance.errors import ConfigError
from appliance.memory.weight_cache.image_file import image_name
from tests.configs import CONFIGS

Make = Callable[..., Path]

NAME = "jina-embeddings-v3"
TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
ROWS, COLUMNS, RANK = 6, 8, 4
LAYER = "roberta.encoder.layers.0.mlp.fc1"
WORDS = "roberta.embeddings.word_embeddings"
LEFT_OUT = "left out"


def adapted() -> dict[str, np.ndarray[Any, Any]]:
    """An embedding and a layer, as published files have them."""
    shapes = {
        f"{LAYER}.parametrizations.weight.original": (ROWS, COLUMNS),
        f"{LAYER}.parametrizations.weight.0.lora_A": (len(TASKS), RANK, COLUMNS),
        f"{LAYER}.parametrizations.weight.0.lora_B": (len(TASKS), ROWS, RANK),
        f"{LAYER}.bias": (ROWS,),
        f"{WORDS}.parametrizations.weight.original": (ROWS, COLUMNS),
        f"{WORDS}.parametrizations.weight.0.lora_A": (len(TASKS), ROWS, RANK),
        f"{WORDS}.parametrizations.weight.0.lora_B": (len(TASKS), RANK, COLUMNS),
    }
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def write(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **changes: Any) -> Path:
    config = {key: v for key, v in (CONFIGS[NAME] | changes).items() if v != LEFT_OUT}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_only_one_adapter_is_in_memory(fake_checkpoint: Make) -> None:
    """And none besides the matrices: they are added up. What a file holds is counted as a whole."""
    entry = read_checkpoint("tiny", write(fake_checkpoint(), adapted()), "float32")

    assert entry.weight_bytes == 4 * (2 * ROWS * COLUMNS + ROWS)
    adapters = len(TASKS) * RANK * (ROWS + COLUMNS)
    assert entry.parameters == 2 * ROWS * COLUMNS + ROWS + 2 * adapters
    assert (entry.max_positions, entry.kv_bytes_per_token) == (8192, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_adaptations": LEFT_OUT}, "does not say lora_adaptations, which vLLM needs"),
        ({"lora_adaptations": []}, "is not a list of up to 64 names of tasks"),
        ({"lora_adaptations": "text-matching"}, "is not a list of up to 64 names of tasks"),
        ({"lora_adaptations": ["a", "a"]}, "is not a list of up to 64 names of tasks, each once"),
        ({"lora_adaptations": ["a\n"]}, "is not a list of up to 64 names of tasks"),
        ({"lora_adaptations": ["a", 5]}, "is not a list of up to 64 names of tasks"),
        ({"lora_rank": LEFT_OUT}, "lora_rank is None, not a positive integer"),
        ({"lora_rank": 0}, "lora_rank is 0, not a positive integer"),
        ({"lora_alpha": None}, "lora_alpha is None, not a positive number"),
        ({"lora_alpha": True}, "lora_alpha is True, not a positive number"),
        ({"load_trained_adapters": False}, "load_trained_adapters of .* is False: only True"),
        ({"rotary_emb_base": LEFT_OUT}, "it does not say rotary_emb_base, which vLLM needs"),
        ({"rotary_emb_base": 0}, "rotary_emb_base of XLMRobertaModel is 0, not a positive number"),
        ({"max_position_embeddings": LEFT_OUT}, "does not say max_position_embeddings"),
        ({"hidden_act": "relu"}, "hidden_act of XLMRobertaModel is 'relu'"),
        ({"truncate_dim": 256}, "truncate_dim of XLMRobertaModel is 256: only null is served"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved of XLMRobertaModel is True"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base of XLMRobertaModel is 512"),
        ({"position_embedding_type": "absolute"}, "only XLMRobertaModel with rotary embeddings"),
    ],
)
def test_settings_that_are_not_computed_are_named(
    fake_checkpoint: Make, changes: dict[str, Any], reason: str
) -> None:
    path = write(fake_checkpoint(), adapted(), **changes)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"0.lora_A": None}, f"{LAYER}.* lacks the matrix or one of the adapters"),
        ({"original": None}, r"fc1.*lora_[AB] lacks the matrix or one of the"),
        ({"0.lora_A": (4, RANK, COLUMNS)}, f"{LAYER}.* do not have its shape, 4 and 5"),
        ({"0.lora_B": (5, ROWS, 3)}, "do not have its shape"),
        ({"original": (ROWS, COLUMNS, 1)}, "do not have its shape"),
        ({"original": np.float64}, "are no floats of 16 or 32 bits"),
        (None, "has no tensors of the adapters of its tasks"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    fake_checkpoint: Make, changes: dict[str, Any] | None, reason: str
) -> None:
    """Before an engine is built."""
    tensors = adapted()
    for part, change in (changes or {}).items():
        name = f"{LAYER}.parametrizations.weight.{part}"
        if change is None:
            del tensors[name]
        elif isinstance(change, tuple):
            tensors[name] = np.ones(change, np.float32)
        else:
            tensors[name] = tensors[name].astype(change)
    if changes is None:
        tensors = {f"{LAYER}.weight": np.ones((ROWS, COLUMNS), np.float32)}
    path = write(fake_checkpoint(), tensors)

    with pytest.raises(UnsupportedModel, match=f"{reason}.*; take another copy"):
        read_checkpoint("tiny", path)


def test_a_task_is_chosen_by_configuration(fake_checkpoint: Make, tmp_path: Path) -> None:
    """Without a choice, it is vLLM's; workers, front ends and `appliance show` are told."""
    path = write(fake_checkpoint(), adapted())
    file = tmp_path / "appliance.toml"
    table = '[[model]]\nname = "NAME"\npath = "tiny"\nmax_context = 256\ndtype = "float32"\n'
    text = '[devices]\nmemory = "8MiB"\n'
    both = table.replace("NAME", "a") + table.replace("NAME", "b")
    file.write_text(f'{text}{both}embedding_task = "separation"')
    models = load_config(file).models
    entries = [read_checkpoint(one.name, path, one.dtype) for one in models]

    served = [served_model(*one) for one in zip(models, entries, strict=True)]

    tasks = [(one.facts.embedding_task, one.front.embedding_task) for one in served]
    assert tasks == [("text-matching",) * 2, ("separation",) * 2]
    assert [one.worker.embedding_task for one in served] == ["", "separation"]
    names = {image_name("/m", "float32", 0, 1, embedding_task=task) for task in ("", *TASKS)}
    assert len(names) == 1 + len(TASKS), "they would replace each other's images"


def test_a_task_that_a_model_has_not_is_refused(fake_checkpoint: Make, tmp_path: Path) -> None:
    """With its key, and what may be said."""
    write(fake_checkpoint(), adapted())
    fake_checkpoint("llama")
    file = tmp_path / "appliance.toml"
    table = '[[model]]\nname = "a"\nmax_context = 256\nembedding_task = "retrieval"\n'
    text = f'[devices]\nmemory = "8MiB"\n{table}'
    file.write_text(f'{text}path = "tiny"\n')
    with pytest.raises(ConfigError, match=rf"embedding_task: .*'retrieval'; use {TASKS[0]}, "):
        load_config(file)
    file.write_text(f'{text}path = "llama"\n')
    with pytest.raises(ConfigError, match=r"embedding_task: .* no adapters of tasks; leave it out"):
        load_config(file)

    config = read_model_config(tmp_path / "llama")
    assert served_task(config, "") == ""
    with pytest.raises(TaskRefused, match="embedding_task: the model has no adapters of tasks"):
        served_task(config, "retrieval.query")
    with pytest.raises(TaskRefused):
        served_model(
            Model(name="a", path="llama", max_context=64, embedding_task="retrieval.query"),
            read_checkpoint("llama", tmp_path / "llama"),
        )
