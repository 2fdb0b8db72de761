"""A request goes on elsewhere, or after a loss, with the tokens that it would have had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.house import Baseline, House, Sampling, sequence, tokens

PROMPT = tuple(range(10, 80))
MODEL = "qwen2-gqa"

GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True)
SEEDED_TOP = Sampling(max_tokens=40, temperature=0.8, seed=5, top_k=20, top_p=0.9, ignore_eos=True)
PENALISED = Sampling(
    max_tokens=40,
    temperature=0.0,
    ignore_eos=True,
    presence_penalty=0.6,
    frequency_penalty=0.9,
    repetition_penalty=1.3,
    min_tokens=30,
)
ALL = pytest.mark.parametrize(
    "sampling",
    [GREEDY, SEEDED, SEEDED_TOP, PENALISED],
    ids=["greedy", "seeded", "seeded-top", "penalised"],
)


def finish(engine: Any, name: str) -> list[int]:
    """All further tokens of a request."""
    output: list[int] = []
    while True:
        (one,) = engine.step([name], 40)
        output.append(one.token)
        if one.finished:
            return output


def undisturbed(engine: Any, sampling: Sampling) -> list[int]:
    engine.add(sequence(MODEL, "whole", PROMPT, sampling))
    return tokens(engine.prefill("whole", 40)) + finish(engine, "whole")


@ALL
def test_undisturbed_equals_plain_vllm(
    house: House, plain_vllm: Baseline, sampling: Sampling
) -> None:
    """Seeds and penalties mean here what they mean in vLLM."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()

    assert [undisturbed(engine, sampling)] == plain_vllm(MODEL, [PROMPT], [sampling])


@ALL
@pytest.mark.parametrize("steps", [0, 7, 26])
def test_migration(house: House, twin: House, sampling: Sampling, steps: int) -> None:
    """KV swapped out of one instance and into another goes on as if it had stayed.

    After 26 steps the computed tokens (96) fill their blocks exactly.
    """
    source, target = house.engines[MODEL], twin.engines[MODEL]
    source.begin_load().wait()
    target.begin_load().wait()
    expected = undisturbed(source, sampling)
    places = house.swap_places(source, len(PROMPT) + 40)

    source.add(sequence(MODEL, "r", PROMPT, sampling))
    output = tokens(source.prefill("r", 40))
    for _ in range(steps):
        output += tokens(source.step(["r"], 40))
    moved = house.swap_out(source, "r", places)
    source.forget("r")
    target.add(sequence(MODEL, "r", PROMPT, sampling, tuple(output)))
    arrived = target.swap_in("r", places, 40).nbytes
    output += finish(target, "r")

    assert output == expected
    assert moved == arrived == source.kv.blocks(len(PROMPT) + steps) * source.kv.block_bytes


@ALL
@pytest.mark.parametrize("produced", [1, 9])
def test_recovery(house: House, twin: House, sampling: Sampling, produced: int) -> None:
    """Prompt and output so far, computed again on another instance, go on as before."""
    lost, other = house.engines[MODEL], twin.engines[MODEL]
    lost.begin_load().wait()
    other.begin_load().wait()
    expected = undisturbed(lost, sampling)

    other.add(sequence(MODEL, "r", PROMPT, sampling, tuple(expected[:produced])))
    output = tokens(other.prefill("r", 40)) + finish(other, "r")

    assert expected[:produced] + output == expected


def test_seeds_survive_chunked_prefill(house: House) -> None:
    """Chunks that produce nothing draw nothing from the request's generator."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    expected = undisturbed(engine, SEEDED)
    whole = engine._scheduler.max_num_scheduled_tokens
    engine._scheduler.max_num_scheduled_tokens = 32
    try:
        assert undisturbed(engine, SEEDED) == expected
    finally:
        engine._scheduler.max_num_scheduled_tokens = whole


def test_instances_share_the_master_image(house: House, twin: House) -> None:
    """Only the first instance of a model writes the image."""
    for model in ("qwen2-gqa", "llama-96"):
        assert house.engines[model].layout_digest == twin.engines[model].layout_digest
    assert house.engines["llama-96"].layout_digest != house.engines["llama-mha"].layout_digest
