"""Pooling: what of vLLM's engines is different for models that embed or score.

Such a model has no head. Its prompt is computed like any other, in chunks, and then pooled: the
hidden state of the last token, or the mean of all, becomes a vector, or a score, or one for each of
several classes; or each token's does. No token follows. Where tokens attend in both directions,
a prompt is computed in one step, and may be pooled by its first token.

What is pooled from all tokens needs all of them computed: such a prompt takes nothing from the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from vllm import PoolingParams
from vllm.config import ModelConfig, PoolerConfig
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.pooler.seqwise import SequencePooler
from vllm.model_executor.layers.pooler.seqwise.methods import MeanPool, SequencePoolingMethod
from vllm.model_executor.layers.pooler.special import DispatchPooler
from vllm.tasks import SupportedTask
from vllm.v1.pool.metadata import PoolingMetadata

from appliance.checkpoints.families import ENCODERS
from appliance.checkpoints.model_config import ModelConfig as CheckpointConfig
from appliance.checkpoints.task import POOLING_TASKS, PoolerValue, is_rewarder, pools_tokens
from appliance.engines.vllm.messages import MAX_OUTPUT_BYTES
from appliance.vocabulary import Task

MAX_DIMENSIONS: Final = 1 << 16
"""Of a vector: what crosses the wire is bounded."""

MAX_POOLED_BYTES: Final = MAX_OUTPUT_BYTES - (1 << 20)
"""Of what is pooled from a prompt: it has to fit into an output."""
MAX_STATES_BYTES: Final = 128 << 20
"""Of hidden states that are kept until a prompt is computed, for pooling of each token."""
NUMBER_BYTES: Final = 4
"""Of a number of a vector; states are converted to it at the end."""


class UnsupportedPooling(ValueError):
    """The model's pooling is not one that can be computed here."""


class TooMuchPooled(ValueError):
    """What would be pooled from a prompt takes too much memory."""


def engine_args(task: Task, pooler_config: Mapping[str, PoolerValue]) -> dict[str, Any]:
    """vLLM's options for a model's task, whatever it would make of the checkpoint itself."""
    if not task.pools:
        return {"runner": "generate"}
    return {
        "runner": "pooling",
        "convert": "auto",
        "pooler_config": PoolerConfig(**pooler_config),
    }


def supported_tasks(task: Task, config: ModelConfig) -> tuple[SupportedTask, ...]:
    """vLLM's names for what a model can do."""
    if not task.pools:
        return ("generate",) if task is Task.GENERATE else ("transcription",)
    return POOLING_TASKS[task][1:] if is_rewarder(config.architectures[0]) else POOLING_TASKS[task]


def check_pooling(task: Task, config: ModelConfig, checkpoint: CheckpointConfig) -> None:
    """Raise `UnsupportedPooling` unless prompts can be computed in chunks, or whole where tokens
    attend in both directions, and pooled to vectors or to scores afterwards."""
    if not task.pools:
        return
    architecture = config.architectures[0]
    encoder = config.attn_type == "encoder_only"
    if encoder is not checkpoint.is_encoder:
        raise UnsupportedPooling(
            f"vLLM has {architecture} attend otherwise ({config.attn_type}) than its config.json "
            "says"
        )
    if encoder and architecture not in ENCODERS:
        raise UnsupportedPooling(
            f"{architecture} attends in both directions: of such models only "
            f"{', '.join(sorted(ENCODERS))} are served"
        )
    pooler = config.pooler_config
    if pools_tokens(pooling_task(task, config)):
        if pooler.tok_pooling_type != "ALL":
            raise UnsupportedPooling(
                f"{architecture} pools tokens by {pooler.tok_pooling_type}: only pooling of all "
                "tokens is supported"
            )
    elif pooler.seq_pooling_type not in ("LAST", "MEAN") and not encoder:
        raise UnsupportedPooling(
            f"{architecture} pools by {pooler.seq_pooling_type}: only pooling by the last token, "
            "or by the mean, is supported where prompts are computed in chunks"
        )
    if task is Task.EMBED and config.embedding_size > MAX_DIMENSIONS:
        raise UnsupportedPooling(
            f"its vectors have {config.embedding_size} dimensions, more than {MAX_DIMENSIONS}"
        )


def pooling_task(task: Task, config: ModelConfig) -> str:
    """vLLM's name for what prompts of a model are pooled to."""
    return str(config.pooler_config.task or supported_tasks(task, config)[0])


def pool_in_chunks(task: Task, config: ModelConfig, model: torch.nn.Module) -> None:
    """Have the model that vLLM built pool prompts that are computed in chunks. Raises
    `UnsupportedPooling` if it does not do the task."""
    if not task.pools:
        return
    wanted, pooler = pooling_task(task, config), cast(Pooler, model.pooler)
    offered = pooler.get_supported_tasks()
    if wanted not in offered:
        raise UnsupportedPooling(f"it pools to {', '.join(sorted(offered))}, not {wanted}")
    if isinstance(pooler, DispatchPooler):
        pooler = pooler.poolers_by_task[wanted]
    if isinstance(pooler, SequencePooler) and isinstance(pooler.pooling, MeanPool):
        pooler.pooling = MeanOfChunks()


def complete_pooling(
    task: Task, params: PoolingParams, config: ModelConfig, model: torch.nn.Module, tokens: int
) -> None:
    """Give parameters what the model's pooler wants of them, for a prompt of so many tokens. Raises
    `ValueError` for what the model cannot, `TooMuchPooled` for what would be too large."""
    wanted = pooling_task(task, config)
    if params.task != wanted:
        raise ValueError(f"prompts of this model are pooled to {wanted}, not {params.task}")
    if params.late_interaction_params is not None:
        raise ValueError("texts are not compared token by token")
    params.verify(config)
    params.extra_kwargs = _second_text(params.extra_kwargs, config, tokens)
    check_size(config, params, tokens)
    if config.pooler_config.seq_pooling_type == "MEAN":
        params.skip_reading_prefix_cache = True
    cast(Pooler, model.pooler).get_pooling_updates(params.task).apply(params)


def _second_text(
    extra: dict[str, Any] | None, config: ModelConfig, tokens: int
) -> dict[str, Any] | None:
    """What vLLM says of where a second text begins in a prompt of so many tokens, if anywhere: its
    tokens get another type. A type that the model does not have would fail the step of all. Raises
    `ValueError` for a model that does not tell texts apart."""
    extra = extra or {}
    begin = extra.get(_SECOND_TEXT)
    if extra.keys() - {_SECOND_TEXT} or type(begin) not in (int, type(None)):
        raise ValueError(f"a prompt that is pooled has no such arguments: {sorted(extra)}")
    if begin is None or begin >= tokens:
        return None
    types = getattr(config.hf_config, "type_vocab_size", 0)
    if begin < 0 or types < 2 or config.architectures[0] not in _TELL_TEXTS_APART:
        raise ValueError("the model does not tell two texts apart by the types of their tokens")
    return {_SECOND_TEXT: begin}


_SECOND_TEXT: Final = "compressed_token_type_ids"
_TELL_TEXTS_APART: Final = frozenset(
    {
        "BertForSequenceClassification",
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
    }
)


def check_size(config: ModelConfig, params: PoolingParams, tokens: int) -> int:
    """Bytes of what is pooled from a prompt of so many tokens. Raises `TooMuchPooled`."""
    each = pools_tokens(params.task or "")
    rows = tokens if each else 1
    if params.task in POOLING_TASKS[Task.SCORE]:
        width = 1 if is_rewarder(config.architectures[0]) else config.hf_config.num_labels
    else:
        width = params.dimensions or config.embedding_size
    size: int = rows * width * NUMBER_BYTES
    states = tokens * config.get_hidden_size() * NUMBER_BYTES if each else 0
    if size > MAX_POOLED_BYTES or states > MAX_STATES_BYTES:
        raise TooMuchPooled(
            f"what is pooled from {tokens} tokens takes {size} bytes, and {states} until all are "
            f"computed: at most {MAX_POOLED_BYTES} and {MAX_STATES_BYTES} are allowed; ask for a "
            "shorter prompt"
        )
    return size


class MeanOfChunks(SequencePoolingMethod):  # type: ignore[misc]
    """The mean of a prompt's hidden states, added up as they are computed."""

    def forward(
        self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata
    ) -> torch.Tensor:
        cursor = pooling_metadata.get_pooling_cursor()
        chunks = torch.split(hidden_states, cursor.num_scheduled_tokens_cpu.tolist())
        means = []
        for chunk, state, length, over in zip(
            chunks,
            pooling_metadata.pooling_states,
            cursor.prompt_lens_cpu.tolist(),
            cursor.get_finished_mask(),
            strict=True,
        ):
            # One row, kept where vLLM keeps all of them for other poolings.
            kept = state.hidden_states_cache
            total = chunk.sum(dim=0, dtype=torch.float32)
            if kept:
                total += kept.pop()
            if not over:
                kept.append(total)
            means.append(total / length)
        return torch.stack(means)
