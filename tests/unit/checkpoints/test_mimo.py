"""Layers of MiMo-V2 differ in what they keep, and its file says more than vLLM computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.families import UnsupportedModel, check_family, is_tried
from appliance.checkpoints.kv_layers import kv_layers
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.errors import CheckpointError
from tests.configs import CONFIGS

MIMO = CONFIGS["mimo-v2-flash-bf16"]
KEY = 192
"""Numbers of a key; values have 128, and are padded."""


def read(folder: Path, changes: dict[str, Any]) -> ModelConfig:
    """A file in which what is None here is left out."""
    said = {key: value for key, value in (MIMO | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))
    return read_model_config(folder)


def test_what_layers_keep(tmp_path: Path) -> None:
    """Nine of 48 attend to all tokens; the others keep twice as much of a token, of 128 tokens.
    Blocks have one size, so those of the first have twice as many tokens."""
    config = read(tmp_path, {})
    check_family(config)
    assert is_tried(config)

    kept = kv_layers(config, 2, cuda=False)

    assert (kept.attention, kept.windowed, kept.window) == (48, 39, 128)
    assert (kept.token_bytes, kept.window_token_bytes) == (2 * 4 * KEY * 2, 2 * 8 * KEY * 2)
    tables = kept.tables(32, 4096)
    assert (tables.block_tokens, tables.window_tokens) == (64, 32)
    assert set(tables.windows) == {5}
    assert tables.layer_block_bytes == 32 * kept.window_token_bytes == 64 * kept.token_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_layer_pattern": None}, "has no hybrid_layer_pattern, which vLLM needs.*; add hy"),
        ({"rope_theta": None}, "has no rope_theta"),
        ({"swa_rope_theta": None}, "has no swa_rope_theta"),
        ({"moe_layer_freq": 1}, "moe_layer_freq is no list"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"sliding_window": 64}, "sliding_window is 64 and sliding_window_size is 128"),
        ({"v_head_dim": 256}, r"values \(v_head_dim\) are longer than keys \(head_dim\)"),
        ({"swa_v_head_dim": 256}, r"values \(swa_v_head_dim\) are longer"),
    ],
)
def test_what_vllm_does_not_compute(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_family(read(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_layer_pattern": [0, 1]}, "must say 0 or 1 of each of 48 layers"),
        ({"hybrid_layer_pattern": [2] * 48}, "must say 0 or 1"),
        ({"hybrid_layer_pattern": 1}, "must say 0 or 1"),
        ({"swa_num_key_value_heads": 6}, "neither is a multiple of the other"),
        ({"swa_num_key_value_heads": "8"}, "swa_num_key_value_heads must be a positive integer"),
    ],
)
def test_what_is_no_size(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        kv_layers(read(tmp_path, changes), 2, cuda=False)


def test_a_window_is_a_positive_number(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="sliding_window_size must be a positive integer"):
        check_family(read(tmp_path, {"sliding_window_size": -1}))
