"""Small checkpoints that make text of sound, or read it as a part of chats, with the processor that
prepares it; and prompts made as vLLM makes them, of sounds that are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken
from tests.engine.with_images import Prepared

TURBO: Final = "whisper-large-v3-turbo"
QWEN2_AUDIO: Final = "qwen2-audio-7b-instruct"
WORDS: Final = ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
"""Tokens of Qwen2-Audio's chats, behind those of bytes."""
_FIRST: Final = 259
HEARD: Final = (_FIRST + 2, _FIRST + 4, _FIRST + 3)
"""What a chat template writes for a sound."""
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
    write_processor(path, "Whisper", CONFIGS[name]["num_mel_bins"])
    return str(path)


def write_processor(path: Path, made: str, bins: int) -> None:
    """Write the file of what prepares sounds, of this many bins."""
    prepares = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": f"{made}Processor",
        "feature_size": bins,
        "sampling_rate": RATE,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": made != "Whisper",
    }
    (path / "preprocessor_config.json").write_text(json.dumps(prepares))


class SoundChat(NamedTuple):
    """Tokens, with one where each sound is to be, and the sounds."""

    tokens: tuple[int, ...]
    sounds: tuple[Sound, ...] = ()


def make_hearer(folder: Path, name: str = QWEN2_AUDIO) -> str:
    """Write the small checkpoint of a decoder that reads sound in chats, of float32; its path."""
    import transformers

    config = CONFIGS[name] | {"audio_token_index": HEARD[1]}
    path = Path(make_shrunken(folder, name, config))
    write_processor(path, "Qwen2Audio", config["audio_config"]["num_mel_bins"])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*WORDS]})
    assert tokenizer.convert_tokens_to_ids(WORDS[0]) == _FIRST
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'audio' -%}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


class ChatPreparer:
    """Makes prompts with sounds as vLLM's front half does, for one checkpoint."""

    def __init__(self, path: str, sounds: int, dtype: str = "float32") -> None:
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY

        config = ModelConfig(path, dtype=dtype, limit_mm_per_prompt={"audio": sounds})
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)

    def prepare(self, tokens: tuple[int, ...], sounds: tuple[Sound, ...] = ()) -> Prepared:
        """The prompt, of which `sounds` follow each other where its tokens of sound are."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        if not sounds:
            return Prepared(tokens, [])
        audio = [(sound.samples(), RATE) for sound in sounds]
        items = self._processor.info.parse_mm_data({"audio": audio})
        made = self._processor(list(tokens), items)
        parts = zip(
            *(made[of]["audio"] for of in ("mm_kwargs", "mm_placeholders", "mm_hashes")),
            strict=True,
        )
        features = [
            MultiModalFeatureSpec(data, "audio", name, place, name) for data, place, name in parts
        ]
        return Prepared(tuple(made["prompt_token_ids"]), features)


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

PLAIN_CHATS: Final = """
import vllm
from tests.engine.with_sound import RATE, Sound
generate = vllm.LLM.generate

def generate_with_sounds(self, prompts, *args, **kwargs):
    made = []
    for prompt in prompts:
        tokens, sounds = prompt["prompt_token_ids"]
        one = {"prompt_token_ids": tokens}
        if sounds:
            audio = [(Sound(*sound).samples(), RATE) for sound in sounds]
            one["multi_modal_data"] = {"audio": audio}
        made.append(one)
    return generate(self, made, *args, **kwargs)

vllm.LLM.generate = generate_with_sounds
"""
"""The same, where each prompt is a `SoundChat`."""
