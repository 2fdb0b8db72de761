"""How each architecture's images are made up: which tensors of which shapes a prepared image has,
and how many embeddings the encoder makes of it.

There are four ways: patches of a grid, one square of a fixed size, one picture of any size, and
tiles of one size, of which each image has as many as its shape asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem

Item = Mapping[str, Any]
"""vLLM's tensors of an image, by name."""

MODALITY: Final = "image"
_PIXELS: Final = "pixel_values"
_GRID: Final = "image_grid_thw"
_ASPECT: Final = "aspect_ratios"
_TOKEN: Final = "image_token_id"
_MOST_SIDE: Final = 1 << 16
"""Patches; numbers of more bits would overflow when they are multiplied."""

_PIXEL_TYPES: Final = (torch.uint8, torch.float32, torch.bfloat16, torch.float16)


class Made(NamedTuple):
    """An image of tensors that were checked."""

    item: MultiModalKwargsItem
    embeddings: int


def _grid(data: Item, config: Any) -> Made:
    """Patches ``[t * h * w, values]`` of a grid ``[t, h, w]``; some of them side by side are one
    embedding."""
    vision = config.vision_config
    frames, height, width = _numbers(data, _GRID, 3)
    merged = vision.spatial_merge_size
    if frames != 1 or any(
        side < merged or side % merged or side > _MOST_SIDE for side in (height, width)
    ):
        raise ValueError(f"{_GRID} is {[frames, height, width]}, which is not of one image")
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    item = {
        _PIXELS: _parts(_pixels(data, (height * width, values))),
        _GRID: _kept(_GRID, [frames, height, width]),
    }
    return Made(MultiModalKwargsItem(item), height * width // merged**2)


def _gemma(data: Item, config: Any) -> Made:
    """The image, and parts of it if there are any."""
    side = config.vision_config.image_size
    return _tiled(data, "num_patches", side, config.mm_tokens_per_image)


def _internvl(data: Item, config: Any) -> Made:
    """Tiles, and the whole image behind them if there are several."""
    vision = config.vision_config
    side, patch = vision.image_size[0], vision.patch_size[0]
    (token,) = _numbers(data, _TOKEN, 1)
    if token != config.image_token_id:
        raise ValueError(f"{_TOKEN} is {token}, not {config.image_token_id}")
    tokens = int((side // patch) ** 2 * config.downsample_ratio**2)
    made = _tiled(data, "image_num_patches", side, tokens)
    shared = MultiModalFieldConfig.shared(MODALITY, 1, keep_on_cpu=True)
    item = made.item | {_TOKEN: _element(shared, _TOKEN, torch.tensor(token))}
    return made._replace(item=MultiModalKwargsItem(item))


def _llama4(data: Item, config: Any) -> Made:
    """Rows of tiles, and the whole image behind them if there are several."""
    vision = config.vision_config
    tokens = int((vision.image_size // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)
    rows, columns = _numbers(data, _ASPECT, 2)
    if not (0 < rows <= _MOST_SIDE and 0 < columns <= _MOST_SIDE):
        raise ValueError(f"{_ASPECT} are {[rows, columns]}")
    made = _tiled(data, "patches_per_image", vision.image_size, tokens)
    tiles = rows * columns
    if made.embeddings != tokens * (tiles + (tiles > 1)):
        raise ValueError(f"{made.embeddings // tokens} tiles for {rows} x {columns}")
    item = made.item | {_ASPECT: _kept(_ASPECT, [rows, columns])}
    return made._replace(item=MultiModalKwargsItem(item))


def _llava(data: Item, config: Any) -> Made:
    """A square, of which the encoder makes one more than patches: with `default` it is left out."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return _pixtral(data, config)
    side = vision.image_size
    pixels = _pixels(data, (vision.num_channels, side, side))
    more = config.vision_feature_select_strategy != "default"
    return Made(_whole(pixels), (side // vision.patch_size) ** 2 + more)


def _pixtral(data: Item, config: Any) -> Made:
    """A picture whose sides are multiples of what an embedding is made of, and no longer than the
    encoder has positions for."""
    vision = config.vision_config
    block = vision.patch_size * getattr(config, "spatial_merge_size", 1)
    most = vision.image_size // vision.patch_size * vision.patch_size
    shape = tuple(_tensor(data, _PIXELS).shape)
    sides = shape[1:] if len(shape) == 3 else ()
    if not sides or any(side % block or not block <= side <= most for side in sides):
        raise ValueError(
            f"{_PIXELS} are {list(shape)}, not sides of at most {most} in steps of {block}"
        )
    height, width = sides
    pixels = _pixels(data, (vision.num_channels, height, width))
    return Made(_whole(pixels), height // block * (width // block))


KINDS: Final[Mapping[str, Callable[[Item, Any], Made]]] = {
    "Gemma3ForConditionalGeneration": _gemma,
    "Glm4vForConditionalGeneration": _grid,
    "Glm4vMoeForConditionalGeneration": _grid,
    "InternVLForConditionalGeneration": _internvl,
    "Llama4ForConditionalGeneration": _llama4,
    "LlavaForConditionalGeneration": _llava,
    "Mistral3ForConditionalGeneration": _pixtral,
    "Qwen2VLForConditionalGeneration": _grid,
    "Qwen2_5_VLForConditionalGeneration": _grid,
    "Qwen3VLForConditionalGeneration": _grid,
    "Qwen3VLMoeForConditionalGeneration": _grid,
}
"""By architecture: what makes an image anew of vLLM's tensors and transformers' configuration.
Each raises `ValueError` for what would not fit."""


def _tiled(data: Item, counted: str, side: int, tokens: int) -> Made:
    """Tiles ``[count, 3, side, side]``, of which each becomes as many embeddings as `tokens`;
    `counted` is the tensor with their number."""
    (count,) = _numbers(data, counted, 1)
    if not 1 <= count <= _MOST_SIDE:
        raise ValueError(f"{counted} is {count}")
    pixels = _pixels(data, (count, 3, side, side))
    item = {_PIXELS: _parts(pixels), counted: _kept(counted, count)}
    return Made(MultiModalKwargsItem(item), count * tokens)


def _numbers(data: Item, name: str, count: int) -> list[int]:
    value = _tensor(data, name)
    if value.dtype != torch.int64 or value.numel() != count or value.dim() > 1:
        words = {1: "a number", 2: "two numbers", 3: "three numbers"}
        raise ValueError(f"{name} is not {words[count]}")
    return [int(number) for number in value.flatten()]


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


def _whole(pixels: torch.Tensor) -> MultiModalKwargsItem:
    """An image of nothing but these pixels."""
    field = MultiModalFieldConfig.batched(MODALITY)
    return MultiModalKwargsItem({_PIXELS: _element(field, _PIXELS, pixels[None])})


def _parts(pixels: torch.Tensor) -> Any:
    """Pixels of parts, which vLLM puts behind those of other images."""
    sizes = torch.tensor([len(pixels)])
    return _element(MultiModalFieldConfig.flat_from_sizes(MODALITY, sizes), _PIXELS, pixels)


def _kept(name: str, numbers: int | list[int]) -> Any:
    """Numbers that vLLM reads on the host."""
    field = MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True)
    return _element(field, name, torch.tensor([numbers]))


def _element(config: MultiModalFieldConfig, key: str, batch: torch.Tensor) -> Any:
    """The only image of a batch."""
    (element,) = config.build_elems(key, batch)
    return element
