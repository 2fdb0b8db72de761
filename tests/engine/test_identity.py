"""Interleaved models in a pool far smaller than their sum answer as plain vLLM does alone."""

from __future__ import annotations

import pytest

from tests.engine.house import Baseline, House, Sampling, sequence, tokens
from tests.engine.player import Player, prompts

LENGTH = 24


@pytest.mark.parametrize("models", [["llama-mha", "qwen2-gqa", "qwen3-128"], ["llama-96"]])
def test_outputs_equal_plain_vllm(house: House, plain_vllm: Baseline, models: list[str]) -> None:
    """Weights reloaded and KV swapped between every three tokens change no token."""
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    players = {model: Player(house, model, sampling) for model in models}

    while any(player.live for player in players.values()):
        for player in players.values():
            player.turn(3, 40)
            house.arena.check_integrity()

    for model, player in players.items():
        expected = plain_vllm(model, prompts(model), [sampling] * 3)
        assert list(player.outputs.values()) == expected
        assert all(len(output) == LENGTH for output in expected)


def test_pool_is_smaller_than_the_models(house: House) -> None:
    """The test above would prove nothing in a pool with room for all."""
    weights = sum(engine.weight_slabs for engine in house.engines.values())
    longest = sum(engine.kv.slabs(engine.kv.blocks(1024)) for engine in house.engines.values())
    assert weights + longest > house.arena.slabs


def test_two_models_resident_at_once(house: House, plain_vllm: Baseline) -> None:
    """Stepping two engines in turn, token by token, mixes nothing up."""
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    models = ["qwen2-gqa", "llama-96"]
    outputs: dict[str, list[int]] = {}
    for model in models:
        engine = house.engines[model]
        engine.begin_load().wait()
        engine.add(sequence(model, "same-id", prompts(model)[2], sampling))
        outputs[model] = tokens(engine.prefill("same-id", 40))

    for _ in range(11):
        for model in models:
            outputs[model] += tokens(house.engines[model].step(["same-id"], 40))

    for model in models:
        assert [outputs[model]] == plain_vllm(model, [prompts(model)[2]], [sampling])


def test_bfloat16_equals_plain_vllm(house: House, plain_vllm: Baseline) -> None:
    """Where rounding hides less, a request by itself still has the tokens of plain vLLM."""
    model = "llama-bf16"
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    engine = house.engines[model]
    engine.begin_load().wait()

    for prompt in prompts(model):
        engine.add(sequence(model, "alone", prompt, sampling))
        output = tokens(engine.prefill("alone", 40))
        while engine.knows("alone"):
            output += tokens(engine.step(["alone"], 40))

        assert [output] == plain_vllm(model, [prompt], [sampling])


@pytest.mark.parametrize("model", ["llama-mha", "llama-bf16"])
def test_what_memory_held_before_does_not_matter(
    house: House, plain_vllm: Baseline, model: str
) -> None:
    """Attention reads blocks to their end: bytes of others there must not reach an output."""
    house.overwrite_free_memory()
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine = house.engines[model]
    engine.begin_load().wait()
    engine.add(sequence(model, "r", prompts(model)[0], sampling))
    output = tokens(engine.prefill("r", 40))
    while engine.knows("r"):
        output += tokens(engine.step(["r"], 40))

    assert [output] == plain_vllm(model, [prompts(model)[0]], [sampling])
