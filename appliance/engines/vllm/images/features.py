"""Checks the images or sounds of a request, as a front end has prepared them, before anything is
computed.

What comes out is made anew of the tensors that were checked: how vLLM batches them, and where, is
not for a request to say. A step with one that does not fit would fail for all its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from appliance.engines.vllm.images.kinds import KINDS, MODALITY, Made
from appliance.engines.vllm.sound import chats


class Reads(NamedTuple):
    """What prompts of an architecture have besides text."""

    modality: str
    word: str
    make: Callable[[Mapping[str, Any], Any], Made]
    """Raises `ValueError` for what would not fit."""


def read_by(architecture: str) -> Reads | None:
    """None if it reads nothing else."""
    if make := chats.KINDS.get(architecture):
        return Reads(chats.MODALITY, "sound", make)
    if make := KINDS.get(architecture):
        return Reads(MODALITY, "image", make)
    return None


def checked(
    features: Sequence[MultiModalFeatureSpec], tokens: int, most: int, config: Any, owner: str
) -> list[MultiModalFeatureSpec]:
    """The images or sounds of a prompt of so many tokens, for a model of transformers'
    configuration that takes at most so many. Prompts of another `owner` share nothing with them.
    Raises `ValueError` that says what is wrong with which."""
    if not features:
        return []
    reads = read_by(config.architectures[0])
    assert reads is not None, f"{config.architectures[0]} takes {most} of nothing that is known"
    word = reads.word
    if len(features) > most:
        raise ValueError(f"{len(features)} {word}s in a prompt, more than the {most} of `{word}s`")
    made, end = [], 0
    for number, feature in enumerate(features):
        try:
            made.append(_checked(feature, reads, end, tokens, config, owner))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{word} {number}: {error}") from error
        end = made[-1].mm_position.offset + made[-1].mm_position.length
    return made


def _checked(
    feature: MultiModalFeatureSpec,
    reads: Reads,
    start: int,
    tokens: int,
    config: Any,
    owner: str,
) -> MultiModalFeatureSpec:
    if feature.modality != reads.modality:
        raise ValueError(f"{feature.modality!r} is not what the model reads: {reads.word}s")
    if feature.data is None:
        raise ValueError("it has no data")
    if not isinstance(feature.identifier, str) or not feature.identifier:
        raise ValueError("it has no hash")
    place = feature.mm_position
    if place.offset < start or place.length < 1 or place.offset + place.length > tokens:
        raise ValueError(
            f"tokens {place.offset} to {place.offset + place.length} are not its own in a prompt "
            f"of {tokens}"
        )
    mask = place.is_embed
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (place.length,)):
        raise ValueError("its mask does not fit its tokens")
    data, embeddings = reads.make(feature.data, config)
    wanted = place.length if mask is None else int(mask.sum())
    if wanted != embeddings:
        raise ValueError(f"it has {embeddings} embeddings for {wanted} tokens")
    return MultiModalFeatureSpec(
        data=data,
        modality=reads.modality,
        # What the encoder made is shared by this name. Outputs of two sizes never have the same,
        # whatever a front end calls them.
        identifier=f"{embeddings}:{feature.identifier}:{owner}",
        mm_position=PlaceholderRange(place.offset, place.length, mask),
        mm_hash=feature.mm_hash,
    )
