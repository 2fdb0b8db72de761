"""The arguments of vLLM's engine that are about images."""

from __future__ import annotations

from typing import Any

from appliance.checkpoints.language_models import why_no_images
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.overrides import language_config, whole_config
from appliance.engines.vllm.device import Device
from appliance.platform.torchvision import is_there


def image_args(images: int, checkpoint: ModelConfig, ranks: int, device: Device) -> dict[str, Any]:
    """For prompts of so many images at most; with 0, the language model alone is built.

    Raises `ValueError` for a model that cannot read any here.
    """
    if not images:
        return {"hf_overrides": language_config, "skip_tokenizer_init": True}
    cuda = not device.host_memory
    if wrong := why_no_images(checkpoint, ranks=ranks, cuda=cuda, libraries=is_there()):
        raise ValueError(f"{checkpoint.path}: {wrong}")
    return {
        "hf_overrides": whole_config,
        # What prepares images is made with it; vLLM asks that for the size of an image.
        "skip_tokenizer_init": False,
        "tokenizer_mode": "hf",  # as in front ends
        "limit_mm_per_prompt": {"image": images, "video": 0},
        "mm_processor_cache_gb": 0,  # images come prepared
        "skip_mm_profiling": True,
    }
