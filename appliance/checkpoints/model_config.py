"""A checkpoint's ``config.json``, read as transformers reads it: each type of model has names of
its own for some keys, and defaults for those that are left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from appliance.errors import CheckpointError

CONFIG: Final = "config.json"
VLLM_NAMES: Final = {
    "ExaoneMoeForCausalLM": "ExaoneMoEForCausalLM",
    "NewForSequenceClassification": "GteNewForSequenceClassification",
    "NewModel": "GteNewModel",
}
"""What vLLM calls architectures that files call otherwise, or has two names for."""
_MISTRAL_CONFIG: Final = "params.json"
MOST: Final = 1 << 40
"""No number that a model is made of is as large."""
MOST_LAYERS: Final = 1 << 12
"""No model has as many layers."""
ONE_RANK: Final = "take tensor_parallel = 1, in [devices] or in the groups of the model"
ANOTHER: Final = "take a model of another family: docs/models.md lists those that are served"
"""The remedy where nothing about a checkpoint could be changed."""


class ModelType(msgspec.Struct, frozen=True):
    """What transformers knows of a `model_type`."""

    names: dict[str, str] = {}
    """What the file calls keys that are called otherwise here."""
    defaults: dict[str, int | bool] = {}
    encoder: bool = False
    """Whether tokens attend to those behind them."""
    mla: bool = False
    """Whether layers keep compressed KV, if the file says how large that is."""
    unequal: bool = False
    """Whether layers differ in the keys and values that they keep."""
    text: str = ""
    """The type of its language model, if that is another one and the file does not say it."""


class KnownModels(msgspec.Struct, frozen=True):
    """What vLLM and transformers know, as `appliance.frontend.known_models` writes it."""

    architectures: dict[str, tuple[str, ...]]
    """What is special about each: `state` (layers keep something else than keys and values),
    `media` (it reads images or sound as well: `images`, `sound`, as far as that is known), `cross`
    (its decoder attends to what an encoder made of them), `pooling` (it does not generate),
    `torchvision` (vLLM imports it with the architecture's code), `libraries` (vLLM needs others for
    it that are not installed)."""
    removed: dict[str, str]
    """Architectures that earlier versions of vLLM had: the last version with each."""
    endings: tuple[str, ...]
    """Of the names of architectures, in the order in which vLLM replaces one by another."""
    types: dict[str, ModelType]
    parsers: dict[str, tuple[str, ...]]
    """Names of vLLM's parsers, by the key of a model's table: `tool_parser`, `reasoning_parser`."""


@cache
def known_models() -> KnownModels:
    file = resources.files(__package__).joinpath("known_models.json")
    return msgspec.json.decode(file.read_bytes(), type=KnownModels)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Of the checkpoint at `path`: the whole file, and the part about the language model."""

    path: Path
    whole: dict[str, Any]
    text: dict[str, Any]
    """The same, but for models with several modalities, which keep it one level down."""

    @property
    def model_type(self) -> str:
        """Of the language model; empty if the file does not say it."""
        whole, own = self.whole.get("model_type"), self.text.get("model_type")
        if own is None or self.text is self.whole:
            known = known_models().types.get(str(whole))
            own = (known.text if known is not None else "") or whole
        return own if isinstance(own, str) else ""

    @property
    def architecture(self) -> str:
        """The first one that the file names, as vLLM calls it. Raises `CheckpointError` for what is
        no list of names."""
        names = self.whole.get("architectures") or ["unknown"]
        if not (isinstance(names, list) and isinstance(names[0], str) and names[0].isidentifier()):
            raise CheckpointError(f"{self.path}/{CONFIG}: architectures is not a list of names")
        return VLLM_NAMES.get(names[0], names[0])

    @property
    def is_encoder(self) -> bool:
        """Whether tokens attend to those behind them, too. Such a model embeds or scores."""
        known = known_models().types.get(self.model_type)
        return (
            (known is not None and known.encoder)
            or self.get("is_causal") is False
            or "Bidirectional" in self.architecture
            or self.get("use_bidirectional_attention") in (True, "all")
        )

    def get(self, key: str) -> Any:
        """The value of a key of the language model, by transformers' usual name for it. None if
        there is none."""
        known = known_models().types.get(self.model_type, ModelType())
        for name in (key, known.names.get(key, key)):
            for values in (self.text, self.whole):
                if name in values:
                    return values[name]
        return known.defaults.get(key)

    def first(self, *keys: str) -> Any:
        """The value of the first of these keys that has one."""
        return next((value for key in keys if (value := self.get(key)) is not None), None)

    def integer(self, key: str, default: int | None = None) -> int:
        """The same for a positive number. Raises `CheckpointError` for anything else."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST:
            raise CheckpointError(f"{self.path / CONFIG}: {key} must be a positive integer")
        return value


def read_model_config(path: Path) -> ModelConfig:
    """Read ``config.json`` of the checkpoint in `path`. Raises `CheckpointError` for a file that is
    not there, or is no JSON object."""
    file = path / CONFIG
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (path / _MISTRAL_CONFIG).exists():
            raise CheckpointError(
                f"{path} has {_MISTRAL_CONFIG}, which is Mistral's own format, and no {CONFIG}; "
                "take the checkpoint in the format of transformers"
            ) from error
        raise CheckpointError(f"{path} has no {CONFIG}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(whole, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    text = whole.get("text_config")
    return ModelConfig(path, whole, text if isinstance(text, dict) else whole)
