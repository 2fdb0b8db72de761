"""Checkpoints of sentence-transformers, and what engines make of prompts that they pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from appliance.engines.protocol import NO_TOKEN, Produced
from appliance.vocabulary import FinishReason


def write_modules(path: Path, mode: str, kinds: Sequence[str] = ("Normalize",)) -> None:
    """What such a model has next to its weights: how it pools, and `kinds` of modules behind that,
    those with files of their own in folders NUMBER_KIND."""
    listed = ["Transformer", "Pooling", *kinds]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(listed)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, f"pooling_mode_{mode}": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def vector(produced: Sequence[Produced]) -> list[float]:
    """The one outcome of a prompt that is pooled."""
    from appliance.engines.vllm.messages import decode_output

    (one,) = produced
    assert (one.token, one.tokens, one.finished) == (NO_TOKEN, 0, FinishReason.STOP)
    assert one.detail is not None
    output = decode_output(one.detail)
    assert (output.request_id, output.new_token_ids) == (one.request, [])
    values: list[float] = output.pooling_output.reshape(-1).tolist()
    return values
