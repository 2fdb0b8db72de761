"""How tokens are drawn: protocol terms to vLLM's, and a seeded generator behind an output."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import SamplingType

from appliance.engines.protocol import Sampling


def sampling_params(
    sampling: Sampling, generation_config: dict[str, Any], eos_token_id: int | None
) -> SamplingParams:
    """vLLM's parameters, with the model's own end tokens. Raises `ValueError` for bad values."""
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        detokenize=False,
    )
    params.update_from_generation_config(generation_config, eos_token_id)
    return params


def seeded_generator(params: SamplingParams, tokens_drawn: int) -> torch.Generator | None:
    """The request's own generator as it stands after `tokens_drawn` tokens; None if it has none.

    vLLM's CPU sampler draws one integer per token from it, as here.
    """
    if params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    generator = torch.Generator(device="cpu")
    generator.manual_seed(params.seed)
    for _ in range(tokens_drawn):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return generator
