"""Files of sound, and a checkpoint of a model that makes text of them, without weights."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
from tokenizers import Tokenizer
from vllm.model_executor.models.whisper_utils import ISO639_1_SUPPORTED_LANGS

from appliance.demo.checkpoints import train_tokenizer
from appliance.demo.recipes import EOS_ID
from tests.configs import CONFIGS
from tests.engine.shrunken import shrunken
from tests.engine.with_sound import CHAT_TEMPLATE, QWEN2_AUDIO, TURBO, write_processor
from tests.engine.with_sound import WORDS as CHAT_WORDS

RATE: Final = 16_000
CONTEXT: Final = 448
WORDS: Final = (
    *("<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"),
    *(f"<|{language}|>" for language in ISO639_1_SUPPORTED_LANGS),
    *(f"<|{hundredths / 100:.2f}|>" for hundredths in range(0, 3001, 2)),
)
"""What Whisper's tokenizer has besides text."""


class Samples(NamedTuple):
    """A sound as `SoundPreparer` and `ChatPreparer` take it."""

    values: Any

    def samples(self) -> Any:
        return self.values


def make_transcriber(path: Path) -> Path:
    """Write it; its path."""
    path.mkdir()
    words = save_words(path, WORDS)
    config = shrunken(CONFIGS[TURBO]) | {
        "vocab_size": words.get_vocab_size(),
        "eos_token_id": EOS_ID,
        "max_target_positions": CONTEXT,
    }
    files = {
        "config.json": config,
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "feature_size": config["num_mel_bins"],
            "sampling_rate": RATE,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def save_words(path: Path, special: Sequence[str] = ()) -> Tokenizer:
    """Write a tokenizer of text, and of special tokens behind it, to a checkpoint."""
    words = train_tokenizer()
    words.add_special_tokens(list(special))
    words.save(str(path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    return words


def tone(seconds: float, rate: int = RATE) -> npt.NDArray[np.float32]:
    """A tone that rises, the same in each process."""
    time = np.arange(int(seconds * rate)) / rate
    return (np.sin(2 * np.pi * (200 + 20 * time) * time) / 2).astype(np.float32)


def file_of(
    samples: npt.NDArray[Any], *, rate: int = RATE, kind: str = "WAV", subtype: str | None = None
) -> bytes:
    """A file of samples, or of frames of several channels."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def make_hearer(path: Path) -> Path:
    """Write a checkpoint of a decoder that reads sound in chats, without weights; its path."""
    path.mkdir()
    words = save_words(path, CHAT_WORDS)
    token = words.token_to_id("<|AUDIO|>")
    config = shrunken(CONFIGS[QWEN2_AUDIO]) | {"audio_token_index": token}
    config["text_config"] |= {"vocab_size": words.get_vocab_size(), "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_processor(path, "Qwen2Audio", config["audio_config"]["num_mel_bins"])
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return path
