"""The arguments of vLLM's engine that are about sound."""

from __future__ import annotations

from typing import Any

from appliance.checkpoints.architectures.chat_sounds import VOXTRAL, why_no_sounds
from appliance.checkpoints.architectures.transcribers import why_not_served
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.overrides import whole_config
from appliance.engines.vllm.device import Device


def sound_args(
    checkpoint: ModelConfig, ranks: int, device: Device, sounds: int = 0
) -> dict[str, Any]:
    """For a model that makes text of sound; or for one whose chats have up to so many `sounds`.
    Raises `ValueError` for one that is not served so here."""
    cuda = not device.host_memory
    if sounds:
        wrong = why_no_sounds(checkpoint, ranks=ranks, cuda=cuda, sounds=sounds)
    else:
        wrong = why_not_served(checkpoint, ranks=ranks, cuda=cuda)
    if wrong:
        raise ValueError(f"{checkpoint.path}: {wrong}")
    return {
        "tokenizer_mode": "mistral" if checkpoint.architecture == VOXTRAL else "auto",
        "hf_overrides": whole_config,
        # What prepares sound is made with it; vLLM asks that how long a sound is.
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"audio": sounds or 1},
        "mm_processor_cache_gb": 0,  # sound comes prepared
        "skip_mm_profiling": True,
    }
