"""Checkpoint directories are described from their headers, and damage is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.checkpoint import read_checkpoint, tensor_bytes
from appliance.checkpoints.kv_layers import KvLayers
from appliance.checkpoints.safetensors import read_header
from appliance.errors import CheckpointError
from tests.conftest import CHECKPOINT_CONFIG

MIB = 1 << 20
Make = Callable[..., Path]


def test_entry_has_the_sizes_of_the_checkpoint(fake_checkpoint: Make) -> None:
    """Weights, KV per token and limits follow from config.json and the safetensors header."""
    entry = read_checkpoint("tiny", fake_checkpoint(), "float32")

    assert (entry.name, entry.architecture, entry.dtype) == ("tiny", "LlamaForCausalLM", "float32")
    assert (entry.layers, entry.kv_heads) == (2, 2)
    assert entry.weight_bytes == MIB
    assert entry.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert entry.kv == KvLayers(attention=2, token_bytes=2 * 2 * 16 * 4, heads=2)
    assert entry.max_positions == 2048


@pytest.mark.parametrize(
    ("stored", "wanted", "dtype", "weight_bytes"),
    [
        ("float32", "auto", "bfloat16", MIB // 2),
        ("float16", "auto", "float16", MIB // 2),
        ("bfloat16", "float32", "float32", MIB),
        (None, "auto", "bfloat16", MIB // 2),
    ],
)
def test_dtype_is_resolved_as_vllm_does(
    fake_checkpoint: Make, stored: str | None, wanted: str, dtype: str, weight_bytes: int
) -> None:
    """ "auto" is the stored type, but bfloat16 for float32; sizes are in the resolved type."""
    entry = read_checkpoint("tiny", fake_checkpoint(dtype=stored), wanted)

    assert (entry.dtype, entry.weight_bytes) == (dtype, weight_bytes)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "glm4"])
def test_some_types_are_not_computed_in_float16(fake_checkpoint: Make, model_type: str) -> None:
    """vLLM takes bfloat16 for "auto" then, and refuses float16."""
    path = fake_checkpoint(dtype="float16", model_type=model_type)

    assert read_checkpoint("tiny", path).dtype == "bfloat16"
    with pytest.raises(CheckpointError, match='in float16; take dtype = "bfloat16"'):
        read_checkpoint("tiny", path, "float16")


def test_older_and_nested_configs_are_understood(fake_checkpoint: Make) -> None:
    """`torch_dtype`, an explicit head_dim, no kv heads, and numbers below `text_config`."""
    changes = {"dtype": None, "num_key_value_heads": None}
    path = fake_checkpoint(
        torch_dtype="bfloat16", text_config={"head_dim": 96, "num_hidden_layers": 7}, **changes
    )

    entry = read_checkpoint("tiny", path)

    assert (entry.dtype, entry.layers, entry.kv_heads) == ("bfloat16", 7, 4)
    assert entry.kv.token_bytes == 2 * 4 * 96 * 2


def test_shards_add_up_and_integers_keep_their_size(fake_checkpoint: Make) -> None:
    """All safetensors files count; only floats change size with the type."""
    path = fake_checkpoint()
    save_file({"packed": np.zeros(1024, np.int8)}, path / "model-2.safetensors")

    assert read_checkpoint("tiny", path, "bfloat16").weight_bytes == MIB // 2 + 1024


@pytest.mark.parametrize("kept", [0, 5, 40, MIB])
def test_truncated_weights_are_named(fake_checkpoint: Make, kept: int) -> None:
    """A file cut anywhere is refused with its name, before anything reads tensors."""
    file = fake_checkpoint() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        tensor_bytes(read_header(file).tensors, "float32")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"not json", "corrupt"),
        (b'{"w": 3}', "corrupt"),
        (b'["w"]', "corrupt"),
        (b'{"w": {"data_offsets": [0, 0]}}', "no dtype or shape"),
        (b'{"w": {"dtype": "X9", "shape": [0], "data_offsets": [0, 0]}}', "unknown type X9"),
    ],
)
def test_corrupt_headers_are_named(tmp_path: Path, header: bytes, reason: str) -> None:
    """Headers that are no safetensors headers are refused, not guessed at."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)

    with pytest.raises(CheckpointError, match=reason):
        tensor_bytes(read_header(file).tensors, "float32")


def test_what_is_missing_is_named(fake_checkpoint: Make, tmp_path: Path) -> None:
    """No directory, no config.json, no weights, and a config that is no JSON object."""
    with pytest.raises(CheckpointError, match="not a directory"):
        read_checkpoint("tiny", tmp_path / "nowhere")
    path = fake_checkpoint()
    config = path / "config.json"
    for text, reason in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
    ):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=reason):
            read_checkpoint("tiny", path)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_checkpoint("tiny", path)
    (path / "params.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"Mistral's own format.*; take the checkpoint"):
        read_checkpoint("tiny", path)
    config.write_text(json.dumps(CHECKPOINT_CONFIG), encoding="utf-8")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"head_dim": 10**400}, "head_dim must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({"dtype": "float64"}, "cannot be served as float64"),
    ],
)
def test_impossible_configs_are_refused(
    fake_checkpoint: Make, changes: dict[str, object], reason: str
) -> None:
    """Numbers that are missing or senseless, and types no engine computes in."""
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint("tiny", fake_checkpoint(**changes))


def test_other_names_of_sizes_are_read(fake_checkpoint: Make) -> None:
    """As vLLM reads them, of types of models that have no table of names."""
    changes = {"num_key_value_heads": None, "max_position_embeddings": None}
    path = fake_checkpoint(model_type="bloom", num_attention_groups=2, seq_length=512, **changes)

    entry = read_checkpoint("tiny", path)

    assert (entry.kv_heads, entry.max_positions) == (2, 512)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"suppress_tokens": [5, 128]}, "suppress_tokens has 128, which is none of 128 tokens"),
        ({"suppress_tokens": [-1]}, "suppress_tokens has -1"),
        ({"suppress_tokens": ["5"]}, "suppress_tokens has '5'"),
        ({"suppress_tokens": [True]}, "suppress_tokens has True"),
        ({"suppress_tokens": "5"}, "suppress_tokens is '5', which is no list of tokens"),
        (["suppress_tokens"], "is not a JSON object"),
    ],
)
def test_tokens_that_are_never_said(fake_checkpoint: Make, said: object, reason: str) -> None:
    """One beyond the vocabulary would end the worker with its first step. Other models than Gemma 4
    do not read them."""
    config = {"head_dim": 16, "num_kv_shared_layers": 0, "architectures": ["Gemma4ForCausalLM"]}
    path = fake_checkpoint(model_type="gemma4_text", global_head_dim=16, **config)
    file = path / "generation_config.json"
    for right in ({}, {"suppress_tokens": None}, {"suppress_tokens": [0, 127]}):
        file.write_text(json.dumps(right))
        read_checkpoint("tiny", path)
    file.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        read_checkpoint("tiny", path)
    assert reason in str(caught.value)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        read_checkpoint("tiny", path)
    other = fake_checkpoint("other")
    (other / "generation_config.json").write_text(json.dumps(said))
    read_checkpoint("other", other)
