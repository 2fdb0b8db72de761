"""Adapters that come inside a checkpoint, one for each task (Jina's embeddings v3): which tasks
there are, which one is served, and the tensors of each matrix.

    encoder.layers.0.mlp.fc1.parametrizations.weight.original    [out, in]
    encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_A    [tasks, rank, in]
    encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B    [tasks, out, rank]

With the adapter of a task, a matrix is the original one plus ``lora_alpha / lora_rank * B @ A``. Of
an embedding, whose rows are tokens, A and B change places: ``A @ B``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.safetensors import TensorEntry

KEY: Final = "lora_adaptations"
"""Of config.json: the tasks, in the order of their adapters."""

_ORIGINAL: Final = ".parametrizations.weight.original"
_A: Final = ".parametrizations.weight.0.lora_A"
_B: Final = ".parametrizations.weight.0.lora_B"
_EMBEDDING: Final = "embeddings"
"""In the names of matrices whose rows are tokens, as vLLM knows them."""
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_MOST_TASKS: Final = 64
_LONGEST: Final = 64
"""Characters of a task's name."""


class TaskRefused(ValueError):
    """A model has no adapter for the task that is configured: what is wrong, and the remedy."""

    def __init__(self, wrong: str, remedy: str) -> None:
        super().__init__(f"embedding_task: {wrong}; {remedy}")
        self.wrong = wrong
        self.remedy = remedy


class AdaptedMatrix(NamedTuple):
    """A matrix with adapters: `name` is what the checkpoint would call the result, which is
    ``original + factor * left[task] @ right[task]``."""

    name: str
    original: TensorEntry
    left: TensorEntry
    """[tasks, rows, rank]"""
    right: TensorEntry
    """[tasks, rank, columns]"""

    @property
    def rank(self) -> int:
        return self.right.shape[1]


def tasks(config: ModelConfig) -> tuple[str, ...]:
    """Those that a checkpoint has adapters for, in their order; none for most checkpoints."""
    found = config.get(KEY)
    return tuple(found) if isinstance(found, list) else ()


def served_task(config: ModelConfig, asked: str) -> str:
    """The task that is served if `asked` is configured. Of "", that is the last one, as with vLLM
    (Jina's is text-matching), and "" for a model without tasks. Raises `TaskRefused`."""
    known = tasks(config)
    if not known:
        if asked:
            raise TaskRefused("the model has no adapters of tasks", "leave it out")
        return ""
    if asked and asked not in known:
        raise TaskRefused(f"the model has no adapter for {asked!r}", f"use {', '.join(known)}")
    return asked or known[-1]


def factor(config: ModelConfig) -> float:
    """What products of adapters are multiplied with."""
    return float(config.get("lora_alpha") / config.integer("lora_rank"))


def why_not(config: ModelConfig) -> str:
    """What a file says of adapters that is not computed; empty for others."""
    found = config.get(KEY)
    if found is None:
        return ""
    named = isinstance(found, list) and all(
        isinstance(one, str) and 0 < len(one) <= _LONGEST and one.isprintable() for one in found
    )
    if not named or not found or len(set(found)) < len(found) or len(found) > _MOST_TASKS:
        return f"{KEY} is not a list of up to {_MOST_TASKS} names of tasks, each once"
    rank, alpha = config.get("lora_rank"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        return f"lora_rank is {rank!r}, not a positive integer"
    if type(alpha) not in (int, float) or not 0 < alpha < 1 << 20:
        return f"lora_alpha is {alpha!r}, not a positive number"
    return ""


def why_not_tensors(config: ModelConfig, tensors: Sequence[TensorEntry]) -> str:
    """What is wrong with the tensors of adapters; empty for nothing, and for other models."""
    if not (known := tasks(config)):
        return ""
    found = matrices(tensors)
    if not found:
        return f"it has no tensors of the adapters of its tasks ({KEY})"
    rank = config.integer("lora_rank")
    used = {part.name for one in found for part in (one.original, one.left, one.right)}
    for tensor in tensors:
        if (tensor.name.endswith(_ORIGINAL) or is_adapter(tensor.name)) and tensor.name not in used:
            return f"{tensor.name} lacks the matrix or one of the adapters that belong to it"
    for one in found:
        rows, columns = one.original.shape if len(one.original.shape) == 2 else (0, 0)
        shapes = (one.left.shape, one.right.shape)
        if shapes != ((len(known), rows, rank), (len(known), rank, columns)) or not rows * columns:
            return f"adapters of {one.original.name} do not have its shape, {rank} and {len(known)}"
        if not {one.original.dtype, one.left.dtype, one.right.dtype} <= _FLOATS:
            return f"{one.original.name} or its adapters are no floats of 16 or 32 bits"
    return ""


def is_adapter(name: str) -> bool:
    """Whether a tensor is of an adapter of a task: it is multiplied as it is read, and takes no
    memory."""
    return name.endswith((_A, _B))


def matrices(tensors: Iterable[TensorEntry]) -> list[AdaptedMatrix]:
    """Those that have adapters, with these, whatever shape they have."""
    known: Mapping[str, TensorEntry] = {tensor.name: tensor for tensor in tensors}
    found = []
    for name, tensor in known.items():
        if not name.endswith(_ORIGINAL):
            continue
        matrix = name.removesuffix(_ORIGINAL)
        first, second = known.get(matrix + _A), known.get(matrix + _B)
        if first is None or second is None:
            continue
        left, right = (first, second) if _EMBEDDING in matrix else (second, first)
        found.append(AdaptedMatrix(f"{matrix}.weight", tensor, left, right))
    return found
