"""What tests of all kinds share: a checkpoint directory that costs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CHECKPOINT_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def fake_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint with 1 MiB of float32 weights; keywords change its config."""

    def make(name: str = "tiny", **changes: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        config = {k: v for k, v in (CHECKPOINT_CONFIG | changes).items() if v is not None}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (path / "tokenizer.json").write_text("{}", encoding="utf-8")
        save_file({"weight": np.zeros((512, 512), np.float32)}, path / "model.safetensors")
        return path

    return make
