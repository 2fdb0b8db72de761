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
READS_SOUND: Final = frozenset({QWEN2_AUDIO, VOXTRAL})
"""Those of them that are served whole where `sounds` says so. These are what
`tests/engine/test_chat_sounds.py` serves."""
COMPUTED: Final = {VOXTRAL: frozenset({"audio_tower.embed_positions.weight"})}
"""Tensors of what reads sound that vLLM computes, and takes from no file."""

SECONDS: Final = 30
"""Of a sound: the encoder has positions for no more. Longer ones would be cut off."""
RATE: Final = 16_000
"""Samples in a second that the encoder's input is made of."""
HOP: Final = 160
"""Samples for each column of a spectrogram."""
WINDOW: Final = 400
"""Samples that a column is made of."""
_PROCESSOR: Final = "preprocessor_config.json"
_SETTINGS: Final = {"sampling_rate": RATE, "hop_length": HOP, "chunk_length": SECONDS}
"""Keys of that file, with what transformers takes where it does not say them."""
_TEKKEN: Final = "tekken.json"
_TOKENS: Final = ("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]")
MOST_SOUNDS: Final = {VOXTRAL: 5}
"""Of a prompt, where vLLM takes no more."""


def read_besides_text(architecture: str) -> str:
    """What a model of `MEDIA` reads besides text, of which a prompt may have some."""
    if architecture == PHI_4_MM:
        return "images and sound"
    return "sound" if architecture in HEARS else "images"


def why_no_sounds(
    config: ModelConfig, *, ranks: int = 1, cuda: bool = False, sounds: int = 1
) -> str:
    """Why the checkpoint's model cannot be served with so many `sounds` in a chat: of so many
    `ranks`, on a GPU if `cuda`; empty if it can."""
    name = config.architecture
    if name == PHI_4_MM:
        return WITH_CODE
    if name not in READS_SOUND:
        return f"{name} reads no sound in chats here"
    why_not = _why_not_by_tekken if name == VOXTRAL else _why_not_prepared
    if wrong := why_not(config) or _why_not_positions(config):
        return wrong
    if cuda:
        return "sounds are not served on GPUs by this version, only text"
    if ranks > 1:
        return "sounds are not served by several ranks, only text"
    if sounds > MOST_SOUNDS.get(name, sounds):
        return f"vLLM takes {MOST_SOUNDS[name]} sounds in a prompt of {name}, and not {sounds}"
    return ""


def _why_not_prepared(config: ModelConfig) -> str:
    """What prepares sounds makes of each what the encoder takes, and nothing else."""
    try:
        settings = _json(config.path / _PROCESSOR)
    except FileNotFoundError:
        return f"{config.path} has no {_PROCESSOR}, which says how to prepare sounds"
    except (OSError, ValueError) as error:
        return f"{config.path / _PROCESSOR} cannot be read: {error}"
    wanted = _SETTINGS | {"feature_size": _encoder(config).get("num_mel_bins", 128)}
    for key, value in wanted.items():
        said = settings.get(key, _SETTINGS.get(key))
        if said != value:
            return f"{key} of {_PROCESSOR} is {said!r}, and sounds are read with {value}"
    return ""


def _why_not_by_tekken(config: ModelConfig) -> str:
    """The tokenizer of mistral_common says how to prepare sounds, and how many tokens each is."""
    if any(config.get(key) for key in ("quantization_config", "compression_config")):
        return f"sounds of a quantized {config.architecture} are not served, only text"
    if config.model_type != "llama":
        return f"sounds of {config.architecture} are served with a language model of type llama"
    try:
        tokenizer = _json(config.path / _TEKKEN)
    except FileNotFoundError:
        return f"{config.path} has no {_TEKKEN}, which says how to prepare sounds"
    except (OSError, ValueError) as error:
        return f"{config.path / _TEKKEN} cannot be read: {error}"
    said = tokenizer.get("audio")
    if not isinstance(said, dict):
        return f"{config.path / _TEKKEN} has no audio, which says how to prepare sounds"
    return _why_not_tokens(tokenizer) or _why_not_said(said, _encoder(config))


def _why_not_said(said: dict[str, Any], encoder: dict[str, Any]) -> str:
    """Of what a tokenizer says of sounds."""
    found = said.get("audio_encoding_config")
    found = said | (found if isinstance(found, dict) else {})
    width = encoder.get("hidden_size", 1280)
    each = encoder.get("intermediate_size", 5120)
    if not (isinstance(width, int) and isinstance(each, int) and width > 0 and each > 0):
        return f"audio_config is {width!r} wide, and each token has {each!r} numbers of it"
    # The encoder makes one column of two, and so many of these become a token.
    joined = each // width
    wanted = {
        "sampling_rate": RATE,
        "frame_rate": RATE / HOP / 2 / max(joined, 1),
        "chunk_length_s": SECONDS,
        "num_mel_bins": encoder.get("num_mel_bins", 128),
        "hop_length": HOP,
        "window_size": WINDOW,
    }
    for key, value in wanted.items():
        if found.get(key) != value:
            return (
                f"{key} of audio in {_TEKKEN} is {found.get(key)!r}, and sounds are read with "
                f"{value}"
            )
    if each % width or RATE * SECONDS // HOP // 2 % joined:
        return f"{each} numbers of a token are no whole number of the encoder's {width}"
    if found.get("transcription_format", "instruct") != "instruct":
        return f"transcription_format of audio in {_TEKKEN} is not 'instruct'"
    return ""


def _why_not_tokens(tokenizer: dict[str, Any]) -> str:
    """Of the tokens that mistral_common needs to take sounds at all."""
    special = tokenizer.get("special_tokens")
    known = special if isinstance(special, list) else []
    words = {word.get("token_str") for word in known if isinstance(word, dict)}
    missing = [word for word in _TOKENS if word not in words]
    return f"{_TEKKEN} has no special token {missing[0]}" if missing else ""


def _why_not_positions(config: ModelConfig) -> str:
    """The encoder has positions for the longest sound, and no others."""
    positions = _encoder(config).get("max_source_positions", 1500)
    if positions == SECONDS * RATE // HOP // 2:
        return ""
    return f"max_source_positions of audio_config is {positions}, not those of {SECONDS} seconds"


def _encoder(config: ModelConfig) -> dict[str, Any]:
    encoder = config.whole.get("audio_config")
    return encoder if isinstance(encoder, dict) else {}


def _json(file: Path) -> dict[str, Any]:
    """Raises `OSError`, or `ValueError` for what is no JSON object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found
