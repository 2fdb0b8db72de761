"""What vLLM's model runner knows of requests: a state for each, and those of the last step's batch.

The batch holds copies of its states. A request whose state changes between steps leaves the batch,
and the next step puts it in again, if it is of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm.device import Device
from appliance.engines.vllm.sampling import logprobs_asked, seeded_generator
from appliance.vocabulary import RequestId


class RunnerStates:
    """The states of one model's requests, each made by `add` and removed by `forget`."""

    def __init__(
        self, runner: GPUModelRunner, vocabulary: int, tables: int, device: Device
    ) -> None:
        """`vocabulary` is the model's, in tokens; a request has so many block `tables`."""
        self._runner = runner
        self._device = device
        self._vocabulary = vocabulary
        self._tables = tables

    def add(
        self,
        sequence: SequenceSpec,
        asked: EngineCoreRequest,
        adapter: LoRARequest | None,
        images: Sequence[MultiModalFeatureSpec],
    ) -> None:
        """A request without blocks, nothing of which is computed. Raises `ValueError` for a seed
        that is beyond 64 bits."""
        generator = self._generator(asked.sampling_params, len(sequence.output))
        state = CachedRequestState(
            req_id=sequence.request,
            prompt_token_ids=list(sequence.prompt),
            mm_features=list(images),
            sampling_params=asked.sampling_params,
            pooling_params=asked.pooling_params,
            generator=generator,
            block_ids=tuple([] for _ in range(self._tables)),
            num_computed_tokens=0,
            output_token_ids=list(sequence.output),
            lora_request=adapter,
        )
        if self._runner.uses_mrope:  # three positions of each token; output counts on from them
            self._runner._init_mrope_positions(state)
        self._runner.requests[sequence.request] = state

    def forget(self, request: RequestId) -> None:
        """Now, not with the next step; unknown ids are fine.

        Until then the id could have come back, and the step would remove the newcomer.
        """
        self._runner.requests.pop(request, None)
        self._runner.num_prompt_logprobs.pop(request, None)
        self._leave_batch(request)

    def place(self, request: RequestId, blocks: Sequence[Sequence[int]]) -> None:
        """The request's blocks in each of its tables are these now."""
        self._leave_batch(request)
        self._runner.requests[request].block_ids = tuple(list(table) for table in blocks)

    def empty(self, request: RequestId, places: Sequence[range]) -> None:
        """These places of its tables have no block any more: they are behind a window. Kernels may
        look there, though they make nothing of it; so they find the null block."""
        state, batch = self._runner.requests[request], self._runner.input_batch
        row = batch.req_id_to_index.get(request)
        for number, gone in enumerate(places):
            if gone:
                state.block_ids[number][gone.start : gone.stop] = [0] * len(gone)
                if row is not None:
                    batch.block_table[number].block_table.np[row, gone.start : gone.stop] = 0

    def take_blocks(self, request: RequestId) -> None:
        """The request has no blocks any more."""
        self.place(request, [[]] * self._tables)

    def withdraw(self, request: Request) -> None:
        """Nothing of the request is computed any more, and it has no blocks."""
        name = request.request_id
        if (states := self._runner.requests[name].pooling_states) is not None:
            states.clean()
        self.take_blocks(name)
        self.give_generator(request)

    def open_prompt(self, request: Request) -> None:
        """Have the first output tell of the prompt: how much of it was cached, and how probable
        its tokens are. A request that has an output already did that."""
        name, params = request.request_id, request.sampling_params
        self._runner.num_prompt_logprobs.pop(name, None)
        self._runner.requests[name].in_progress_prompt_logprobs_cpu = None
        request.prefill_stats = None
        if request.num_output_tokens:
            return
        if request.num_computed_tokens:
            request.prefill_stats = PrefillStats()
            request.prefill_stats.set(request.num_prompt_tokens, request.num_computed_tokens, 0)
        if params is not None and params.prompt_logprobs is not None:
            asked = logprobs_asked(params.prompt_logprobs, self._vocabulary)
            self._runner.num_prompt_logprobs[name] = asked

    def any_scored(self, prompts: Sequence[RequestId]) -> bool:
        """Whether one of them wants log probabilities of its prompt."""
        return not self._runner.num_prompt_logprobs.keys().isdisjoint(prompts)

    def take_generator(self, request: RequestId) -> None:
        """What the request draws does not come from its own generator from now on."""
        self._runner.requests[request].generator = None

    def give_generator(self, request: Request) -> None:
        """The request draws from its own generator from the next step on, if it is to have one."""
        state = self._runner.requests[request.request_id]
        generator = self._generator(state.sampling_params, request.num_output_tokens)
        if generator is not None:
            self._leave_batch(request.request_id)
            state.generator = generator

    def _generator(self, params: SamplingParams | None, drawn: int) -> torch.Generator | None:
        if params is None:
            return None
        return seeded_generator(params, drawn, self._vocabulary, self._device)

    def _leave_batch(self, request: RequestId) -> None:
        with torch.inference_mode():  # as vLLM does: tensors of the batch were made in it
            self._runner.input_batch.remove_request(request)
