"""A request's own random generator, as it stands behind an output."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.sampling_params import SamplingType


def seeded_generator(params: SamplingParams, tokens_drawn: int) -> torch.Generator | None:
    """As it stands after `tokens_drawn` tokens; None for a request without a seed.

    vLLM's CPU sampler draws one integer per token from it, as here. Raises `ValueError` for a seed
    that is beyond 64 bits.
    """
    if params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    generator = torch.Generator(device="cpu")
    try:
        generator.manual_seed(params.seed)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"seed {params.seed} is beyond 64 bits") from error
    for _ in range(tokens_drawn):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return generator
