"""Models whose layers plain vLLM has code of its own for on a CPU (states, queries with three
dimensions), or that vLLM computes wrongly without the appliance's mends, say what transformers
computes of them: an error of vLLM's would be in what other tests compare with, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.engines.vllm.messages import decode_output
from appliance.platform.cpus import computes_linear_attention
from tests.configs import CONFIGS
from tests.engine.house import Sampling, make_house, sequence
from tests.engine.shrunken import NEVER_SAID, make_shrunken

SLABS = 48
MODELS = [
    ("ernie-4.5-21b-a3b-pt", "float32", 1e-3),
    ("gemma-3n-e2b-text", "float32", 1e-3),
    ("gemma-4-e4b-text", "float32", 1e-3),
    ("glm-4.7-flash", "float32", 1e-3),
    ("lfm2-1.2b", "float32", 1e-3),
    ("lfm2-8b-a1b", "float32", 1e-3),
    ("mamba-codestral-7b-v0.1", "float32", 1e-3),
    ("mimo-v2-flash-bf16", "float32", 1e-3),
    ("minimax-m2-bf16", "float32", 1e-3),
    ("phi-3.5-moe-instruct", "float32", 1e-3),
    ("qwen3.5-27b-text", "bfloat16", 0.4),
    ("qwen3.5-35b-a3b-text", "bfloat16", 0.4),
    ("zamba2-7b", "float32", 1e-3),
]
"""With how far a log probability may be off. Those in bfloat16 spread by 2."""
NEVER = {"gemma-4-e4b-text"}
"""Their files name tokens that are never said."""


@pytest.mark.parametrize(("name", "dtype", "most"), MODELS)
def test_log_probabilities_are_those_of_transformers(
    tmp_path: Path, name: str, dtype: str, most: float
) -> None:
    """Of the first token behind a prompt, and of one that is decoded."""
    if dtype == "bfloat16" and not computes_linear_attention():
        pytest.skip("the CPU lacks the instructions for linear attention")
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    engine = make_house().build(name, path, dtype=dtype)
    engine.begin_load().wait()
    model = of_transformers(path, dtype)
    sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=20)
    for length in (64, 203):
        words = [3 + i * 7 % 500 for i in range(length)]
        engine.add(sequence(name, "r", tuple(words), sampling))
        produced = [*engine.prefill("r", SLABS), *engine.step(["r"], SLABS)]
        assert len(produced) == 2
        for one in produced:
            scores = decode_output(one.detail).new_logprobs
            with torch.no_grad():
                logits = model(torch.tensor([words])).logits[0, -1]
            if name in NEVER:  # of which transformers' own loop knows, not its model
                logits[::NEVER_SAID] = float("-inf")
            expected = logits.log_softmax(-1)
            tokens, found = scores.logprob_token_ids[0], scores.logprobs[0]
            assert one.token == int(expected.argmax())
            torch.testing.assert_close(
                torch.as_tensor(found), expected[torch.as_tensor(tokens)], atol=most, rtol=0
            )
            words.append(one.token)
    engine.retire()


def of_transformers(path: str, dtype: str) -> Any:
    """Its model with weights as they are in this type, which computes in float32."""
    import transformers
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=getattr(torch, dtype)).to(torch.float32)
    for layer in model.modules():  # Zamba 2 was trained without the least step that is there now
        if hasattr(layer, "time_step_limit"):
            layer.time_step_limit = (0.0, float("inf"))
        if isinstance(layer, MambaRMSNormGated):
            layer.forward = partial(norm_each_group, layer, model.config.n_groups)
    return model


def norm_each_group(
    norm: Any, groups: int, values: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """Of Mamba 2, as the code with which it was trained does. transformers norms all groups as
    one."""
    gated = (values * torch.nn.functional.silu(gate)).unflatten(-1, (groups, -1))
    scale = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (gated * scale).flatten(-2)  # type: ignore[no-any-return]
