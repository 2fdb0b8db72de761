"""The figures of docs/sizing.md are those that the code computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.kv_layers import KvLayers, kv_layers
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Devices
from appliance.config.sizing import Least, least
from appliance.memory.kv_pool import BLOCK_TOKENS
from appliance.units import Memory, human
from tests.configs import CONFIGS
from tests.prose import ROOT

PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", PAGE, re.MULTILINE)
MLA_BLOCK_TOKENS = 16
BF16_BYTES = 2
EXAMPLE, EXAMPLE_WEIGHT_BYTES, EXAMPLE_CONTEXT = "qwen2.5-7b-instruct", 15_231_233_024, 32_768
EXAMPLE_MEMORY, SLAB_BYTES = "24GiB", 2 << 20


def kept(folder: Path, name: str) -> KvLayers:
    """What a published model keeps of a request on the CPU, in bfloat16."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return kv_layers(read_model_config(folder), BF16_BYTES, cuda=False)


def request_bytes(kv: KvLayers, tokens: int) -> int:
    tables = kv.tables(MLA_BLOCK_TOKENS if kv.compressed else BLOCK_TOKENS, tokens)
    return tables.blocks(tokens) * tables.layers * tables.layer_block_bytes


def example(folder: Path) -> Least:
    """What the model of the example needs of its devices."""
    entry = CatalogEntry(
        name=EXAMPLE,
        path=folder,
        architecture="Qwen2ForCausalLM",
        dtype="bfloat16",
        layers=28,
        heads=28,
        kv_heads=4,
        kv=kept(folder, EXAMPLE),
        max_positions=EXAMPLE_CONTEXT,
        weight_bytes=EXAMPLE_WEIGHT_BYTES,
        parameters=0,
        created=0,
    )
    devices = Devices(kind="cpu", memory_bytes=Memory.read(EXAMPLE_MEMORY))
    assert devices.slab_bytes == SLAB_BYTES
    return least(entry, EXAMPLE_CONTEXT, devices)


@pytest.mark.parametrize(("name", "figures"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_has_what_is_computed(name: str, figures: str, tmp_path: Path) -> None:
    kv = kept(tmp_path, name)
    sizes = (kv.all_token_bytes, 1024 * kv.all_token_bytes)
    positions = CONFIGS[name]["max_position_embeddings"]
    whole = [
        human(request_bytes(kv, tokens)) if tokens <= positions else "-"
        for tokens in (8192, 32_768)
    ]

    assert figures == " | ".join([*map(human, sizes), *whole])


def test_there_are_rows() -> None:
    assert len(ROWS) > 10


def test_the_example_has_what_is_computed(tmp_path: Path) -> None:
    need = example(tmp_path)
    slabs = int(Memory.read(EXAMPLE_MEMORY)) // SLAB_BYTES
    requests = (slabs - need.weights) // need.kv
    words = " ".join(PAGE.split())

    assert f"{EXAMPLE_WEIGHT_BYTES:,} bytes" in words
    assert f"{need.weights:,} slabs" in words
    assert f"{need.kv:,} slabs ({human(need.kv * SLAB_BYTES)})" in words
    assert f"{slabs:,} slabs" in words
    assert f"({slabs:,} - {need.weights:,}) ÷ {need.kv:,} = {requests}" in words
