"""Engines whose master images are encoded: the same tokens from fewer slabs of the host tier, and
damage there that is seen, named, and reaches no output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from appliance.engines.protocol import Verdict
from appliance.kernels.exp7 import BLOCK_BYTES
from tests.engine.house import Baseline, House, Sampling, make_house, sequence, tokens
from tests.engine.player import Player, prompts

HALF, FULL = "llama-bf16", "qwen2-gqa"


@pytest.fixture(scope="module")
def _encoded(checkpoints: dict[str, str]) -> House:
    house = make_house()
    for model in (HALF, FULL):
        house.build(model, checkpoints[model], encoded=True)
    return house


@pytest.fixture
def encoded(_encoded: House) -> Iterator[House]:
    """One model of bf16 numbers, one of others."""
    yield _encoded
    _encoded.idle()


def alone(engine: Any, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    """The tokens of one request; the weights leave the device after each."""
    engine.begin_load()
    engine.add(sequence(engine.model, "alone", prompt, sampling))
    output = tokens(engine.prefill("alone", 40))
    while engine.knows("alone"):
        engine.evict_weights()
        engine.begin_load()
        output += tokens(engine.step(["alone"], 40))
    return output


def test_outputs_equal_plain_vllm(
    encoded: House, plain_vllm: Baseline, checkpoints: dict[str, str]
) -> None:
    """Of bf16 numbers in fewer slabs, of others as they are; also for an instance that adopts the
    image that another one encoded."""
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    half, full = encoded.engines[HALF], Player(encoded, FULL, sampling)
    assert len(encoded.images[HALF]) < half.weight_slabs
    assert len(encoded.images[FULL]) in (full.engine.weight_slabs, full.engine.host_slabs)
    while full.live:
        full.turn(3, 40)
        half.evict_weights()
    twin = make_house()
    twin.host = encoded.host
    adopted = twin.build(HALF, checkpoints[HALF], image=encoded.images[HALF], encoded=True)

    expected = plain_vllm(FULL, prompts(FULL), [sampling] * 3)
    assert list(full.outputs.values()) == expected
    for engine in (half, adopted):
        output = alone(engine, prompts(HALF)[2], sampling)
        assert [output] == plain_vllm(HALF, [prompts(HALF)[2]], [sampling])
        assert engine.verify() is Verdict.OK


def test_a_damaged_block_is_named(
    encoded: House, plain_vllm: Baseline, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in the host tier: `verify` says which block it is in, and the next load reads the
    files in its place. A bit of the device is told from that."""
    engine = encoded.engines[HALF]
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK
    byte = encoded.host.view(encoded.images[HALF][0] + 1000, 1)
    byte[0] ^= 4
    assert engine.verify() is Verdict.DAMAGED
    assert f"block 0 of 7, bytes 0 to {BLOCK_BYTES - 1} of the weights" in caplog.text

    engine.evict_weights()
    sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    output = alone(engine, prompts(HALF)[0], sampling)
    assert [output] == plain_vllm(HALF, [prompts(HALF)[0]], [sampling])
    assert f"weights:{HALF} is loaded from its files: block 0 of 7" in caplog.text
    byte[0] ^= 4
    assert engine.verify() is Verdict.OK

    from appliance.engines.vllm.weights.tensors import bytes_at

    bytes_at(engine._placed.weights.region.address, 1)[0] ^= 1
    assert engine.verify() is Verdict.DIFFERS
