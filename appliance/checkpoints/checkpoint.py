"""What a checkpoint directory holds, read from headers alone: sizes, shapes and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.checkpoints import kv_layers, quantization
from appliance.checkpoints.families import BF16, UnsupportedModel, check_family
from appliance.checkpoints.kv_layers import KvLayers
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.safetensors import TensorEntry, read_header, weight_files
from appliance.checkpoints.task import AskedTask, read_task
from appliance.errors import CheckpointError
from appliance.platform.cpus import packs
from appliance.vocabulary import Task

BYTES_PER_ELEMENT: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The types a model can be computed in."""

_CONVERTED: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Stored types that are converted to the type computed in; the others stay as they are."""

_HEAD: Final = re.compile(r"(^|\.)lm_head\.weight$|^(output|embed_out)\.weight$")
"""What checkpoints call the output head."""
_HEAD_IS_EMBEDDING: Final = frozenset(
    {"Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM", "Gemma2ForCausalLM"}
)
"""Architectures that have no head, but use the embedding as one."""
_POSITIONS: Final = ("seq_length", "max_seq_len", "model_max_length", "max_sequence_length")
"""Further names, as vLLM reads them."""
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
    """Weights in all tensors: as many as there are elements, but for those that are quantized."""
    created: int
    """When the weights were written (Unix seconds)."""

    @property
    def kv_bytes_per_token(self) -> int:
        """What all layers keep of one more token, without what blocks and slabs round up."""
        return self.kv.attention * self.kv.token_bytes

    @property
    def state_bytes(self) -> int:
        """What all layers keep of one request besides, however long it is."""
        return self.kv.states * self.kv.state_bytes


def read_checkpoint(
    name: str, path: Path, dtype: str = "auto", task: AskedTask = "auto", *, cuda: bool = False
) -> CatalogEntry:
    """Describe the checkpoint in `path` as it will be served: on GPUs, if `cuda`, else on the CPU.

    `dtype` "auto" is the stored type, but bfloat16 for float32. The weights are without tensors
    that an engine leaves out, such as the output head of a model that embeds or scores. A head
    that is tied to the embedding is the embedding, whether the files have it or not, but where the
    CPU packs weights: rows for one, packed for the other.

    Raises `CheckpointError` when the directory, its ``config.json`` or a safetensors file is
    missing or damaged, or says something that cannot be served (`UnsupportedModel`, if no model
    of its kind is).
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    config = read_model_config(path)
    check_family(config)
    if not any(next(path.glob(name), None) for name in _TOKENIZERS):
        raise CheckpointError(
            f"{path} has no tokenizer: none of {', '.join(_TOKENIZERS)}; copy the model's there"
        )
    headers = [read_header(file) for file in weight_files(path)]
    resolved = _resolve_dtype(config, dtype, path)
    hidden = config.integer("hidden_size")
    vocabulary = config.integer("vocab_size")
    layers = kv_layers.layers(config)
    tensors = [tensor for header in headers for tensor in header.tensors]
    if wrong := quantization.why_not_shapes(config, tensors):
        raise UnsupportedModel(f"{path}: {wrong}", BF16)
    unused = quantization.unused(config, tensors)
    kept = [
        tensor for tensor in tensors if not (_is_left_out(tensor, layers) or tensor.name in unused)
    ]
    heads_stored = [tensor for tensor in kept if _HEAD.search(tensor.name)]
    weight_bytes = tensor_bytes(kept, resolved)
    generates, tied = read_task(path, task) is Task.GENERATE, config.get("tie_word_embeddings")
    if tied or not generates:
        weight_bytes -= tensor_bytes(heads_stored, resolved)
    packed_alone = config.architecture not in _HEAD_IS_EMBEDDING
    if tied and generates and packed_alone and not cuda and packs(resolved):
        width = config.integer("word_embed_proj_dim", default=hidden)
        weight_bytes += vocabulary * width * BYTES_PER_ELEMENT[resolved]
    return CatalogEntry(
        name=name,
        path=path,
        architecture=config.architecture,
        dtype=resolved,
        layers=layers,
        heads=kv_layers.heads(config),
        kv_heads=kv_layers.kv_heads(config),
        kv=kv_layers.kv_layers(config, BYTES_PER_ELEMENT[resolved], cuda=cuda),
        max_positions=config.integer("max_position_embeddings", default=config.first(*_POSITIONS)),
        weight_bytes=weight_bytes,
        parameters=quantization.parameters(config, tensors),
        created=max(header.mtime_ns for header in headers) // 10**9,
    )


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


def _resolve_dtype(config: ModelConfig, wanted: str, path: Path) -> str:
    if wanted != "auto":
        dtype = wanted
    else:
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        # What vLLM makes of "auto": weights stored in full are served in half the bytes.
        dtype = "bfloat16" if stored == "float32" else str(stored)
    if dtype not in BYTES_PER_ELEMENT:
        known = ", ".join(BYTES_PER_ELEMENT)
        raise CheckpointError(f"{path} cannot be served as {dtype}; there are {known}")
    return dtype
