"""How sounds of chats are made up, for each architecture that reads them as a part of its prompts:
which tensors of which shapes a prepared sound has, and how many embeddings the encoder makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem

from appliance.checkpoints.architectures.chat_sounds import HOP, QWEN2_AUDIO, VOXTRAL
from appliance.engines.vllm.images.kinds import Made

MODALITY: Final = "audio"
_FEATURES: Final = "input_features"
_MASK: Final = "feature_attention_mask"
_ARRAYS: Final = "audio_arrays"
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS: Final = (torch.int32, torch.int64)


def _qwen2_audio(data: Mapping[str, Any], config: Any) -> Made:
    """A spectrogram ``[bins, columns]`` of the longest sound, and a mask that has a one for each of
    the first columns, which are of this sound, and zeros behind them."""
    encoder = config.audio_config
    columns = 2 * encoder.max_source_positions
    features = _tensor(data, _FEATURES, _FLOATS, (encoder.num_mel_bins, columns))
    mask = _tensor(data, _MASK, _NUMBERS, (columns,))
    used = int((mask == 1).sum())
    whole = torch.zeros_like(mask)
    whole[:used] = 1
    if not torch.equal(mask, whole):
        raise ValueError(f"{_MASK} is not ones, and zeros behind them")
    # The encoder's convolutions and its pooling halve their number twice.
    embeddings = ((used - 1) // 2 - 1) // 2 + 1
    if embeddings < 1:
        raise ValueError(f"{used} columns are too short a sound")
    return Made(
        MultiModalKwargsItem(
            {_FEATURES: _element(_FEATURES, features), _MASK: _element(_MASK, mask)}
        ),
        embeddings,
    )


def _voxtral(data: Mapping[str, Any], config: Any) -> Made:
    """Samples of the longest sound, with silence behind a shorter one. vLLM would take several such
    sounds for one; a front end sends none that is longer."""
    encoder = config.audio_config
    columns = 2 * encoder.max_source_positions
    samples = _tensor(data, _ARRAYS, _FLOATS, (columns * HOP,))
    # The encoder's convolutions halve the number of columns.
    embeddings = columns // 2 // encoder.downsample_factor
    return Made(MultiModalKwargsItem({_ARRAYS: _element(_ARRAYS, samples)}), embeddings)


KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], Any], Made]]] = {
    QWEN2_AUDIO: _qwen2_audio,
    VOXTRAL: _voxtral,
}
"""By architecture: what makes a sound anew of vLLM's tensors and transformers' configuration. Each
raises `ValueError` for what would not fit."""


def _tensor(
    data: Mapping[str, Any], name: str, types: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    value = data[name].data if name in data else None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is not a tensor")
    if value.dtype not in types or tuple(value.shape) != shape:
        raise ValueError(
            f"{name} are {list(value.shape)} of {value.dtype}, not {list(shape)} of {types[0]}"
        )
    return value


def _element(name: str, values: torch.Tensor) -> Any:
    """The only sound of a batch."""
    (element,) = MultiModalFieldConfig.batched(MODALITY).build_elems(name, values[None])
    return element
