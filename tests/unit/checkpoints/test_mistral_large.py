"""Mistral Large 3 with a ``config.json``: keys that it has to have, so that no value of DeepSeek
V3's is taken for one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.families import UnsupportedModel, check_family, is_tried
from appliance.checkpoints.model_config import read_model_config
from tests.configs import CONFIGS

NAME = "mistral-large-3-675b-instruct-2512-bf16"
LEFT_OUT = "left out"


def check(path: Path, changes: dict[str, Any], name: str = NAME) -> None:
    config = {key: v for key, v in (CONFIGS[name] | changes).items() if v != LEFT_OUT}
    (path / "config.json").write_text(json.dumps(config))
    found = read_model_config(path)
    check_family(found)
    assert is_tried(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_group": LEFT_OUT}, "no n_group, for which DeepSeek V3's would be taken; add n_group"),
        ({"routed_scaling_factor": LEFT_OUT}, "no routed_scaling_factor, for which DeepSeek"),
        ({"llama_4_scaling": LEFT_OUT}, "llama_4_scaling is None, .*; add .* as params.json has"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling is {'beta': 0.1}, by which queries"),
        (
            {"llama_4_scaling": {"beta": True, "original_max_position_embeddings": 8192}},
            "by which queries of MistralLarge3ForCausalLM are scaled",
        ),
        (
            {
                "llama_4_scaling": LEFT_OUT,
                "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1},
            },
            "llama_4_scaling_beta, which vLLM reads as llama_4_scaling only",
        ),
        ({"model_type": "mistral4"}, "has the type 'mistral4': only deepseek_v3 is served"),
    ],
)
def test_what_is_not_said_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    check(tmp_path, {})

    with pytest.raises(UnsupportedModel, match=reason):
        check(tmp_path, changes)


def test_deepseek_is_as_before(tmp_path: Path) -> None:
    """Unless its file has what vLLM would not read."""
    check(tmp_path, {}, "deepseek-v3-bf16")

    with pytest.raises(UnsupportedModel, match="which vLLM reads as llama_4_scaling only"):
        check(tmp_path, {"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "deepseek-v3-bf16")
