"""Voxtral's weights as vLLM's class takes them: what reads sound has Mistral's own names there, and
the language model those of transformers, which are what the files have.

The encoder's positions are computed by vLLM: Mistral's files have none. They are a buffer here, and
stay where they are when weights are evicted (1500 rows of 4 bytes a number).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from appliance.checkpoints.architectures.chat_sounds import COMPUTED, VOXTRAL
from appliance.checkpoints.language_models import MEDIA, language_layer

_MISTRAL: Final = "mm_whisper_embeddings."
_NAMES: Final = (
    (r"multi_modal_projector\.linear_1\.", _MISTRAL + "audio_language_projection.0."),
    (r"multi_modal_projector\.linear_2\.", _MISTRAL + "audio_language_projection.2."),
    (r"audio_tower\.", _MISTRAL + "whisper_encoder."),
    (r"\.conv1\.", ".conv_layers.0."),
    (r"\.conv2\.", ".conv_layers.1."),
    (r"whisper_encoder\.layers\.", "whisper_encoder.transformer.layers."),
    (r"whisper_encoder\.layer_norm\.", "whisper_encoder.transformer.norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.out_proj\.", ".attention.wo."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"\.final_layer_norm\.", ".ffn_norm."),
    (r"\.fc([12])\.", r".feed_forward.w\1."),
)
"""Patterns in names of transformers, and what is in their place, in their order."""
_PREFIX: Final = "model."
"""Of all names that newer versions of transformers write."""


def named_as_vllm(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that are loaded into the model, under the names that its class knows: other ones
    for Voxtral, without those that are computed."""
    if type(model).__name__ != VOXTRAL:
        yield from weights
        return
    for name, weight in weights:
        if (named := _named(name)) is not None:
            yield named, weight


def keep_positions(model: torch.nn.Module) -> None:
    """Have the positions of Voxtral's encoder be no parameter, which a file would have to have."""
    if type(model).__name__ != VOXTRAL:
        return
    embedding = model.get_submodule("whisper_encoder.whisper_encoder.embed_positions")
    positions = embedding.get_parameter("weight").data
    del embedding.weight
    embedding.register_buffer("weight", positions, persistent=False)


def _named(name: str) -> str | None:
    """None for a tensor that is computed."""
    own = name.removeprefix(_PREFIX)
    if own in COMPUTED[VOXTRAL]:
        return None
    if own.partition(".")[0] not in MEDIA[VOXTRAL].towers:
        return language_layer(name, VOXTRAL)
    for pattern, replacement in _NAMES:
        own = re.sub(pattern, replacement, own)
    return own
