"""`SoundPrompts`: the sound of one model's prompts, checked, for a decoder that attends to what an
encoder made of it.

The encoder runs in the step that computes a prompt, and each layer of the decoder keeps keys and
values of what it made, in blocks of the request like those of its tokens. So nothing else of a
sound is kept, and a request that is computed anew has its sound encoded anew. vLLM's cache of
outputs is not used for such models; what its runner notes there is dropped behind each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.engines.vllm.seams import SeamMoved
from appliance.vocabulary import RequestId

MODALITY: Final = "audio"
_FEATURES: Final = "input_features"
_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class SoundPrompts:
    """Of one engine. It is asked what `ImagePrompts` is asked."""

    bytes: int = 0
    """Of blocks besides those of KV."""

    def __init__(
        self, config: VllmConfig, scheduler: ParkedScheduler, runner: GPUModelRunner
    ) -> None:
        """Raises `SeamMoved`."""
        self._config = config.model_config.hf_config
        self._of_runner: dict[str, Any] = runner.encoder_cache
        self._kept: EncoderDecoderCacheManager = scheduler.encoder_cache_manager
        if type(self._kept) is not EncoderDecoderCacheManager:
            raise SeamMoved("vLLM's scheduler keeps outputs of encoders in another way")

    def take(
        self, asked: EngineCoreRequest, sequence: SequenceSpec, salt: str, adapter: str = ""
    ) -> list[MultiModalFeatureSpec]:
        """The sound of a prompt, checked; it is shared with none. Raises `ValueError`."""
        features = list(asked.mm_features or ())
        if len(features) != 1:
            raise ValueError(f"a prompt has one sound, and not {len(features)}")
        try:
            return [_checked(features[0], self._config, sequence.request)]
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"the sound: {error}") from error

    def begin(self, request: Request, provide: Callable[[int], None]) -> None:
        """Nothing is needed besides KV."""

    def encoded_by(self, batch: Sequence[Request]) -> bool:
        """Whether a step with these requests runs the encoder."""
        return any([not known.num_computed_tokens for known in batch])

    def enter(self, batch: Sequence[Request], tokens: int) -> None:
        """Nothing is kept that vLLM would have to be handed."""

    def stepped(self, batch: Sequence[Request]) -> None:
        """A step of these requests is over."""
        self._clear()

    def leave(self, request: RequestId) -> None:
        """A request has ended."""
        self._clear()

    def withdraw(self, request: RequestId) -> None:
        """A step of the request did not come to its end."""
        self._clear()

    def _clear(self) -> None:
        self._of_runner.clear()
        self._kept.reset()


def _checked(
    feature: MultiModalFeatureSpec, config: Any, request: RequestId
) -> MultiModalFeatureSpec:
    """Made anew of the tensor that was checked: how vLLM batches it is not for a request to say. A
    step with a sound that does not fit would fail for all its requests."""
    if feature.modality != MODALITY:
        raise ValueError(f"{feature.modality!r} is not what it is called")
    if feature.data is None or _FEATURES not in feature.data:
        raise ValueError("it has no data")
    tokens, bins = config.max_source_positions, config.num_mel_bins
    place = feature.mm_position
    if (place.offset, place.length) != (0, tokens) or place.is_embed is not None:
        raise ValueError(f"its place in the encoder's prompt is {place}, not all {tokens} tokens")
    values = feature.data[_FEATURES].data
    shape = bins, 2 * tokens
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{_FEATURES} is not a tensor")
    if values.dtype not in _TYPES or tuple(values.shape) != shape:
        raise ValueError(
            f"{_FEATURES} are {list(values.shape)} of {values.dtype}, not {list(shape)} of floats"
        )
    (element,) = MultiModalFieldConfig.batched(MODALITY).build_elems(_FEATURES, values[None])
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({_FEATURES: element}),
        modality=MODALITY,
        identifier=request,
        mm_position=PlaceholderRange(0, tokens),
    )
