"""Decoders that read sound as a part of a chat: which are served with it, and how long a sound may
be. What their encoder makes of a sound takes the place of tokens in the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from appliance.checkpoints.model_config import ModelConfig

QWEN2_AUDIO: Final = "Qwen2AudioForConditionalGeneration"
VOXTRAL: Final = "VoxtralForConditionalGeneration"
PHI_4_MM: Final = "Phi4MMForCausalLM"
WITH_CODE: Final = (
    f"images and sounds of {PHI_4_MM} are not served, only text: vLLM prepares them with code that "
    "comes with the checkpoint (processing_phi4mm.py), which is never run"
)

HEARS: Final = frozenset({QWEN2_AUDIO, VOXTRAL})
"""Architectures that read sound, and no images, of which the text is served at least."""
READS_SOUND: Final = frozenset({QWEN2_AUDIO})
"""Those of them that are served whole where `sounds` says so. These are what
`tests/engine/test_chat_sounds.py` serves."""


SECONDS: Final = 30
"""Of a sound: the encoder has positions for no more. Longer ones would be cut off."""
RATE: Final = 16_000
"""Samples in a second that the encoder's input is made of."""
_HOP: Final = 160
"""Samples for each column of a spectrogram."""
_PROCESSOR: Final = "preprocessor_config.json"
_SETTINGS: Final = {"sampling_rate": RATE, "hop_length": _HOP, "chunk_length": SECONDS}
"""Keys of that file, with what transformers takes where it does not say them."""


def read_besides_text(architecture: str) -> str:
    """What a model of `MEDIA` reads besides text, of which a prompt may have some."""
    if architecture == PHI_4_MM:
        return "images and sound"
    return "sound" if architecture in HEARS else "images"


def why_no_sounds(config: ModelConfig, *, ranks: int = 1, cuda: bool = False) -> str:
    """Why the checkpoint's model cannot be served with sounds in chats: of so many `ranks`, on a
    GPU if `cuda`; empty if it can."""
    name = config.architecture
    if name == PHI_4_MM:
        return WITH_CODE
    if name == VOXTRAL:
        return (
            f"sounds of {name} are not served, only text: vLLM takes them with files in Mistral's "
            "own format (params.json, consolidated.safetensors), which is not read here"
        )
    if name not in READS_SOUND:
        return f"{name} reads no sound in chats here"
    if wrong := _why_not_prepared(config):
        return wrong
    if cuda:
        return "sounds are not served on GPUs by this version, only text"
    if ranks > 1:
        return "sounds are not served by several ranks, only text"
    return ""


def _why_not_prepared(config: ModelConfig) -> str:
    """What prepares sounds makes of each what the encoder takes, and nothing else."""
    try:
        settings = _settings(config.path)
    except FileNotFoundError:
        return f"{config.path} has no {_PROCESSOR}, which says how to prepare sounds"
    except (OSError, ValueError) as error:
        return f"{config.path / _PROCESSOR} cannot be read: {error}"
    encoder = config.whole.get("audio_config")
    encoder = encoder if isinstance(encoder, dict) else {}
    bins, positions = encoder.get("num_mel_bins", 128), encoder.get("max_source_positions", 1500)
    wanted = _SETTINGS | {"feature_size": bins}
    for key, value in wanted.items():
        said = settings.get(key, _SETTINGS.get(key))
        if said != value:
            return f"{key} of {_PROCESSOR} is {said!r}, and sounds are read with {value}"
    if positions != SECONDS * RATE // _HOP // 2:
        return (
            f"max_source_positions of audio_config is {positions}, not those of {SECONDS} seconds"
        )
    return ""


def _settings(path: Path) -> dict[str, Any]:
    """Raises `OSError`, or `ValueError` for what is no JSON object."""
    found = json.loads((path / _PROCESSOR).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found
