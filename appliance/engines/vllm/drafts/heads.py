"""Heads that draft: small layers behind a model, which guess tokens from its hidden states.

They come with the checkpoint (MTP) or in a folder of their own (EAGLE). To the rest of an engine a
head is part of its model: its weights lie behind the others in their region, and its layers keep
their keys and values in the blocks of the others. So both move, leave and are counted together.

Each step ends with the head: vLLM runs it over the tokens of the step, and then again for each
further token that it drafts. These have no block yet if the request's block is full, so a draft
ends there. What the head keeps and guesses has no part in what is put out: each guess is compared
with what the model itself finds.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.drafts import Speculation
from appliance.engines.vllm.weights.parameters import HEAD
from appliance.memory.weights import DeviceWeights
from appliance.vocabulary import RequestId


def head_config(speculation: Speculation, attention: AttentionBackendEnum | None) -> dict[str, Any]:
    """vLLM's configuration of drafts by a head, which attends as the model does."""
    found: dict[str, Any] = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.tokens,
        "draft_sample_method": "greedy",
        "attention_backend": attention,
    }
    return found | ({"model": speculation.path} if speculation.path else {})


class HeadProposer(EagleProposer):  # type: ignore[misc]
    """vLLM's proposer for heads, in blocks that are there, with weights that come and go."""

    weights: DeviceWeights
    """Of the model and its head; set once they are placed."""

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The tokens of the step are there, so it waits for no more than the head itself."""
        transfer = self.weights.transfer
        assert transfer is not None, "a step is computed without weights"
        transfer.wait()
        drafts: torch.Tensor = super().propose(*args, **kwargs)
        return drafts

    def _maybe_share_embeddings(self, target_language_model: torch.nn.Module) -> None:
        """vLLM would compare an embedding of the head's own with the model's. Neither has numbers
        yet, so it keeps its own."""
        if not getattr(self.model, "has_own_embed_tokens", False):
            super()._maybe_share_embeddings(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        """The same for an output head."""
        if not getattr(self.model, "has_own_lm_head", False):
            super()._maybe_share_lm_head(target_language_model)

    def _update_positions_dependent_metadata(
        self,
        positions: torch.Tensor,
        common_attn_metadata: Any,
        batch_size: int,
        input_batch_size: int,
        block_size: int,
    ) -> torch.Tensor:
        """The places of the next token that is drafted. Where a request's block is full, there is
        none: the head computes something there that is written nowhere, and `within` cuts."""
        moves = (positions + 1) % block_size != 0
        positions = positions + moves
        self.positions[:batch_size] = positions
        rows = self.arange[:batch_size].long()
        blocks = common_attn_metadata.block_table_tensor[rows, positions // block_size]
        slots = self._slot_mapping_buffer[:input_batch_size]
        slots.fill_(PADDING_SLOT_ID)
        slots[:batch_size] = torch.where(
            moves, blocks.long() * block_size + positions % block_size, PADDING_SLOT_ID
        )
        common_attn_metadata.slot_mapping = slots[:batch_size]
        common_attn_metadata.seq_lens[:batch_size] += moves
        common_attn_metadata.max_seq_len = min(
            common_attn_metadata.max_seq_len + 1, self.max_model_len
        )
        if common_attn_metadata.seq_lens_cpu_upper_bound is not None:
            common_attn_metadata.seq_lens_cpu_upper_bound += 1
        moved: torch.Tensor = self.positions[:batch_size]
        return moved


def use_heads(runner: GPUModelRunner) -> None:
    """Have a runner that is to draft with a head do it in the way of `HeadProposer`. Called before
    the head is loaded."""
    if isinstance(getattr(runner, "drafter", None), EagleProposer):
        runner.drafter = HeadProposer(runner.vllm_config, runner.device, runner)


def join_head(runner: GPUModelRunner, model: torch.nn.Module) -> None:
    """Make the head, if there is one, a part of its model, so that its parameters are."""
    head = head_of(runner)
    if head is not None:
        model.add_module(HEAD, head.model)


def head_of(runner: GPUModelRunner) -> HeadProposer | None:
    """What drafts with a head, if it is one."""
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, HeadProposer) else None


def take_drafts(runner: GPUModelRunner) -> dict[RequestId, list[int]]:
    """What the head drafted in the last step, of each request of its batch."""
    taken = runner.take_draft_token_ids()
    if taken is None:
        return {}
    return dict(zip(taken.req_ids, taken.draft_token_ids, strict=True))


def within(draft: list[int], computed: int, block_tokens: int) -> list[int]:
    """What of a draft was guessed from all that comes before it. A request has `computed` tokens;
    if these end with a block, the head had no room behind the first guess."""
    return draft if computed % block_tokens else draft[:_AT_THE_END]


_AT_THE_END: Final = 1
