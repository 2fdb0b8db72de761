"""`ImagePrompts`: the images of one model's prompts, or the sounds of its chats, and what the
encoder makes of them.

vLLM's scheduler has an image encoded in the step that computes the first of its tokens, and its
runner keeps the output until the last of them is computed. A step of the appliance must compute as
many tokens as it was asked for. So vLLM's limits of the encoder are lifted. An image is encoded
whole in that step, however few of its tokens the step computes, and all others of the step wait.
What bounds its size is the body that it comes in, and the model's `max_context`. Between steps
vLLM's runner has no outputs: they are in `EncoderOutputs`. What a step may need of them is handed
to the runner, and named to vLLM's scheduler, before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm.images.features import checked, read_by
from appliance.engines.vllm.images.outputs import EncoderOutputs
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.engines.vllm.seams import SeamMoved
from appliance.vocabulary import KvShape, RequestId


class ImagePrompts:
    """Of one engine; of a model that reads nothing but text, too."""

    def __init__(
        self,
        config: VllmConfig,
        scheduler: ParkedScheduler,
        runner: GPUModelRunner,
        shape: KvShape,
    ) -> None:
        media = config.model_config.multimodal_config
        reads = read_by((config.model_config.hf_config.architectures or [""])[0])
        self._key = f"{reads.word}s" if reads is not None else "images"
        self._most = 0
        if media is not None and reads is not None:
            self._most = media.get_limit_per_prompt(reads.modality)
        self._config = config.model_config.hf_config
        self._model: Any = runner.get_model()
        self._of_runner: dict[str, Any] = runner.encoder_cache
        self._kept: EncoderCacheManager = scheduler.encoder_cache_manager
        self._outputs = EncoderOutputs(scheduler.blocks, shape)
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

    @property
    def bytes(self) -> int:
        """Of the blocks that outputs of the encoder have."""
        return self._outputs.bytes

    def take(
        self, asked: EngineCoreRequest, sequence: SequenceSpec, salt: str, adapter: str = ""
    ) -> list[MultiModalFeatureSpec]:
        """The images or sounds of a prompt, checked; they are shared among prompts with one `salt`
        and one `adapter`: what KV knows it by, and not its name, which another one may get. Raises
        `ValueError`."""
        features = asked.mm_features or ()
        if features and not self._most:
            key = "sounds" if features[0].modality == "audio" else "images"
            raise ValueError(f"the model is served for text only: its `{key}` is 0")
        owner = repr((adapter, salt))
        found = checked(features, len(sequence.prompt), self._most, self._config, owner)
        tokens = tuple([int(feature.mm_position.get_num_embeds()) for feature in found])
        if tokens != sequence.images:
            raise ValueError(f"{self._key} of {tokens} tokens, and room for {sequence.images}")
        return found

    def begin(self, request: Request, provide: Callable[[int], None]) -> None:
        """Have blocks for the images of a prompt that begins, as far as they are not computed.
        `provide` makes as many free as it is asked for; what it raises is raised."""
        if wanted := _ahead(request):
            self._outputs.hold(request.request_id, wanted, provide)

    def encoded_by(self, batch: Sequence[Request]) -> bool:
        """Whether a step with these requests may run the encoder."""
        outputs = self._outputs
        return outputs.any_held and any([outputs.lacks(known.request_id) for known in batch])

    def enter(self, batch: Sequence[Request], tokens: int) -> None:
        """Hand vLLM what was made of images that these requests come to within so many tokens."""
        if not self._outputs.any_held:
            return
        for known in batch:
            for name, embeddings in _ahead(known, tokens).items():
                if name in self._of_runner or (made := self._outputs.read(name)) is None:
                    continue
                self._of_runner[name] = made
                if name not in self._kept.cached:
                    self._kept.cached[name] = set()
                    self._kept.num_embeds_by_hash[name] = embeddings
                    self._kept.freeable[name] = embeddings
                    self._kept.num_free_slots -= embeddings

    def stepped(self, batch: Sequence[Request]) -> None:
        """A step of these requests is over: keep what it made."""
        if not self._outputs.any_held:
            return
        for name, made in self._of_runner.items():
            self._outputs.write(name, made)
        for known in batch:
            self._outputs.keep(known.request_id, _ahead(known))
        self._clear()

    def leave(self, request: RequestId) -> None:
        """A request needs none of its images any more."""
        self._outputs.keep(request, ())
        self._clear()

    def withdraw(self, request: RequestId) -> None:
        """Free what a step left behind that did not come to its end, and what a request of it
        held."""
        self.leave(request)
        # Qwen3-VL notes what is added to later layers, and drops it behind the last: the next step
        # of text would add it to other tokens.
        if noted := getattr(self._model, "deepstack_input_embeds_num_tokens", 0):
            self._model._clear_deepstack_input_embeds(noted)

    def _clear(self) -> None:
        """Leave vLLM nothing but the names of what requests have begun to compute."""
        self._of_runner.clear()
        kept = self._kept
        while kept.freeable:
            name, embeddings = kept.freeable.popitem()
            del kept.cached[name]
            del kept.num_embeds_by_hash[name]
            kept.num_free_slots += embeddings


def _ahead(request: Request, tokens: int = sys.maxsize) -> dict[str, int]:
    """The images of a request that its next `tokens` tokens may touch, and how many embeddings each
    is."""
    computed = request.num_computed_tokens
    found = {}
    for feature in request.mm_features:
        place = feature.mm_position
        if computed < place.offset + place.length and place.offset - computed < tokens:
            found[feature.identifier] = place.get_num_embeds()
    return found
