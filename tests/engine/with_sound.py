"""Small checkpoints that make text of sound, with the processor that prepares it; and prompts made
as vLLM makes them, of sounds that are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken

TURBO: Final = "whisper-large-v3-turbo"
RATE: Final = 16_000
"""Of samples in a second."""


class Sound(NamedTuple):
    """Two tones, the same in each process; hertz, and seconds."""

    low: float
    high: float
    seconds: float

    def samples(self) -> Any:
        """Of NumPy."""
        import numpy as np

        time = np.arange(int(self.seconds * RATE)) / RATE
        tones = np.sin(2 * np.pi * self.low * time) + np.sin(2 * np.pi * self.high * time * time)
        return (tones / 2).astype(np.float32)


class SoundPrompt(NamedTuple):
    """Tokens that the text begins with, and the sound."""

    tokens: tuple[int, ...]
    sound: Sound


def make_with_sound(folder: Path, name: str = TURBO) -> str:
    """Write the small checkpoint, of float32; its path."""
    path = Path(make_shrunken(folder, name, CONFIGS[name]))
    prepares = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": CONFIGS[name]["num_mel_bins"],
        "sampling_rate": RATE,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(prepares))
    return str(path)


class SoundPreparer:
    """Makes the sound of a prompt what vLLM's front half makes of it, for one checkpoint."""

    def __init__(self, path: str) -> None:
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY

        config = ModelConfig(path, dtype="float32", limit_mm_per_prompt={"audio": 1})
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)

    def prepare(self, sound: Sound) -> list[Any]:
        """The features of a request."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        items = self._processor.info.parse_mm_data({"audio": [(sound.samples(), RATE)]})
        made = self._processor([0], items)
        (data,), (place,) = made["mm_kwargs"]["audio"], made["mm_placeholders"]["audio"]
        (name,) = made["mm_hashes"]["audio"]
        return [MultiModalFeatureSpec(data, "audio", name, place, name)]


PLAIN: Final = """
import vllm
from tests.engine.with_sound import RATE, Sound
generate = vllm.LLM.generate

def generate_of_sound(self, prompts, *args, **kwargs):
    made = []
    for prompt in prompts:
        tokens, sound = prompt["prompt_token_ids"]
        audio = Sound(*sound).samples(), RATE
        made.append({
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}},
            "decoder_prompt": {"prompt_token_ids": tokens},
        })
    return generate(self, made, *args, **kwargs)

vllm.LLM.generate = generate_of_sound
"""
"""What a process of plain vLLM runs first (`plain_process`): each prompt is a `SoundPrompt`."""
