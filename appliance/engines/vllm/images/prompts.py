"""`ImagePrompts`: the images of one model's prompts, and what the encoder makes of them.

vLLM's scheduler has an image encoded in the step that computes the first of its tokens, and its
runner keeps the output until the last of them is computed. A step of the appliance must compute as
many tokens as it was asked for. So vLLM's limits of the encoder are lifted. An image is encoded
whole in that step, however few of its tokens the step computes, and all others of the step wait.
What bounds its size is the body that it comes in, and the model's `max_context`. Outputs are
dropped as soon as no prompt needs them: what they were made into is in the KV cache, and shared
there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.engines.vllm.images.features import checked
from appliance.engines.vllm.seams import SeamMoved


class ImagePrompts:
    """Of one engine; of a model that reads no images, too."""

    def __init__(self, config: VllmConfig, scheduler: Scheduler, runner: GPUModelRunner) -> None:
        media = config.model_config.multimodal_config
        self._most = media.get_limit_per_prompt("image") if media is not None else 0
        self._config = config.model_config.hf_config
        self._model: Any = runner.get_model()
        self._outputs: dict[str, Any] = runner.encoder_cache
        self._kept: EncoderCacheManager = scheduler.encoder_cache_manager
        if not self._most:
            return
        if (
            type(self._kept) is not EncoderCacheManager
            or not scheduler.max_num_encoder_input_tokens
        ):
            raise SeamMoved("vLLM's scheduler keeps outputs of encoders in another way")
        if scheduler.scheduler_config.disable_chunked_mm_input:
            raise SeamMoved("vLLM's scheduler would shorten chunks that end within an image")
        scheduler.max_num_encoder_input_tokens = sys.maxsize
        for limit in ("cache_size", "num_free_slots", "num_freeable_slots"):
            assert hasattr(self._kept, limit), f"vLLM's encoder cache has no {limit}"
            setattr(self._kept, limit, sys.maxsize)

    def take(
        self, asked: EngineCoreRequest, tokens: int, salt: str | None
    ) -> list[MultiModalFeatureSpec]:
        """The images of a prompt of so many tokens, checked; they are shared among prompts with the
        same `salt`. Raises `ValueError`."""
        if not asked.mm_features:
            return []
        if not self._most:
            raise ValueError("the model is served for text only: its `images` is 0")
        return checked(asked.mm_features, tokens, self._most, self._config, salt or "")

    def encoded_by(self, batch: Sequence[Request]) -> bool:
        """Whether a step with these requests may run the encoder."""
        return bool(self._most) and any(_lacks_images(request) for request in batch)

    def drop_outputs(self) -> None:
        """Free what the encoder made and no prompt needs any more."""
        kept = self._kept
        while kept.freeable:
            name, embeddings = kept.freeable.popitem()
            del kept.cached[name]
            del kept.num_embeds_by_hash[name]
            kept.num_free_slots += embeddings
            self._outputs.pop(name, None)

    def step_failed(self) -> None:
        """Free what a step left behind that did not come to its end."""
        self.drop_outputs()
        # Qwen3-VL notes what is added to later layers, and drops it behind the last: the next step
        # of text would add it to other tokens.
        if noted := getattr(self._model, "deepstack_input_embeds_num_tokens", 0):
            self._model._clear_deepstack_input_embeds(noted)


def _lacks_images(request: Request) -> bool:
    if not request.mm_features:
        return False
    last = request.mm_features[-1].mm_position
    return bool(request.num_computed_tokens < last.offset + last.length)
