"""What a model is for, as its checkpoint says: to generate, to embed, to score or to transcribe
sound. Read from the small files next to the weights, as vLLM reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from appliance.checkpoints.architectures.chat_sounds import read_besides_text
from appliance.checkpoints.architectures.transcribers import TRANSCRIBERS
from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.errors import CheckpointError
from appliance.vocabulary import Task

AskedTask: TypeAlias = Literal["auto", "generate", "embed", "score", "transcription"]
PoolerValue: TypeAlias = str | int | float | bool
"""Of a key of vLLM's `PoolerConfig`."""

POOLING_TASKS: Final = {
    Task.EMBED: ("embed", "token_embed"),
    Task.SCORE: ("classify", "token_classify"),
}
"""vLLM's names for what prompts can be pooled to: all of a prompt, or each of its tokens."""

_SCORERS: Final = ("ForSequenceClassification",)
_REWARDERS: Final = ("ForRewardModel",)
"""They give a value for each token, and nothing else."""
_EMBEDDERS: Final = ("ForTextEncoding", "EmbeddingModel", "Model")
_GENERATORS: Final = ("LMHeadModel", "ChatModel", "ChatGLMModel")
_PER_TOKEN: Final = (
    "ProcessRewardModel",
    "RewardModeling",
    "ForTokenClassification",
    "ColBERT",
    "ColBERTModel",
)
"""Endings of the names of architectures."""

POOLING_ENDINGS: Final = (*_SCORERS, *_REWARDERS, *_EMBEDDERS, *_PER_TOKEN)
"""Those of models that pool prompts."""

_POOLING: Final = frozenset(
    {
        "sentence_transformers.models.Pooling",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    }
)
_DENSE: Final = frozenset(
    {
        "sentence_transformers.models.Dense",
        "sentence_transformers.base.modules.dense.Dense",
    }
)
"""Modules of sentence-transformers."""

_ACTIVATIONS: Final = (
    "gelu",
    "relu",
    "sigmoid",
    "silu",
    "tanh",
    "torch.nn.modules.linear.identity",
)
"""Of dense layers; all but the last may be called torch.nn.modules.activation.NAME, too."""
_FOLDER: Final = re.compile(r"\w[\w.-]*", re.ASCII)

_MODES: Final = {
    "cls": "cls",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "lasttoken",
    "pooling_mode_lasttoken": "lasttoken",
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
}
"""Older and newer names of ways to pool."""
_SEES_ALL: Final = frozenset({"cls", "lasttoken", "mean"})
_LOOKS_BACK: Final = _SEES_ALL - {"cls"}
"""Ways to pool: the first token says something of a prompt if it has seen the others."""


def read_task(path: Path, asked: AskedTask = "auto") -> Task:
    """What the checkpoint in `path` is for, whether or not it can be done here; `asked` is what it
    is to be for.

    Raises `CheckpointError` for files that cannot be read.
    """
    if asked != "auto":
        return Task(asked)
    config, modules = _files(path)
    return _own_task(config.architecture, modules)


def check_task(path: Path, asked: AskedTask = "auto") -> Task:
    """The same. Raises `CheckpointError` for what it cannot be for, or not here, too."""
    config, modules = _files(path)
    architecture = config.architecture
    task = _own_task(architecture, modules) if asked == "auto" else Task(asked)
    if architecture.endswith(_PER_TOKEN):
        raise CheckpointError(
            f"{path}: {architecture} gives values for tokens of a prompt in a way that is not "
            "computed here: of such models those called ForRewardModel are supported"
        )
    if architecture in MEDIA and task is not Task.GENERATE:
        raise CheckpointError(
            f"{path}: {architecture} reads {read_besides_text(architecture)}, of which the text "
            "that it generates is served, and nothing else: its task would have to be generate, "
            f"not {task}"
        )
    if architecture in TRANSCRIBERS and task is not Task.TRANSCRIPTION:
        raise CheckpointError(
            f"{path}: {architecture} makes text of sound, and nothing else: its task would have to "
            f"be transcription, not {task}"
        )
    if task is Task.TRANSCRIPTION and architecture not in TRANSCRIBERS:
        raise CheckpointError(
            f"{path}: {architecture} is not served for transcription, for which it would have to "
            f"be {' or '.join(sorted(TRANSCRIBERS))}"
        )
    if is_rewarder(architecture) and task is not Task.SCORE:
        raise CheckpointError(
            f"{path}: {architecture} gives a value for each token of a prompt, for which its task "
            f"would have to be score, not {task}"
        )
    if task is Task.SCORE and not architecture.endswith((*_SCORERS, *_REWARDERS)):
        raise CheckpointError(
            f"{path}: {architecture} gives no score, for which it would have to be a sequence "
            "classification"
        )
    if config.is_encoder and task is Task.GENERATE:
        raise CheckpointError(
            f"{path}: {architecture} attends in both directions: it can embed or score, not "
            "generate"
        )
    if task is Task.EMBED and architecture.endswith(_SCORERS):
        raise CheckpointError(
            f"{path}: {architecture} gives a score, for which its task would have to be score"
        )
    if task is Task.EMBED:
        _check_modules(path, modules, _SEES_ALL if config.is_encoder else _LOOKS_BACK)
    return task


def check_pooler(path: Path, task: Task, asked: Mapping[str, PoolerValue]) -> str:
    """What prompts of the checkpoint are pooled to, in vLLM's words; "" for a model that generates
    or transcribes.

    `asked` are keys of vLLM's `PoolerConfig`. Raises `PoolerRefused` for what the model cannot.
    """
    if not task.pools:
        for key in asked:
            raise PoolerRefused(key, "it generates text, and pools nothing", "leave it out")
        return ""
    config = read_model_config(path)
    architecture, first = config.architecture, config.is_encoder
    tasks = POOLING_TASKS[task][1:] if is_rewarder(architecture) else POOLING_TASKS[task]
    pooled = str(asked.get("task", tasks[0]))
    if pooled not in tasks:
        raise PoolerRefused(
            "task", f"{architecture} does not {pooled}", f"use {' or '.join(tasks)}"
        )
    each = pools_tokens(pooled)
    kind = asked.get("pooling_type")
    if kind is not None and (kind == "ALL") is not each:
        raise PoolerRefused(
            "pooling_type",
            f"{kind} is not for the task {pooled}",
            "use ALL" if each else f"use {', '.join(['CLS'] * first + ['LAST', 'MEAN'])}",
        )
    if kind == "CLS" and not first:
        raise PoolerRefused(
            "pooling_type", "its first token has not seen the others", "use LAST or MEAN"
        )
    for key, of in _KEYS_OF.items():
        if key in asked and pooled not in of:
            raise PoolerRefused(key, f"is not for the task {pooled}", "leave it out")
    if "max_embed_len" in asked and not asked.get("enable_chunked_processing"):
        raise PoolerRefused(
            "max_embed_len", "texts are not embedded in chunks", "set enable_chunked_processing"
        )
    return pooled


_KEYS_OF: Final = {
    "dimensions": ("embed", "token_embed"),
    "enable_chunked_processing": ("embed",),
    "max_embed_len": ("embed",),
    "logit_mean": ("classify", "token_classify"),
    "logit_sigma": ("classify", "token_classify"),
}
"""Keys of `PoolerConfig` that are for some tasks only."""


class PoolerRefused(ValueError):
    """A model does not pool as configured: the key, what is wrong with it, and the remedy."""

    def __init__(self, key: str, wrong: str, remedy: str) -> None:
        super().__init__(f"pooler_config.{key}: {wrong}; {remedy}")
        self.key = key
        self.wrong = wrong
        self.remedy = remedy


def dense_files(path: Path) -> list[Path]:
    """Weights of the dense layers that vectors go through behind the pooling, in their order; of a
    model of sentence-transformers in `path`.

    Raises `CheckpointError` for a layer without a folder of its own with weights as safetensors.
    """
    return _dense_files(path, _files(path)[1])


def _dense_files(path: Path, modules: list[Any]) -> list[Path]:
    files = []
    for module in modules:
        if module.get("type") not in _DENSE:
            continue
        folder = module.get("path")
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise CheckpointError(f"{path / 'modules.json'}: {folder!r} is no folder's name")
        if not (file := path / folder / "model.safetensors").is_file():
            raise CheckpointError(
                f"{path}: its vectors go through a layer in {file}: it is missing"
            )
        _check_dense(path / folder / "config.json")
        files.append(file)
    return files


def _check_dense(file: Path) -> None:
    """Raise `CheckpointError` for what vLLM cannot make a layer of: it would leave all out."""
    layer = _read(file, dict)
    for key in ("in_features", "out_features"):
        if type(layer.get(key)) is not int or layer[key] < 1:
            raise CheckpointError(f"{file}: {key} must be a positive integer")
    name = layer.get("activation_function")
    if name and str(name).lower().removeprefix("torch.nn.modules.activation.") not in _ACTIVATIONS:
        raise CheckpointError(
            f"{file}: the activation {name} is not supported; there are {', '.join(_ACTIVATIONS)}"
        )


def sentence_tokens(path: Path) -> int | None:
    """Tokens of the longest prompt, if the files of sentence-transformers in `path` say it. Raises
    `CheckpointError` for what is no number."""
    file, said = _sentences(path)
    if "max_seq_length" not in said:
        return None
    tokens = said["max_seq_length"]
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise CheckpointError(f"{file}: max_seq_length must be a positive integer, or left out")
    return tokens


def _sentences(path: Path) -> tuple[Path, dict[str, Any]]:
    """What sentence-transformers says of texts: the first of its files that says anything, as vLLM
    looks for them, and what that says."""
    for kind in _SENTENCE_KINDS:
        file = path / f"sentence_{kind}_config.json"
        if file.exists() and (said := _read(file, dict)):
            return file, said
    return path, {}


_SENTENCE_KINDS: Final = (
    "bert",
    "roberta",
    "distilbert",
    "camembert",
    "albert",
    "xlm-roberta",
    "xlnet",
)


def is_rewarder(architecture: str) -> bool:
    """Whether a model gives a value for each token of a prompt, and nothing else."""
    return architecture.endswith(_REWARDERS) and not architecture.endswith(_PER_TOKEN)


def pools_tokens(pooling_task: str) -> bool:
    """Whether one of vLLM's tasks gives something for each token of a prompt."""
    return pooling_task.startswith("token_")


def _files(path: Path) -> tuple[ModelConfig, list[Any]]:
    """config.json, and modules.json if there is one."""
    config = read_model_config(path)
    file = path / "modules.json"
    modules = _read(file, list) if file.exists() else []
    if not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file} is not a list of JSON objects")
    return config, modules


def _own_task(architecture: str, modules: list[Any]) -> Task:
    """Models of sentence-transformers embed, whatever they are called."""
    if architecture in TRANSCRIBERS:
        return Task.TRANSCRIPTION
    if any(module.get("type") in _POOLING for module in modules):
        return Task.EMBED
    if architecture.endswith((*_SCORERS, *_REWARDERS)):
        return Task.SCORE
    if architecture.endswith(_GENERATORS) or not architecture.endswith(_EMBEDDERS):
        return Task.GENERATE
    return Task.EMBED


def _check_modules(path: Path, modules: list[Any], supported: frozenset[str]) -> None:
    """Raise `CheckpointError` for modules of sentence-transformers that are not computed here."""
    file, said = _sentences(path)
    if said.get("do_lower_case") and "max_seq_length" not in said:
        raise CheckpointError(
            f"{file}: vLLM reads do_lower_case only next to max_seq_length, which is missing"
        )
    _dense_files(path, modules)
    for module in modules:
        kind = module.get("type")
        if kind not in _POOLING:
            continue
        pooling = _read(path / str(module.get("path", "")) / "config.json", dict)
        modes = {key for key, value in pooling.items() if value is True and "mode" in key}
        if isinstance(named := pooling.get("pooling_mode"), str):
            modes.add(named)
        found = {_MODES.get(mode, mode) for mode in modes}
        if len(found) > 1 or not found <= supported:
            raise CheckpointError(
                f"{path}: it pools by {' and '.join(sorted(modes))}, but is served only if it "
                f"pools by one of {', '.join(sorted(supported))}"
            )


def _read(file: Path, kind: type[Any]) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} has no {file.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise CheckpointError(f"{file} is not a JSON {'object' if kind is dict else 'list'}")
    return content
