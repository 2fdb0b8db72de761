"""Checks the images of a request, as a front end has prepared them, before anything is computed.

What comes out is made anew of the tensors that were checked: how vLLM batches them, and where, is
not for a request to say. A step with an image that does not fit would fail for all its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)

Item = Mapping[str, Any]
"""vLLM's tensors of an image, by name."""

MODALITY: Final = "image"
_PIXELS: Final = "pixel_values"
_GRID: Final = "image_grid_thw"
_PARTS: Final = "num_patches"
_MOST_SIDE: Final = 1 << 16
"""Patches; numbers of more bits would overflow when they are multiplied."""

_PIXEL_TYPES: Final = (torch.uint8, torch.float32, torch.bfloat16, torch.float16)


def _qwen(data: Item, config: Any) -> tuple[MultiModalKwargsItem, int]:
    """Patches ``[t * h * w, values]`` of a grid ``[t, h, w]``; some of them side by side are one
    embedding."""
    vision = config.vision_config
    grid = _tensor(data, _GRID)
    if grid.dtype != torch.int64 or grid.shape != (3,):
        raise ValueError(f"{_GRID} is not three numbers")
    frames, height, width = grid.tolist()
    merged = vision.spatial_merge_size
    if frames != 1 or any(
        side < merged or side % merged or side > _MOST_SIDE for side in (height, width)
    ):
        raise ValueError(f"{_GRID} is {[frames, height, width]}, which is not of one image")
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = _pixels(data, (height * width, values))
    fields = MultiModalFieldConfig
    sizes = torch.tensor([height * width])
    item = {
        _PIXELS: _element(fields.flat_from_sizes(MODALITY, sizes), _PIXELS, pixels),
        _GRID: _element(fields.batched(MODALITY, keep_on_cpu=True), _GRID, grid[None]),
    }
    return MultiModalKwargsItem(item), height * width // merged**2


def _gemma(data: Item, config: Any) -> tuple[MultiModalKwargsItem, int]:
    """The image, and parts of it if there are any, ``[parts, 3, side, side]``; each becomes the
    same number of embeddings."""
    parts = _tensor(data, _PARTS)
    if parts.dtype != torch.int64 or parts.numel() != 1 or parts.dim() > 1:
        raise ValueError(f"{_PARTS} is not a number")
    count = int(parts)
    side = config.vision_config.image_size
    if not 1 <= count <= _MOST_SIDE:
        raise ValueError(f"{_PARTS} is {count}")
    pixels = _pixels(data, (count, config.vision_config.num_channels, side, side))
    fields = MultiModalFieldConfig
    sizes = torch.tensor([count])
    item = {
        _PIXELS: _element(fields.flat_from_sizes(MODALITY, sizes), _PIXELS, pixels),
        _PARTS: _element(fields.batched(MODALITY, keep_on_cpu=True), _PARTS, parts.view(1)),
    }
    return MultiModalKwargsItem(item), count * config.mm_tokens_per_image


_KINDS: Final[Mapping[str, Callable[[Item, Any], tuple[MultiModalKwargsItem, int]]]] = {
    "Gemma3ForConditionalGeneration": _gemma,
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5_VLForConditionalGeneration": _qwen,
    "Qwen3VLForConditionalGeneration": _qwen,
    "Qwen3VLMoeForConditionalGeneration": _qwen,
}
"""How each architecture's images are made up; gives the image, and how many embeddings it is."""


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
    data, embeddings = _KINDS[config.architectures[0]](feature.data, config)
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


def _tensor(data: Item, name: str) -> torch.Tensor:
    value = data[name].data if name in data else None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is not a tensor")
    return value


def _pixels(data: Item, shape: tuple[int, ...]) -> torch.Tensor:
    pixels = _tensor(data, _PIXELS)
    if pixels.dtype not in _PIXEL_TYPES or tuple(pixels.shape) != shape:
        raise ValueError(
            f"{_PIXELS} are {list(pixels.shape)} of {pixels.dtype}, not {list(shape)} of pixels"
        )
    return pixels


def _element(config: MultiModalFieldConfig, key: str, batch: torch.Tensor) -> Any:
    """The only image of a batch."""
    (element,) = config.build_elems(key, batch)
    return element
