"""How a request's tokens are drawn: what it may ask for, and its own random generator."""

from __future__ import annotations

from typing import Final

import torch
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingType

from appliance.engines.vllm.device import Device
from appliance.engines.vllm.messages import MAX_OUTPUT_BYTES

ALL_LOGPROBS: Final = -1
"""vLLM's word for as many log probabilities as there are tokens."""
LOGPROB_BYTES: Final = 8
"""Of one log probability of a prompt's token, with the token that it is of."""


def check_sampling(
    params: SamplingParams, config: ModelConfig, prompt_tokens: int, output_tokens: int
) -> None:
    """Raise `ValueError` for what the model cannot draw behind so many tokens.

    The front end has checked all of it for its own configuration, but what is wrong here would end
    the whole worker.
    """
    try:
        params.verify(config, None, None, None)
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error
    if params.max_tokens is None or params.max_tokens <= output_tokens:
        raise ValueError(f"max_tokens {params.max_tokens} leave no room for another token")
    if params.prompt_logprob_token_ids is not None or params.trace_decode_token_ids is not None:
        raise ValueError("prompt_logprob_token_ids and trace_decode_token_ids are not supported")
    _check_logprobs(params, config.get_vocab_size(), prompt_tokens)


def _check_logprobs(params: SamplingParams, vocabulary: int, prompt_tokens: int) -> None:
    for asked in (params.logprobs, params.prompt_logprobs):
        if asked is not None and asked > vocabulary:
            raise ValueError(
                f"there are no {asked} log probabilities of a token, as the vocabulary has "
                f"{vocabulary}"
            )
    if params.prompt_logprobs is not None:
        each = logprobs_asked(params.prompt_logprobs, vocabulary)
        size = prompt_tokens * (each + 2) * LOGPROB_BYTES
        if size > MAX_OUTPUT_BYTES:
            raise ValueError(
                f"prompt_logprobs of {prompt_tokens} tokens take {size} bytes, more "
                f"than {MAX_OUTPUT_BYTES}: ask for fewer, or for a shorter prompt"
            )


def logprobs_asked(logprobs: int, vocabulary: int) -> int:
    """How many log probabilities of a token a request asks for."""
    return vocabulary if logprobs == ALL_LOGPROBS else logprobs


def seeded_generator(
    params: SamplingParams, tokens_drawn: int, vocabulary: int, device: Device
) -> torch.Generator | None:
    """Its state after `tokens_drawn` tokens; None for a request without a seed.

    Raises `ValueError` for a seed that is beyond 64 bits.
    """
    if params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    return device.generator(params.seed, tokens_drawn, vocabulary)
