"""Pooling: what of vLLM's engines is different for models that embed or score.

Such a model has no head. Its prompt is computed like any other, and then pooled: the hidden state
of the last token becomes a vector, or a score, or one for each of several classes. No token
follows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm import PoolingParams
from vllm.config import ModelConfig

from appliance.vocabulary import Task

MAX_DIMENSIONS: Final = 1 << 16
"""Of a vector: what crosses the wire is bounded."""

_ARGS: Final[dict[Task, dict[str, Any]]] = {
    Task.GENERATE: {"runner": "generate"},
    Task.EMBED: {"runner": "pooling", "convert": "auto"},
    Task.SCORE: {"runner": "pooling", "convert": "auto"},
}
_TASKS: Final = {Task.EMBED: "embed", Task.SCORE: "classify"}
"""vLLM's names for what a prompt is pooled to."""


class UnsupportedPooling(ValueError):
    """The model's pooling is not one that can be computed here."""


def engine_args(task: Task) -> dict[str, Any]:
    """What vLLM is told of a model's task, whatever it would make of the checkpoint itself."""
    return _ARGS[task]


def check_pooling(task: Task, config: ModelConfig) -> None:
    """Raise `UnsupportedPooling` unless prompts can be computed in chunks, and pooled to a vector
    or to scores afterwards."""
    if task is Task.GENERATE:
        return
    architecture = config.architectures[0]
    if config.attn_type != "decoder":
        raise UnsupportedPooling(
            f"{architecture} attends in both directions ({config.attn_type}): only models that "
            "look back, as those that generate do, can embed or score here"
        )
    if not config.is_chunked_prefill_supported or config.pooler_config.seq_pooling_type != "LAST":
        raise UnsupportedPooling(
            f"{architecture} pools by {config.pooler_config.seq_pooling_type}: only pooling by the "
            "last token is supported"
        )
    if task is Task.EMBED and config.embedding_size > MAX_DIMENSIONS:
        raise UnsupportedPooling(
            f"its vectors have {config.embedding_size} dimensions, more than {MAX_DIMENSIONS}"
        )


def check_pooler(task: Task, model: torch.nn.Module) -> None:
    """Raise `UnsupportedPooling` if the model that vLLM built does not do the task."""
    if task is Task.GENERATE:
        return
    offered = model.pooler.get_supported_tasks()  # type: ignore[union-attr, operator]
    if _TASKS[task] not in offered:
        raise UnsupportedPooling(f"it pools to {', '.join(sorted(offered))}, not {_TASKS[task]}")


def complete_pooling(
    task: Task, params: PoolingParams, config: ModelConfig, model: torch.nn.Module
) -> None:
    """Give parameters what the model's pooler wants of them. Raises `ValueError` for what the model
    cannot."""
    if params.task != _TASKS[task]:
        raise ValueError(f"prompts of this model are pooled to {_TASKS[task]}, not {params.task}")
    params.verify(config)
    model.pooler.get_pooling_updates(params.task).apply(params)  # type: ignore[union-attr, operator]
