"""Sizes of a model that vLLM divides among the ranks of an instance, besides attention heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from appliance.checkpoints.model_config import ModelConfig

VOCABULARY_MULTIPLE: Final = 64
"""vLLM pads the rows of embeddings to it before it divides them."""
DIVIDED: Final = (
    "intermediate_size",
    "intermediate_size_mlp",
    "shared_intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mamba_num_heads",
    "mamba_n_heads",
    "n_mamba_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Keys of ``config.json``: a number, or one for each layer."""
GROUPS: Final = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""Keys of the groups of Mamba-2, of which a single one is on every rank."""


def why_undivided(config: ModelConfig, ranks: int) -> str:
    """Which of the model's sizes so many ranks cannot divide, if there is one; empty if not.

    Attention heads are not among them (`appliance.config.checks`). A size that no layer of the
    model has counts, too: that matters where ranks are no power of two.
    """
    for what, size in _sizes(config):
        if size % ranks:
            return f"{what} cannot be divided among {ranks} ranks"
    return ""


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """All that are divided, with what a message calls them."""
    if isinstance(rows := config.get("vocab_size"), int):
        padded = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        yield f"its vocabulary, padded to {padded} rows,", padded
    if isinstance(rows := config.get("type_vocab_size"), int) and rows:
        # BERT's kinds of tokens are such an embedding, too, and its positions are another.
        padded = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        yield f"its kinds of tokens, padded to {padded} rows,", padded
    for key in (*DIVIDED, *GROUPS):
        found = config.get(key)
        for size in found if isinstance(found, list) else [found]:
            if isinstance(size, int) and not (key in GROUPS and size == 1):
                yield f"{key} ({size})", size
