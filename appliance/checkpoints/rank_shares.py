"""Sizes of a model that vLLM divides among the ranks of an instance, besides attention heads."""

from __future__ import annotations

from typing import Final

from appliance.checkpoints.model_config import ModelConfig

VOCABULARY_MULTIPLE: Final = 64
"""vLLM pads the rows of embeddings to it before it divides them."""
DIVIDED: Final = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mamba_num_heads",
    "mamba_n_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Keys of ``config.json``."""


def why_undivided(config: ModelConfig, ranks: int) -> str:
    """Which of the model's sizes so many ranks cannot divide, if there is one; empty if not.

    Attention heads are not among them (`appliance.config.checks`).
    """
    sizes = {key: config.get(key) for key in DIVIDED}
    if isinstance(rows := config.get("vocab_size"), int):
        padded = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        sizes = {f"its vocabulary, padded to {padded} rows,": padded} | sizes
    for what, size in sizes.items():
        if isinstance(size, int) and size % ranks:
            said = what if what.endswith(",") else f"{what} ({size})"
            return f"{said} cannot be divided among {ranks} ranks"
    return ""
