"""What a checkpoint directory holds, read from headers alone: sizes, shapes and limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.checkpoints import kv_layers
from appliance.checkpoints.architectures import task_adapters
from appliance.checkpoints.architectures.suppressed_tokens import suppressed_tokens
from appliance.checkpoints.architectures.unequal_layers import (
    is_of_sharing_layer,
    keys_as_values,
    sharing_layers,
)
from appliance.checkpoints.families import BF16, UnsupportedModel, check_family
from appliance.checkpoints.kv_layers import KvLayers
from appliance.checkpoints.language_models import (
    MEDIA,
    image_tensors,
    image_token_bytes,
    language_tensors,
    processor_template,
    served_architecture,
)
from appliance.checkpoints.model_config import MOST, ModelConfig, read_model_config
from appliance.checkpoints.other_formats import UnreadableModel, refuse_other_formats
from appliance.checkpoints.quantized import quantization
from appliance.checkpoints.quantized.readers import why_not_whole
from appliance.checkpoints.safetensors import TensorEntry, read_header, weight_files
from appliance.checkpoints.task import AskedTask, dense_files, read_task, sentence_tokens
from appliance.errors import CheckpointError
from appliance.platform.cpus import packs
from appliance.vocabulary import Task

BYTES_PER_ELEMENT: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The types a model can be computed in."""

_CONVERTED: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Stored types that are converted to the type computed in; the others stay as they are."""

_NO_FLOAT16: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Types that vLLM does not compute in float16."""

_HEAD: Final = re.compile(r"(^|\.)lm_head\.weight$|^(output|embed_out|proj_out)\.weight$")
"""What checkpoints call the output head."""
_HEAD_IS_EMBEDDING: Final = frozenset(
    {
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CohereForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3nForCausalLM",
    }
)
"""Architectures that have no head, but use the embedding as one."""
_ALTUP: Final = re.compile(r"\.altup\.(modality_router|(prediction|correction)_coefs)\.weight$")
_SQUARE: Final = 64
_POSITIONS: Final = (
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_sequence_length",
    "max_target_positions",
)
"""Further names, as vLLM reads them."""
_TRAINED: Final = "max_trained_positions"
"""Of Nomic's encoders: longer prompts would be computed with embeddings of other bases."""
_UNLIMITED: Final = 1 << 30
"""Positions of a model that knows none."""
_DENSE_DTYPE: Final = "float32"
"""Of dense layers behind the pooling, whatever the model is computed in."""
_PADDED: Final = ("Roberta", "XLMRoberta")
_LAYER: Final = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
_LEFT_OUT: Final = re.compile(
    r"(^|[._])mtp[._]|\.rotary_(pos_emb\.inv_freq|emb\.(inv_freq|cos_cached|sin_cached))$"
)
"""Tensors that engines have no use for: layers that guess further tokens, which follow the others
or are called so, and what is computed from config.json."""

_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model*",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which vLLM makes a tokenizer, without code that comes with the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model as its checkpoint describes it. Sizes are bytes in `dtype`, for the whole model."""

    name: str
    path: Path
    architecture: str
    dtype: str
    layers: int
    heads: int
    kv_heads: int
    kv: KvLayers
    max_positions: int
    weight_bytes: int
    """Where it is served, at least: an engine pads. See `read_checkpoint`."""
    parameters: int
    """Weights in all tensors but those that read images: as many as there are elements, but for
    those that are quantized."""
    created: int
    """When the weights were written (Unix seconds)."""
    multiplied: str = ""
    """The method of weights that take the memory of `dtype`, though they are stored in less:
    ``mxfp4``, say. Empty for others."""
    images: int = 0
    """The most of a prompt; where `sounds` is 0 as well, the language model is served alone."""
    sounds: int = 0
    """The most of a chat's prompt."""
    image_token_bytes: int = 0
    """Of the encoder's output for each token of an image or a sound."""

    @property
    def kv_bytes_per_token(self) -> int:
        """What all layers keep of one more token, without what blocks and slabs round up."""
        return self.kv.all_token_bytes

    @property
    def window_kv_bytes_per_token(self) -> int:
        """How much of that is kept for the last tokens only, by layers that attend to a window."""
        return self.kv.windowed_token_bytes

    @property
    def state_bytes(self) -> int:
        """What all layers keep of one request besides, however long it is."""
        encoded = self.kv.encoded * self.kv_bytes_per_token
        return self.kv.states * self.kv.state_bytes + encoded


def read_checkpoint(
    name: str,
    path: Path,
    dtype: str = "auto",
    task: AskedTask = "auto",
    *,
    cuda: bool = False,
    images: int = 0,
    sounds: int = 0,
) -> CatalogEntry:
    """Describe the checkpoint in `path` as it will be served: on GPUs, if `cuda`, else on the CPU.

    `dtype` "auto" is the stored type, but bfloat16 for float32. The weights are without tensors
    that an engine leaves out, such as the output head of a model that embeds or scores, or what
    reads images. A head that is tied to the embedding is the embedding, whether the files have it
    or not, but where the CPU packs weights: rows for one, packed for the other. What reads images
    or sounds is counted if prompts may have some.

    Raises `CheckpointError` when the directory, its ``config.json`` or a safetensors file is
    missing or damaged, or says something that cannot be served (`UnsupportedModel`, if no model
    of its kind is).
    """
    config = _checked_config(path)
    architecture = config.architecture
    files = [read_header(file) for file in weight_files(path)]
    headers = [language_tensors(file, architecture) for file in files]
    resolved = _resolve_dtype(config, dtype, path)
    tensors = [tensor for header in headers for tensor in header.tensors]
    if wrong := quantization.why_not_tensors(config, tensors):
        raise UnsupportedModel(f"{path}: {wrong}", BF16)
    if wrong := task_adapters.why_not_tensors(config, tensors):
        raise UnsupportedModel(f"{path}: {wrong}", "take another copy of the checkpoint")
    kept = _kept(config, tensors)
    own_task = read_task(path, task)
    weight_bytes = _weight_bytes(config, kept, resolved, own_task, cuda=cuda)
    media = "images" if images else "sounds" if sounds else ""
    readers = image_tensors(files, config) if media else []
    if media and (wrong := why_not_whole(config, tensors, readers)):
        raise UnsupportedModel(f"{path}: {wrong}", f"use {media} = 0, or take another checkpoint")
    weight_bytes += tensor_bytes(readers, resolved)
    return CatalogEntry(
        name=name,
        path=path,
        architecture=architecture,
        dtype=resolved,
        layers=kv_layers.layers(config),
        heads=kv_layers.heads(config),
        kv_heads=kv_layers.kv_heads(config),
        kv=kv_layers.kv_layers(config, BYTES_PER_ELEMENT[resolved], cuda=cuda),
        max_positions=_max_positions(config, pools=own_task.pools),
        weight_bytes=weight_bytes,
        parameters=quantization.parameters(config, tensors) + elements(readers),
        created=max(header.mtime_ns for header in headers) // 10**9,
        multiplied=quantization.method_of(stored)
        if (stored := quantization.multiplied(config))
        else "",
        images=images,
        sounds=sounds,
        image_token_bytes=image_token_bytes(config, BYTES_PER_ELEMENT[resolved]) if media else 0,
    )


def _checked_config(path: Path) -> ModelConfig:
    """The configuration of a kind of model that is served, with the files that front ends read."""
    refuse_other_formats(path)
    config = read_model_config(path)
    check_family(config)
    if not any(next(path.glob(name), None) for name in _TOKENIZERS):
        wrong = f"{path} has no tokenizer: none of {', '.join(_TOKENIZERS)}"
        raise UnreadableModel(wrong, "copy the model's there")
    processor_template(path)
    suppressed_tokens(config)
    return config


def _weight_bytes(
    config: ModelConfig, kept: Sequence[TensorEntry], dtype: str, task: Task, *, cuda: bool
) -> int:
    """What the tensors take that are kept of a model of text, and what is made besides of them."""
    heads = [tensor for tensor in kept if _HEAD.search(tensor.name)]
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    weight_bytes = tensor_bytes(kept, dtype) + tensor_bytes(keys_as_values(config, kept), dtype)
    weight_bytes += quantization.widened_bytes(config, kept, BYTES_PER_ELEMENT[dtype])
    tied, generates = config.get("tie_word_embeddings"), not task.pools
    if config.architecture in MEDIA:  # the file says it in one of two places, or in neither
        tied = not heads
    if tied or not generates:
        weight_bytes -= tensor_bytes(heads, dtype)
        weight_bytes -= quantization.widened_bytes(config, heads, BYTES_PER_ELEMENT[dtype])
    packed_alone = served_architecture(config) not in _HEAD_IS_EMBEDDING
    if tied and generates and packed_alone and not cuda and packs(dtype):
        width = config.integer("word_embed_proj_dim", default=hidden)
        weight_bytes += vocabulary * width * BYTES_PER_ELEMENT[dtype]
    if not cuda and packs(dtype):
        weight_bytes += _padding(kept, BYTES_PER_ELEMENT[dtype])
    return weight_bytes + (_dense_bytes(config.path) if task is Task.EMBED else 0)


def _padding(kept: Iterable[TensorEntry], number_bytes: int) -> int:
    """Bytes by which packed matrices are larger that Gemma 3n has for its few streams (AltUp): they
    are packed in squares of 64 rows and as many bytes, and have fewer."""
    total = 0
    for tensor in kept:
        if _ALTUP.search(tensor.name):
            rows, columns = tensor.shape
            padded = -(-rows // _SQUARE) * -(-columns * number_bytes // _SQUARE) * _SQUARE**2
            total += padded - rows * columns * number_bytes
    return total


def _dense_bytes(path: Path) -> int:
    """Of dense layers behind the pooling."""
    headers = [read_header(file) for file in dense_files(path)]
    return tensor_bytes((tensor for file in headers for tensor in file.tensors), _DENSE_DTYPE)


def _max_positions(config: ModelConfig, *, pools: bool) -> int:
    """Tokens of the longest prompt. RoBERTa's positions begin behind that of padding. Of models
    that pool, the tokenizer and sentence-transformers may say less than config.json. Layers that
    only keep a state know no positions: without a number, there is no limit."""
    said = config.first(*_POSITIONS)
    if said is None and not kv_layers.attention_layers(config):
        said = _UNLIMITED
    most = config.integer("max_position_embeddings", default=said)
    most = min(config.integer(key, default=most) for key in ("n_positions", _TRAINED))
    if config.architecture.startswith(_PADDED):
        padding = config.get("pad_token_id")
        most -= 1 + (padding if isinstance(padding, int) else 1)
    if pools and config.get("position_embedding_type") == "absolute":  # vLLM asks for it then only
        most = min(most, _tokenizer_tokens(config.path) or most)
    return min(most, sentence_tokens(config.path) or most)


def _tokenizer_tokens(path: Path) -> int | None:
    """Tokens of the longest prompt, if the tokenizer's configuration says it. Raises
    `CheckpointError` for a file that cannot be read."""
    file = path / "tokenizer_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    tokens = found.get("model_max_length") if isinstance(found, dict) else None
    return int(tokens) if isinstance(tokens, int | float) and 1 <= tokens < MOST else None


def _kept(config: ModelConfig, tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Those of a model of text that an engine has a use for."""
    layers, unused = kv_layers.layers(config), quantization.unused(config, tensors)
    own = layers - sharing_layers(config)
    return [
        tensor
        for tensor in tensors
        if not (
            _is_left_out(tensor, layers)
            or tensor.name in unused
            or task_adapters.is_adapter(tensor.name)
            or is_of_sharing_layer(tensor.name, own)
        )
    ]


def _is_left_out(tensor: TensorEntry, layers: int) -> bool:
    layer = _LAYER.match(tensor.name)
    return bool(_LEFT_OUT.search(tensor.name)) or (layer is not None and int(layer[1]) >= layers)


def tensor_bytes(tensors: Iterable[TensorEntry], dtype: str) -> int:
    """Bytes that tensors take once floats are converted to `dtype`."""
    return sum(
        math.prod(tensor.shape) * BYTES_PER_ELEMENT[dtype]
        if tensor.dtype in _CONVERTED
        else tensor.nbytes
        for tensor in tensors
    )


def elements(tensors: Iterable[TensorEntry]) -> int:
    """How many numbers tensors have."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _resolve_dtype(config: ModelConfig, wanted: str, path: Path) -> str:
    no_float16 = config.model_type in _NO_FLOAT16
    if wanted != "auto":
        dtype = wanted
    else:
        whole = config.whole.get("dtype") or config.whole.get("torch_dtype")
        stored = whole or config.get("dtype") or config.get("torch_dtype") or "float32"
        # What vLLM makes of "auto": weights stored in full are served in half the bytes.
        other = stored == "float32" or (stored == "float16" and no_float16)
        dtype = "bfloat16" if other else str(stored)
    if dtype == "float16" and no_float16:
        raise CheckpointError(
            f'{path}: {config.model_type} loses too much in float16; take dtype = "bfloat16"'
        )
    if dtype not in BYTES_PER_ELEMENT:
        known = ", ".join(BYTES_PER_ELEMENT)
        raise CheckpointError(f"{path} cannot be served as {dtype}; there are {known}")
    return dtype
