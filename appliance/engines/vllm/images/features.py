"""Checks the images of a request, as a front end has prepared them, before anything is computed.

What comes out is made anew of the tensors that were checked: how vLLM batches them, and where, is
not for a request to say. A step with an image that does not fit would fail for all its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from appliance.engines.vllm.images.kinds import KINDS, MODALITY


def checked(
    features: Sequence[MultiModalFeatureSpec], tokens: int, most: int, config: Any, owner: str
) -> list[MultiModalFeatureSpec]:
    """The images of a prompt of so many tokens, for a model of transformers' configuration that
    takes at most so many. Prompts of another `owner` share nothing with them. Raises `ValueError`
    that says what is wrong with which."""
    if len(features) > most:
        raise ValueError(f"{len(features)} images in a prompt, more than the {most} of `images`")
    made, end = [], 0
    for number, feature in enumerate(features):
        try:
            made.append(_checked(feature, end, tokens, config, owner))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"image {number}: {error}") from error
        end = made[-1].mm_position.offset + made[-1].mm_position.length
    return made


def _checked(
    feature: MultiModalFeatureSpec, start: int, tokens: int, config: Any, owner: str
) -> MultiModalFeatureSpec:
    if feature.modality != MODALITY:
        raise ValueError(f"{feature.modality!r} is not an image")
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
    data, embeddings = KINDS[config.architectures[0]](feature.data, config)
    wanted = place.length if mask is None else int(mask.sum())
    if wanted != embeddings:
        raise ValueError(f"it has {embeddings} embeddings for {wanted} tokens")
    return MultiModalFeatureSpec(
        data=data,
        modality=MODALITY,
        # What the encoder made is shared by this name. Outputs of two sizes never have the same,
        # whatever a front end calls them.
        identifier=f"{embeddings}:{feature.identifier}:{owner}",
        mm_position=PlaceholderRange(place.offset, place.length, mask),
        mm_hash=feature.mm_hash,
    )
