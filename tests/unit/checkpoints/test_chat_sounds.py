"""Which checkpoints of decoders are served with sounds in chats, and why others are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from appliance.checkpoints.architectures.chat_sounds import why_no_sounds
from appliance.checkpoints.model_config import read_model_config
from tests.configs import CONFIGS
from tests.conftest import write_checkpoint
from tests.engine.shrunken import shrunken
from tests.engine.with_sound import QWEN2_AUDIO, write_processor
from tests.engine.with_voxtral import SOUND, VOXTRAL, write_tekken
from tests.unit.config.test_loader import GOOD, only_problem

Change = Callable[[dict[str, Any]], None]


def write(path: Path, change: Change = lambda config: None, name: str = VOXTRAL) -> Path:
    config = json.loads(json.dumps(CONFIGS[name]))
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def reason(path: Path, **served: Any) -> str:
    return why_no_sounds(read_model_config(path), **served)


def test_published_files_are_served(tmp_path: Path) -> None:
    write_tekken(write(tmp_path))
    assert reason(tmp_path, sounds=5) == ""
    assert "vLLM takes 5 sounds in a prompt" in reason(tmp_path, sounds=6)
    assert "not served on GPUs" in reason(tmp_path, cuda=True)
    assert "not served by several ranks" in reason(tmp_path, ranks=2)


def test_others_are_prepared_by_transformers(tmp_path: Path) -> None:
    write(tmp_path, name=QWEN2_AUDIO)
    assert "has no preprocessor_config.json" in reason(tmp_path)
    write_processor(tmp_path, "Qwen2Audio", 128)
    assert reason(tmp_path, sounds=6) == ""
    write_processor(tmp_path, "Qwen2Audio", 80)
    assert "feature_size of preprocessor_config.json is 80" in reason(tmp_path)


def test_a_tokenizer_that_says_nothing_of_sounds(tmp_path: Path) -> None:
    write(tmp_path)
    assert "has no tekken.json" in reason(tmp_path)
    (tmp_path / "tekken.json").write_text("[]")
    assert "tekken.json cannot be read" in reason(tmp_path)
    write_tekken(tmp_path, None)
    assert "tekken.json has no audio" in reason(tmp_path)


SPOILT: Final[dict[str, tuple[Change, str]]] = {
    "rate": (lambda said: said.update(sampling_rate=24_000), "sampling_rate of audio in"),
    "tokens": (lambda said: said.update(frame_rate=25.0), "frame_rate of audio in"),
    "length": (lambda said: said.pop("chunk_length_s"), "chunk_length_s .* is None"),
    "streams": (lambda said: said.update(transcription_format="streaming"), "is not 'instruct'"),
    "columns": (
        lambda said: said["audio_encoding_config"].update(hop_length=320),
        "hop_length .* is 320, and sounds are read with 160",
    ),
    "window": (lambda said: said["audio_encoding_config"].clear(), "num_mel_bins .* is None"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_tokenizers_that_prepare_other_sounds(tmp_path: Path, what: str) -> None:
    change, wrong = SPOILT[what]
    said = json.loads(json.dumps(SOUND))
    change(said)
    write_tekken(write(tmp_path), said)
    assert re.search(wrong, reason(tmp_path))


def test_a_tokenizer_without_tokens_of_sounds(tmp_path: Path) -> None:
    write_tekken(write(tmp_path))
    file = tmp_path / "tekken.json"
    file.write_text(file.read_text().replace("[BEGIN_AUDIO]", "[OTHER]"))
    assert "no special token [BEGIN_AUDIO]" in reason(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"special_tokens": None}))
    assert "no special token [AUDIO]" in reason(tmp_path)


MODELS: Final[dict[str, tuple[Change, str]]] = {
    "quantized": (
        lambda config: config.update(quantization_config={"quant_method": "fp8"}),
        "sounds of a quantized",
    ),
    "quantized text": (
        lambda config: config["text_config"].update(quantization_config={"quant_method": "fp8"}),
        "sounds of a quantized",
    ),
    "language": (
        lambda config: config["text_config"].update(model_type="qwen2"),
        "with a language model of type llama",
    ),
    "positions": (
        lambda config: config["audio_config"].update(max_source_positions=750),
        "max_source_positions of audio_config is 750",
    ),
    "width": (lambda config: config["audio_config"].update(hidden_size=0), "0 wide"),
    "joined": (
        lambda config: config["audio_config"].update(hidden_size=1279),
        "no whole number of the encoder's 1279",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_are_others(tmp_path: Path, what: str) -> None:
    change, wrong = MODELS[what]
    write_tekken(write(tmp_path, change))
    assert wrong in reason(tmp_path)


@pytest.mark.parametrize(
    ("sounds", "said", "remedy"),
    [
        (6, SOUND, "use sounds = 5"),
        (5, None, "use sounds = 0"),
    ],
)
def test_a_configuration_says_what_to_do(
    tmp_path: Path, sounds: int, said: dict[str, Any] | None, remedy: str
) -> None:
    path = write_checkpoint(tmp_path / "tiny", **shrunken(CONFIGS[VOXTRAL]))
    write_tekken(path, said)
    problem = only_problem(tmp_path, f"{GOOD}sounds = {sounds}\n")
    assert (problem.key, problem.remedy) == ("model[0].sounds", remedy)
