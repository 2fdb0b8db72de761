"""An engine that is retired leaves nothing behind: its name and its memory are another one's."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from vllm.transformers_utils.config import get_pooling_config

from tests.engine.house import Baseline, House, Sampling, make_house, sequence, tokens

PROMPT = tuple(range(10, 40))
OUTPUT = 12


def generate(house: House, model: str, name: str) -> list[int]:
    """A whole answer, by an engine whose weights come for it."""
    engine = house.engines[model]
    engine.begin_load()
    engine.add(
        sequence(model, name, PROMPT, Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True))
    )
    produced = tokens(engine.prefill(name, 20))
    while len(produced) < OUTPUT:
        produced += tokens(engine.step([name], 20))
    return produced


def test_a_name_is_built_again(
    checkpoints: dict[str, str], plain_vllm: Baseline, tmp_path: Path
) -> None:
    """While another engine lives: both say what plain vLLM says, in memory that is free again."""
    sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    names = ("llama-mha", "qwen2-gqa")
    expected = {name: plain_vllm(name, [PROMPT], [sampling])[0] for name in names}
    house = make_house()
    for name in names:
        house.build(name, checkpoints[name])
    first = generate(house, "qwen2-gqa", "r1")
    regions = len(house.arena._regions)
    other = house.engines["llama-mha"]
    other.begin_load()
    other.add(sequence("llama-mha", "long", PROMPT, sampling))
    beside = tokens(other.prefill("long", 20))

    retired = house.engines.pop("qwen2-gqa")
    retired.add(sequence("qwen2-gqa", "r2", PROMPT, sampling))
    empty = str(tmp_path)
    assert get_pooling_config(empty) is None
    retired.retire()
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    with pytest.raises(KeyError):  # it is read again, and says nothing of its path
        get_pooling_config(empty)
    assert not [owner for owner in house.arena.usage() if "qwen2" in owner]
    assert len(house.arena._regions) == regions - 2
    house.arena.check_integrity()
    gone = weakref.ref(retired)
    del retired
    gc.collect()

    house.build("qwen2-gqa", checkpoints["qwen2-gqa"])
    while len(beside) < OUTPUT:
        beside += tokens(other.step(["long"], 20))
    again = generate(house, "qwen2-gqa", "r1")

    assert (first, again) == (expected["qwen2-gqa"], expected["qwen2-gqa"])
    assert beside == expected["llama-mha"]
    assert gone() is None
    house.idle()
