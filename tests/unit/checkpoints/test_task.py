"""What a checkpoint is for is read from its small files, and what cannot be served is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.task import (
    AskedTask,
    PoolerRefused,
    PoolerValue,
    check_pooler,
    check_task,
)
from appliance.config.loader import load_config
from appliance.errors import CheckpointError, ConfigError
from appliance.vocabulary import Task

Make = Callable[..., Path]
LAST = {"pooling_mode_lasttoken": True, "include_prompt": True}


def modules(path: Path, pooling: dict[str, Any], *more: str) -> None:
    """What sentence-transformers puts beside the weights."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **{f"2_{kind}": kind for kind in more}}
    listed = [
        {"path": folder, "type": f"sentence_transformers.models.{kind}"}
        for folder, kind in kinds.items()
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("architecture", "config", "task"),
    [
        ("LlamaForCausalLM", {}, Task.GENERATE),
        ("GPT2LMHeadModel", {}, Task.GENERATE),
        ("ChatGLMModel", {}, Task.GENERATE),
        ("WhisperForConditionalGeneration", {"model_type": "whisper"}, Task.TRANSCRIPTION),
        ("Qwen3Model", {}, Task.EMBED),
        ("Qwen3ForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, Task.SCORE),
        ("LlamaForSequenceClassification", {"num_labels": 1}, Task.SCORE),
        ("LlamaForSequenceClassification", {"num_labels": 3}, Task.SCORE),
    ],
)
def test_the_architecture_tells(
    fake_checkpoint: Make, architecture: str, config: dict[str, Any], task: Task
) -> None:
    """As vLLM goes by its name, if nothing else is said."""
    path = fake_checkpoint(architectures=[architecture], **config)

    assert check_task(path) is task


def test_sentence_transformers_embed(fake_checkpoint: Make) -> None:
    """Whatever the architecture generates, unless the configuration says otherwise."""
    path = fake_checkpoint()
    modules(path, LAST, "Normalize")

    assert check_task(path) is Task.EMBED
    assert check_task(path, "generate") is Task.GENERATE


def test_the_configuration_decides(fake_checkpoint: Make) -> None:
    """A model that generates can be told to embed, but not to score."""
    path = fake_checkpoint()

    assert check_task(path, "embed") is Task.EMBED
    with pytest.raises(CheckpointError, match="gives no score"):
        check_task(path, "score")


def test_sound_is_transcribed_by_what_hears_it_alone(fake_checkpoint: Make) -> None:
    whisper = fake_checkpoint("whisper", architectures=["WhisperForConditionalGeneration"])

    assert check_task(whisper, "transcription") is Task.TRANSCRIPTION
    with pytest.raises(CheckpointError, match="would have to be transcription, not generate"):
        check_task(whisper, "generate")
    with pytest.raises(CheckpointError, match="LlamaForCausalLM is not served for transcription"):
        check_task(fake_checkpoint(), "transcription")


@pytest.mark.parametrize("asked", ["auto", "embed", "generate"])
@pytest.mark.parametrize(
    "architecture", ["Qwen2ForProcessRewardModel", "HF_ColBERT", "BertForTokenClassification"]
)
def test_values_for_each_token_are_refused(
    fake_checkpoint: Make, architecture: str, asked: AskedTask
) -> None:
    """Before an engine is built, whatever the configuration says."""
    path = fake_checkpoint(architectures=[architecture])

    with pytest.raises(CheckpointError, match=f"{architecture} gives values for tokens"):
        check_task(path, asked)


def test_a_reward_model_scores_tokens(fake_checkpoint: Make) -> None:
    """Each of a prompt, and does nothing else."""
    path = fake_checkpoint(architectures=["Qwen2ForRewardModel"])

    assert check_task(path) is Task.SCORE
    assert check_pooler(path, Task.SCORE, {}) == "token_classify"
    with pytest.raises(PoolerRefused, match=r"pooler_config.task: .* does not classify"):
        check_pooler(path, Task.SCORE, {"task": "classify"})
    for asked in ("embed", "generate"):
        with pytest.raises(CheckpointError, match=f"have to be score, not {asked}"):
            check_task(path, asked)


@pytest.mark.parametrize(
    ("task", "asked", "pooled"),
    [
        (Task.GENERATE, {}, ""),
        (Task.TRANSCRIPTION, {}, ""),
        (Task.EMBED, {}, "embed"),
        (Task.EMBED, {"task": "token_embed", "pooling_type": "ALL"}, "token_embed"),
        (Task.EMBED, {"enable_chunked_processing": True, "max_embed_len": 9000}, "embed"),
        (Task.SCORE, {"logit_mean": 0.5}, "classify"),
        (Task.SCORE, {"task": "token_classify"}, "token_classify"),
    ],
)
def test_a_pooler_does_what_is_configured(
    fake_checkpoint: Make, task: Task, asked: dict[str, PoolerValue], pooled: str
) -> None:
    """If its model can."""
    assert check_pooler(fake_checkpoint(), task, asked) == pooled


@pytest.mark.parametrize(
    ("task", "asked", "why"),
    [
        (Task.GENERATE, {"dimensions": 8}, "dimensions: it generates text"),
        (Task.EMBED, {"task": "classify"}, "task: .* does not classify; use embed or token_embed"),
        (Task.SCORE, {"task": "embed"}, "task: .* does not embed; use classify or token_classify"),
        (Task.EMBED, {"pooling_type": "ALL"}, "pooling_type: ALL is not for the task embed"),
        (
            Task.EMBED,
            {"task": "token_embed", "pooling_type": "MEAN"},
            "pooling_type: MEAN is not for the task token_embed; use ALL",
        ),
        (Task.SCORE, {"dimensions": 8}, "dimensions: is not for the task classify"),
        (Task.EMBED, {"logit_sigma": 2.0}, "logit_sigma: is not for the task embed"),
        (Task.EMBED, {"max_embed_len": 99}, "max_embed_len: .*set enable_chunked_processing"),
    ],
)
def test_a_pooler_that_is_impossible_is_refused_with_the_reason(
    fake_checkpoint: Make, task: Task, asked: dict[str, PoolerValue], why: str
) -> None:
    """By the key, with the remedy."""
    with pytest.raises(PoolerRefused, match=why):
        check_pooler(fake_checkpoint(), task, asked)


def test_the_first_token_may_stand_for_a_prompt(fake_checkpoint: Make) -> None:
    """If it has seen the others, as those of BERT have."""
    path = fake_checkpoint(architectures=["BertModel"], model_type="bert")
    modules(path, {"pooling_mode_cls_token": True})

    assert check_task(path) is Task.EMBED
    assert check_pooler(path, Task.EMBED, {"pooling_type": "CLS"}) == "embed"
    with pytest.raises(PoolerRefused, match="use CLS, LAST, MEAN"):
        check_pooler(path, Task.EMBED, {"pooling_type": "ALL"})
    with pytest.raises(PoolerRefused, match="has not seen the others; use LAST or MEAN"):
        check_pooler(fake_checkpoint("other"), Task.EMBED, {"pooling_type": "CLS"})


@pytest.mark.parametrize(
    ("architecture", "asked", "why"),
    [
        ("BertModel", "generate", "can embed or score, not generate"),
        ("BertForSequenceClassification", "generate", "can embed or score, not generate"),
        ("BertForSequenceClassification", "embed", "would have to be score"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(
    fake_checkpoint: Make, architecture: str, asked: AskedTask, why: str
) -> None:
    path = fake_checkpoint(architectures=[architecture], model_type="bert")

    with pytest.raises(CheckpointError, match=why):
        check_task(path, asked)


@pytest.mark.parametrize(
    ("config", "said", "tokens"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, None, 512),
        ({"architectures": ["BertModel"], "model_type": "bert"}, {"max_seq_length": 256}, 256),
        ({"architectures": ["BertModel"], "model_type": "bert"}, {"max_seq_length": 4096}, 512),
        ({"architectures": ["RobertaModel"], "model_type": "roberta"}, {}, 510),
        (
            {"architectures": ["RobertaModel"], "model_type": "roberta", "pad_token_id": 0},
            {},
            511,
        ),
    ],
)
def test_a_prompt_is_as_long_as_positions_reach(
    fake_checkpoint: Make, config: dict[str, Any], said: dict[str, Any] | None, tokens: int
) -> None:
    """RoBERTa's begin behind that of padding; sentence-transformers may say less."""
    path = fake_checkpoint(**config, max_position_embeddings=512)
    if said is not None:
        (path / "sentence_roberta_config.json").write_text(json.dumps(said))

    assert read_checkpoint("tiny", path).max_positions == tokens


def test_dense_layers_have_folders_of_their_own(fake_checkpoint: Make) -> None:
    """Within the checkpoint's; their weights are counted."""
    path = fake_checkpoint()
    modules(path, LAST, "Dense")
    (path / "2_Dense").mkdir()
    save_file(
        {"linear.weight": np.zeros((256, 64), np.float32)}, path / "2_Dense" / "model.safetensors"
    )

    described = {
        "in_features": 64,
        "out_features": 256,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (path / "2_Dense" / "config.json").write_text(json.dumps(described))

    assert check_task(path) is Task.EMBED
    with_dense = read_checkpoint("tiny", path)
    listed = json.loads((path / "modules.json").read_text())
    (path / "modules.json").write_text(json.dumps(listed[:-1]))
    without = read_checkpoint("tiny", path)
    assert with_dense.weight_bytes - without.weight_bytes == 256 * 64 * 4
    for folder in ("../2_Dense", "", ".", None):
        (path / "modules.json").write_text(
            json.dumps([*listed[:-1], listed[-1] | {"path": folder}])
        )
        with pytest.raises(CheckpointError, match="is no folder's name"):
            check_task(path)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (None, "2_Dense has no config.json"),
        ({"in_features": 64}, "out_features must be a positive integer"),
        (
            {"in_features": 64, "out_features": 64, "activation_function": "identity"},
            "activation identity is not supported",
        ),
        ({"in_features": 0, "out_features": 64}, "in_features must be a positive integer"),
        (
            {
                "in_features": 64,
                "out_features": 64,
                "activation_function": "torch.nn.modules.activation.LeakyReLU",
            },
            "activation torch.nn.modules.activation.LeakyReLU is not supported; there are gelu",
        ),
    ],
)
def test_a_dense_layer_that_vllm_would_leave_out_is_refused(
    fake_checkpoint: Make, layer: dict[str, Any] | None, why: str
) -> None:
    """It logs what it cannot make, and vectors would be others."""
    path = fake_checkpoint()
    modules(path, LAST, "Dense")
    (path / "2_Dense").mkdir()
    save_file({"weight": np.zeros((64, 64), np.float32)}, path / "2_Dense" / "model.safetensors")
    if layer is not None:
        (path / "2_Dense" / "config.json").write_text(json.dumps(layer))

    with pytest.raises(CheckpointError, match=why):
        check_task(path)


@pytest.mark.parametrize(
    ("config", "task", "tokens"),
    [
        ({"position_embedding_type": "absolute"}, "embed", 256),
        ({"position_embedding_type": "absolute"}, "generate", 512),
        ({}, "embed", 512),
    ],
)
def test_the_tokenizer_may_say_how_long_a_prompt_is(
    fake_checkpoint: Make, config: dict[str, Any], task: AskedTask, tokens: int
) -> None:
    """Under the conditions under which vLLM asks it."""
    path = fake_checkpoint(**config, max_position_embeddings=512)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({"model_max_length": 256}))
    assert read_checkpoint("tiny", path, task=task).max_positions == tokens
    file.write_text(json.dumps({"model_max_length": 1e30}))
    assert read_checkpoint("tiny", path, task=task).max_positions == 512


@pytest.mark.parametrize("wrong", [0, True, "512", None])
def test_a_length_that_is_no_number_is_named(fake_checkpoint: Make, wrong: object) -> None:
    path = fake_checkpoint()
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": wrong}))

    with pytest.raises(CheckpointError, match="max_seq_length must be a positive integer"):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("pooling", "more", "why"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pools by pooling_mode_max_tokens"),
        ({"pooling_mode": "cls"}, (), "pools by cls"),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            (),
            "pools by pooling_mode_lasttoken and pooling_mode_mean_tokens, but",
        ),
        (LAST, ("Dense",), r"through a layer in .*2_Dense/model.safetensors: it is missing"),
    ],
)
def test_what_is_not_computed_is_named(
    fake_checkpoint: Make, pooling: dict[str, Any], more: tuple[str, ...], why: str
) -> None:
    """Before any engine is built."""
    path = fake_checkpoint()
    modules(path, pooling, *more)

    with pytest.raises(CheckpointError, match=why):
        check_task(path)


def test_texts_are_read_as_the_model_wants_them(fake_checkpoint: Make) -> None:
    """In small letters, if vLLM learns of it."""
    path = fake_checkpoint()
    modules(path, LAST)
    beside = path / "sentence_bert_config.json"
    beside.write_text(json.dumps({"max_seq_length": 512, "do_lower_case": True}))
    assert check_task(path) is Task.EMBED
    beside.write_text(json.dumps({"do_lower_case": True}))

    with pytest.raises(CheckpointError, match="do_lower_case"):
        check_task(path)


def test_damage_is_named(fake_checkpoint: Make) -> None:
    """A file that is no JSON, or not the right kind of it."""
    path = fake_checkpoint()
    (path / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"modules\.json is not a JSON list"):
        check_task(path)
    (path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        check_task(path)
    (path / "modules.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"modules\.json is not a list of JSON objects"):
        check_task(path)


@pytest.mark.parametrize("names", [7, "Llama", {"a": 1}, [None], ["\ud800"], ["no name"]])
def test_architectures_that_are_none(fake_checkpoint: Make, names: object) -> None:
    """Are named by whoever reads them."""
    path = fake_checkpoint(architectures=names)
    for read in (check_task, lambda path: read_checkpoint("a", path)):
        with pytest.raises(CheckpointError, match=r"architectures is not a list of names"):
            read(path)


def test_a_configuration_is_checked(fake_checkpoint: Make, tmp_path: Path) -> None:
    """With the line of the model."""
    fake_checkpoint(architectures=["Qwen2ForProcessRewardModel"])
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nmemory = "8MiB"\n[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\n'
    )

    with pytest.raises(ConfigError, match="gives values for tokens"):
        load_config(file)


def test_a_pooler_of_a_configuration_is_checked(fake_checkpoint: Make, tmp_path: Path) -> None:
    """With its key, and the remedy."""
    fake_checkpoint()
    file = tmp_path / "appliance.toml"
    text = '[devices]\nmemory = "8MiB"\n[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\n'
    file.write_text(text + 'task = "embed"\npooler_config = { pooling_type = "STEP" }\n')
    with pytest.raises(ConfigError, match=r"pooler_config.pooling_type: 'STEP' is not a choice"):
        load_config(file)
    file.write_text(text + 'task = "embed"\npooler_config = { normalize = true }\n')
    with pytest.raises(ConfigError, match=r"pooler_config.normalize: unknown key"):
        load_config(file)
    file.write_text(text + 'task = "embed"\npooler_config = { task = "classify" }\n')
    with pytest.raises(ConfigError, match=r"pooler_config.task: .* does not classify"):
        load_config(file)
    file.write_text(text + 'task = "embed"\npooler_config = { task = "token_embed" }\n')

    (model,) = load_config(file).models

    assert model.pooler_config.chosen == {"task": "token_embed"}
