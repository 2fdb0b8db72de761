"""Images of tensors that do not fit are refused before anything is computed, and those that do are
as many embeddings as the encoder makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from appliance.engines.vllm.images.kinds import KINDS

TOWER: Final = {"image_size": 56, "patch_size": 14, "num_channels": 3}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "InternVL": {
        "vision_config": {"image_size": (56, 56), "patch_size": (14, 14)},
        "downsample_ratio": 0.5,
        "image_token_id": 7,
    },
    "Llama4": {"vision_config": {**TOWER, "pixel_shuffle_ratio": 0.5}},
    "Llava": {
        "vision_config": {**TOWER, "model_type": "clip_vision_model"},
        "vision_feature_select_strategy": "default",
    },
    "Mistral3": {"vision_config": TOWER, "spatial_merge_size": 2},
}
PIXTRAL: Final = {"vision_config": {**TOWER, "model_type": "pixtral"}}


def made(family: str, tensors: dict[str, Any], **config: Any) -> Any:
    whole = CONFIGS[family] | config
    whole["vision_config"] = SimpleNamespace(**whole["vision_config"])
    data = {name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()}
    return KINDS[f"{family}ForConditionalGeneration"](data, SimpleNamespace(**whole))


def pixels(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def tiles(count: int, **numbers: Any) -> dict[str, Any]:
    return {"pixel_values": pixels(count, 3, 56, 56)} | {
        name: torch.tensor(value) for name, value in numbers.items()
    }


@pytest.mark.parametrize(
    ("family", "tensors", "config", "embeddings"),
    [
        ("InternVL", tiles(3, image_num_patches=3, image_token_id=7), {}, 12),
        ("Llama4", tiles(1, patches_per_image=1, aspect_ratios=[1, 1]), {}, 4),
        ("Llama4", tiles(7, patches_per_image=7, aspect_ratios=[2, 3]), {}, 28),
        ("Llava", {"pixel_values": pixels(3, 56, 56)}, {}, 16),
        (
            "Llava",
            {"pixel_values": pixels(3, 56, 56)},
            {"vision_feature_select_strategy": "full"},
            17,
        ),
        ("Llava", {"pixel_values": pixels(3, 14, 42)}, PIXTRAL, 3),
        ("Mistral3", {"pixel_values": pixels(3, 56, 28)}, {}, 2),
    ],
)
def test_embeddings(
    family: str, tensors: dict[str, Any], config: dict[str, Any], embeddings: int
) -> None:
    item, found = made(family, tensors, **config)
    assert found == embeddings
    for name, tensor in tensors.items():
        assert torch.equal(item[name].data.flatten(), tensor.flatten())


@pytest.mark.parametrize(
    ("family", "tensors", "reason"),
    [
        ("InternVL", tiles(3, image_num_patches=2, image_token_id=7), "pixel_values are"),
        ("InternVL", tiles(3, image_num_patches=0, image_token_id=7), "image_num_patches is 0"),
        ("InternVL", tiles(3, image_num_patches=3, image_token_id=8), "image_token_id is 8, not 7"),
        ("InternVL", tiles(3, image_num_patches=3), "image_token_id is not a tensor"),
        ("Llama4", tiles(3, patches_per_image=3, aspect_ratios=[2, 2]), "3 tiles for 2 x 2"),
        ("Llama4", tiles(2, patches_per_image=2, aspect_ratios=[1, 1]), "2 tiles for 1 x 1"),
        ("Llama4", tiles(1, patches_per_image=1, aspect_ratios=[-1, -1]), r"are \[-1, -1\]"),
        ("Llama4", tiles(1, patches_per_image=1, aspect_ratios=[1]), "is not two numbers"),
        ("Llama4", tiles(1, patches_per_image=1, aspect_ratios=[1 << 40, 1]), "aspect_ratios are"),
        ("Llava", {"pixel_values": pixels(3, 56, 42)}, "pixel_values are"),
        ("Llava", {"pixel_values": pixels(1, 3, 56, 56)}, "pixel_values are"),
        ("Mistral3", {"pixel_values": pixels(3, 56, 42)}, "sides of at most 56 in steps of 28"),
        ("Mistral3", {"pixel_values": pixels(3, 84, 28)}, "sides of at most 56"),
        ("Mistral3", {"pixel_values": pixels(3, 0, 28)}, "sides of at most 56"),
        ("Mistral3", {"pixel_values": pixels(1, 28, 28)}, "pixel_values are"),
        ("Mistral3", {"pixel_values": pixels(28, 28)}, "pixel_values are"),
        ("Mistral3", {"pixel_values": pixels(3, 28, 28).long()}, "of torch.int64"),
        ("Mistral3", {}, "pixel_values is not a tensor"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, tensors: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made(family, tensors)
