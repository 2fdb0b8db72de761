"""Drafts of requests: what may come next, for a step to check.

The last tokens of a request often stand somewhere before. What followed there is the draft of its
next step, or what a head of the model guessed (`drafts.heads`): vLLM computes it behind the
request's last token, all in one pass over the weights. What would have been chosen anyway is kept,
and one token more.

Drafts stay within the KV blocks that a step without them would take, so all that is said elsewhere
of blocks holds with them, too. They are for requests that take the most probable token just as the
model computes it; all others are computed in the same steps, without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingType
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import SamplerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.adapters import AdapterStacks
from appliance.checkpoints.draft_heads import read_head
from appliance.checkpoints.drafts import Speculation, check_drafts
from appliance.checkpoints.model_config import ModelConfig
from appliance.engines.protocol import DraftUse
from appliance.engines.vllm.device import Device, attention
from appliance.engines.vllm.drafts.heads import head_config, head_of, take_drafts, within
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.memory.weights import DeviceWeights
from appliance.vocabulary import RequestId, Task

PLACEHOLDER_TOKEN_ID: Final = -1
"""Behind a request's tokens in vLLM's table of those that a step gave."""
STEP_DRAFTS: Final = 256
"""Most tokens of all drafts of a step. Each takes memory for logits of the whole vocabulary, and a
large batch makes good use of a pass over the weights without them."""


class Proposer:
    """What vLLM asks for drafts in the midst of a step. It gets none: `Drafts` looks for them once
    the step is over, and only for requests that may have them.

    vLLM's own (`NgramProposer`) is compiled by Numba. Once that is in a process, vLLM cannot
    register its kernels for a second model there.
    """

    def __init__(self, config: VllmConfig) -> None:
        pass

    def load_model(self, model: object) -> None:
        """There is none."""

    def propose(self, sampled: Sequence[list[int]], *others: Any, **more: Any) -> list[list[int]]:
        return [[] for _ in sampled]


_SPECULATION: Final = "speculation"
"""Where it is in vLLM's configuration."""


def draft_args(
    speculation: Speculation | None,
    checkpoint: ModelConfig,
    task: Task,
    device: Device,
    ranks: int,
    images: int,
    stacks: AdapterStacks,
) -> dict[str, Any]:
    """vLLM's arguments for a model with drafts; none without. Raises `UnsupportedModel` for one
    that may not have drafts, such as one with adapters, or whose prompts have `images`, and
    `UnsupportedHead` for a head that does not fit."""
    if speculation is None:
        return {}
    check_drafts(
        checkpoint,
        task,
        on_cpu=device.host_memory,
        ranks=ranks,
        images=images,
        adapters=bool(stacks.slots),
    )
    if speculation.has_head:
        read_head(checkpoint, speculation)
        proposer = head_config(speculation, attention(checkpoint, device))
    else:
        proposer = {
            "method": "custom_class",
            "model": f"{Proposer.__module__}.{Proposer.__qualname__}",
            "num_speculative_tokens": speculation.tokens,
        }
    return {
        "speculative_config": proposer,
        "additional_config": {_SPECULATION: msgspec.to_builtins(speculation)},
    }


class Drafts:
    """The drafts of one model's requests. Between steps they lie in `Request.spec_token_ids`."""

    def __init__(
        self, core: EngineCore, runner: GPUModelRunner, block_tokens: int, weights: DeviceWeights
    ) -> None:
        """Of an engine with `draft_args`; a block of KV holds so many tokens, and a head, if there
        is one, has its weights among `weights`."""
        asked = core.vllm_config.additional_config.get(_SPECULATION)
        self._speculation = None if asked is None else msgspec.convert(asked, Speculation)
        self._runner = runner
        self._batch = runner.input_batch
        self._head = head_of(runner)
        if self._head is not None:
            self._head.weights = weights
        self._scheduler: ParkedScheduler = core.scheduler
        self._requests: dict[RequestId, Request] = self._scheduler.requests
        self._block_tokens = block_tokens
        self._context: int = core.scheduler.max_model_len
        self._checked: dict[RequestId, list[int]] = {}
        """Drafts of the step that is computed."""
        self.use = DraftUse(0, 0)
        """Since the engine was built."""
        if self._speculation is not None:
            _sample_as_usual(core, runner)

    def cut(self, decoding: Sequence[Request], prompts: Iterable[RequestId]) -> int:
        """Shorten drafts to what the next step is to check of them, which also computes `prompts`;
        how many tokens that are in all. O(requests)."""
        self._checked = {}
        drafted = [known for known in decoding if known.spec_token_ids]
        if not drafted or self._speculation is None:
            return 0
        computed = filter(None, map(self._requests.get, prompts))
        alone = any(_is_scored(known.sampling_params) for known in (*decoding, *computed))
        most = 0 if alone else min(self._speculation.tokens, STEP_DRAFTS // len(decoding))
        for known in drafted:
            known.spec_token_ids = known.spec_token_ids[: min(most, self._room(known))]
            self._checked[known.request_id] = known.spec_token_ids
        return sum(map(len, self._checked.values()))

    def _room(self, request: Request) -> int:
        """Tokens behind the next one that the request may have, and that lie in its block."""
        wanted: int = request.max_tokens - request.num_output_tokens
        possible: int = self._context - request.num_tokens
        in_block = self._block_tokens - request.num_computed_tokens % self._block_tokens
        room: int = min(wanted, possible, in_block) - 1
        return room

    def propose(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Count what a step made of its drafts, and look for those of the next one. O(tokens) of
        the requests that may have drafts."""
        if self._speculation is None:
            return
        drafted = sum(map(len, self._checked.values()))
        accepted = sum(
            _agreeing(self._checked.get(output.request_id, ()), output.new_token_ids)
            for output in outputs
        )
        self.use = DraftUse(self.use.drafted + drafted, self.use.accepted + accepted)
        if len(outputs) > STEP_DRAFTS:  # each would get less than one
            return
        guessed = take_drafts(self._runner) if self._head is not None else None
        for output in outputs:
            known = self._requests.get(output.request_id)
            if known is not None and _has_drafts(known):
                if known.num_computed_tokens % self._block_tokens == 0:
                    # vLLM caches full blocks of tokens that it knew before the step only.
                    self._scheduler.filled(known, known.num_computed_tokens)
                known.spec_token_ids = self._draft(known, guessed)

    def _draft(self, request: Request, guessed: dict[RequestId, list[int]] | None) -> list[int]:
        """Of a request of the last step, in which a head `guessed`, if there is one."""
        assert self._speculation is not None
        if guessed is not None:
            draft = guessed.get(request.request_id, [])
            return within(draft, request.num_computed_tokens, self._block_tokens)
        row = self._batch.req_id_to_index[request.request_id]
        tokens = self._batch.token_ids_cpu[row, : request.num_tokens]
        return look_up(tokens, self._speculation)


def _agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft became output: what replaces one that was refused differs from
    it."""
    pairs = zip(draft, tokens, strict=False)  # an answer may end within its draft
    return next(
        (place for place, (guess, token) in enumerate(pairs) if guess != token),
        min(len(draft), len(tokens)),
    )


def look_up(tokens: npt.NDArray[np.int32], speculation: Speculation) -> list[int]:
    """What followed where the last tokens stood before: the most of them that did, and the first
    time. Empty if too few did."""
    tail = tokens[::-1]
    ends = np.flatnonzero(tokens[:-1] == tail[0])
    """Where what stood before may end."""
    length, longest = 1, ends
    while len(longest) and length < speculation.prompt_lookup_max:
        ends = longest[longest >= length]
        ends = ends[tokens[ends - length] == tail[length]]
        if not len(ends):
            break
        longest, length = ends, length + 1
    if not len(longest) or length < speculation.prompt_lookup_min:
        return []
    behind = int(longest[0]) + 1
    found: list[int] = tokens[behind : behind + speculation.tokens].tolist()
    return found


def _sample_as_usual(core: EngineCore, runner: GPUModelRunner) -> None:
    """Have requests without drafts draw as they do from an engine that has none. vLLM leaves out
    `min_p` and `logit_bias` where there are drafts, and knows no better check on a CPU."""
    runner.rejection_sampler = GreedyCheck(runner.sampler)
    runner.input_batch.logitsprocs = LogitsProcessors(
        make(core.vllm_config, runner.device, is_pin_memory=False)
        for make in BUILTIN_LOGITS_PROCESSORS
    )


class GreedyCheck(RejectionSampler):  # type: ignore[misc]
    """Keeps drafts as far as they are what the model finds most probable.

    In the place of vLLM's, which loses temperatures on a CPU: `_expand_kernel_impl` writes them to
    a copy. Here each request draws one token as in a step without drafts, in the same call.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """`logits` [tokens, vocabulary] are of all drafts, and of the token behind each draft. The
        output [requests, 1 + longest draft] ends with placeholders."""
        drawn = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=sampling_metadata,
            predict_bonus_token=True,
        )
        best = self.sampler.greedy_sample(logits[metadata.target_logits_indices].float()).tolist()
        drafts, start = metadata.draft_token_ids.tolist(), 0
        rows = drawn.sampled_token_ids.tolist()
        for row, count in zip(rows, metadata.num_draft_tokens, strict=True):
            end = start + count
            wrong = next((at for at in range(start, end) if best[at] != drafts[at]), None)
            row[:] = [*best[start:end], *row] if wrong is None else best[start : wrong + 1]
            row += [PLACEHOLDER_TOKEN_ID] * (1 + metadata.max_spec_len - len(row))
            start = end
        drawn.sampled_token_ids = torch.tensor(rows, dtype=torch.int32)
        return drawn


def _has_drafts(request: Request) -> bool:
    """Whether the request has tokens of its own next, each the one of the largest logit, whatever
    it was that came before."""
    params: SamplingParams | None = request.sampling_params
    return (
        params is not None
        and not request.is_prefill_chunk
        and not _is_scored(params)
        and params.sampling_type is SamplingType.GREEDY
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and params.structured_outputs is None
        and params.logit_bias is None
        and params.allowed_token_ids is None
        and not params.bad_words_token_ids
        and not params.min_tokens
        and params.repetition_detection is None
    )


def _is_scored(params: SamplingParams | None) -> bool:
    """Whether steps that compute the request have no drafts at all, as its log probabilities or
    its budget for reasoning are counted by step."""
    return params is not None and (
        params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.logprob_token_ids is not None
        or params.thinking_token_budget is not None
    )
