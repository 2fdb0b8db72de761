"""Heads that draft a model's tokens: in its checkpoint (MTP), or in a folder of their own (EAGLE).

What they are and what they take is read from headers, before an engine is built.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, NamedTuple

from appliance.checkpoints.drafts import EAGLE3, IN_A_FOLDER, MTP, OTHERWISE, Speculation
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.kv_layers import head_dim, kv_heads, layers
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.quantized.quantization import said
from appliance.checkpoints.safetensors import TensorEntry, WeightFile, read_header, weight_files
from appliance.errors import CheckpointError

MTP_TRIED: Final = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"})
"""Architectures whose own heads `tests/engine/test_heads.py` drafts with."""
EAGLE_TRIED: Final = frozenset({"LlamaForCausalLM"})
"""Architectures that it drafts for with heads of a folder."""
EAGLE_HEADS: Final = frozenset(
    {
        "Eagle3LlamaForCausalLM",
        "EagleLlamaForCausalLM",
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
    }
)
"""What these heads call themselves: all are layers of Llama's kind."""

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")
_SHARED: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""What a head in a checkpoint shares with its model: a copy in the files is not loaded."""
_UNUSED: Final = "t2d"
"""A tensor of EAGLE-3 that says the same as another one."""
_TO_TARGET: Final = "d2t"
"""Which of the model's tokens those of a smaller vocabulary are."""


class UnsupportedHead(UnsupportedModel):
    """A head that is not there, or does not fit its model, and what to do instead."""


class DraftHead(NamedTuple):
    """A head that fits its model. Its layers keep as much of a token as the model's do."""

    layers: int
    tensors: tuple[TensorEntry, ...]
    """What it has besides what it shares with the model."""


def head_files(speculation: Speculation | None) -> list[WeightFile]:
    """The files of a head that has a folder of its own; none for any other. Raises
    `CheckpointError`."""
    if speculation is None or speculation.method not in IN_A_FOLDER:
        return []
    return [read_header(file) for file in weight_files(Path(speculation.path))]


def read_head(config: ModelConfig, speculation: Speculation) -> DraftHead:
    """The head that is to draft tokens of a model. Raises `UnsupportedHead` if it has none that
    fits and can be read, and `CheckpointError` for files of the model."""
    if speculation.method == MTP:
        return _own_head(config)
    try:
        head, files = read_model_config(Path(speculation.path)), head_files(speculation)
        found = _why_not(config, head, files, speculation)
    except (CheckpointError, OSError) as error:
        raise UnsupportedHead(str(error), f"take another head, or {OTHERWISE}") from error
    if found:
        raise UnsupportedHead(f"{speculation.path}: {found}", OTHERWISE)
    return DraftHead(layers(head), _tensors(files))


def _tensors(files: list[WeightFile]) -> tuple[TensorEntry, ...]:
    return tuple(one for file in files for one in file.tensors if one.name != _UNUSED)


def _own_head(config: ModelConfig) -> DraftHead:
    """In the checkpoint, as the layer that follows the others."""
    name, count = config.architecture, config.get("num_nextn_predict_layers")
    if not count:
        raise UnsupportedHead(
            f"{config.path}: there is no head in the checkpoint: config.json of {name} has no "
            "num_nextn_predict_layers",
            f"take another method, or {OTHERWISE}",
        )
    if name not in MTP_TRIED:
        raise UnsupportedHead(f"{config.path}: no test drafts with the head of {name}", OTHERWISE)
    if count != 1:
        raise UnsupportedHead(
            f"{config.path}: no test drafts with a head of {count} layers, only with one", OTHERWISE
        )
    first = layers(config)
    found = [
        tensor
        for file in weight_files(config.path)
        for tensor in read_header(file).tensors
        if (at := _LAYER.match(tensor.name)) is not None and int(at[1]) == first
    ]
    if not found:
        raise UnsupportedHead(
            f"{config.path}: the files lack the head that config.json names: no tensor is of "
            f"model.layers.{first}",
            f"copy all files of the checkpoint, or {OTHERWISE}",
        )
    return DraftHead(1, tuple(one for one in found if not one.name.endswith(_SHARED)))


def _why_not(
    config: ModelConfig, head: ModelConfig, files: list[WeightFile], asked: Speculation
) -> str:
    """Why a head of a folder does not fit the model; empty if it does."""
    method = asked.method
    if config.architecture not in EAGLE_TRIED:
        return f"no test drafts for {config.architecture} with {method}"
    if head.architecture not in EAGLE_HEADS:
        return f"no test drafts with heads of {head.architecture}, only of Llama's kind"
    if said(head) is not None:
        return "a quantized head was not tried"
    tensors = _tensors(files)
    names = {tensor.name.rpartition(".")[0] for tensor in tensors}
    if "fc" not in names:
        return f"this is no head for {method}: it has no fc.weight"
    if any(name.endswith(".hidden_norm") for name in names) is not (method == EAGLE3):
        return f"this is no head for {method}: its layer is of the other kind (eagle, eagle3)"
    if method != EAGLE3 and "lm_head" in names:
        return "it has an lm_head, but heads for eagle use that of the model"
    for key in ("hidden_size", "vocab_size"):
        if head.integer(key) != config.integer(key):
            return f"{key} is {head.integer(key)}, but {config.integer(key)} in the model"
    if _kv(head) != _kv(config):
        return (
            f"a layer keeps {_kv(head)} numbers of a token, one of the model's {_kv(config)}: "
            "they have to be equal"
        )
    drafted = head.get("draft_vocab_size") or head.integer("vocab_size")
    mapped = any(tensor.name == _TO_TARGET for tensor in tensors)
    if drafted != head.integer("vocab_size") and not mapped:
        return f"it knows {drafted} tokens and does not say which: it has no {_TO_TARGET}"
    return ""


def _kv(config: ModelConfig) -> int:
    """How many numbers a layer keeps of a token."""
    return math.prod((2, kv_heads(config), head_dim(config)))
