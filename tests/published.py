"""Published models as entries of a catalogue, without their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.kv_layers import kv_layers
from appliance.checkpoints.model_config import read_model_config
from tests.configs import CONFIGS

BF16_BYTES: Final = 2
WEIGHT_BYTES: Final = {
    "qwen3-0.6b": 1_503_264_768,
    "llama-3.2-1b": 2_471_645_608,
    "gemma-3-1b-it": 1_999_811_208,
    "lfm2-1.2b": 2_340_697_936,
    "llama-3.1-8b-instruct": 16_060_522_240,
    "deepseek-v2-lite": 31_412_968_448,
}
"""In bfloat16, nearly those of the published checkpoints."""


def write_config(folder: Path, name: str) -> None:
    """Write its config.json to `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")


def published(folder: Path, name: str, *, cuda: bool = False) -> CatalogEntry:
    """The model as its config.json, which is written to `folder`, describes it."""
    write_config(folder, name)
    config = read_model_config(folder)
    return CatalogEntry(
        name=name,
        path=folder,
        architecture=config.architecture,
        dtype="bfloat16",
        layers=config.integer("num_hidden_layers"),
        heads=config.integer("num_attention_heads"),
        kv_heads=config.integer("num_key_value_heads"),
        kv=kv_layers(config, BF16_BYTES, cuda=cuda),
        max_positions=config.integer("max_position_embeddings"),
        weight_bytes=WEIGHT_BYTES[name],
        parameters=0,
        created=0,
    )
