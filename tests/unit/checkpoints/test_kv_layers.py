"""What layers keep of a request follows from `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from appliance.checkpoints import kv_layers as kv_layers_module
from appliance.checkpoints.kv_layers import KvLayers, kv_heads, kv_layers
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.errors import CheckpointError
from tests.configs import CONFIGS

KIB, MIB = 1 << 10, 1 << 20
BF16 = 2


def config_of(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


@pytest.mark.parametrize(
    ("name", "attention", "token_bytes", "states", "state_bytes"),
    [
        ("llama-3.1-8b-instruct", 32, 2 * 8 * 128 * BF16, 0, 0),
        ("bge-m3", 0, 0, 0, 0),
        ("deepseek-v3-bf16", 61, (512 + 64) * BF16, 0, 0),
        ("deepseek-v2-lite", 27, (512 + 64) * BF16, 0, 0),
        (
            "qwen3-next-80b-a3b-instruct",
            12,
            2 * 2 * 256 * BF16,
            36,
            3 * (2 * 16 * 128 + 32 * 128) * BF16 + 32 * 128 * 128 * 4,
        ),
        (
            "granite-4.0-h-tiny",
            4,
            2 * 4 * 128 * BF16,
            36,
            3 * (48 * 64 + 2 * 128) * BF16 + 48 * 64 * 128 * 4,
        ),
        (
            "nemotron-h-8b",
            4,
            2 * 8 * 128 * BF16,
            24,
            3 * (128 * 64 + 2 * 8 * 128) * BF16 + 128 * 64 * 128 * 4,
        ),
        (
            "falcon-h1-1.5b-instruct",
            24,
            2 * 2 * 128 * BF16,
            24,
            3 * (48 * 64 + 2 * 256) * BF16 + 48 * 64 * 256 * 4,
        ),
        ("lfm2-1.2b", 6, 2 * 8 * 64 * BF16, 10, 2 * 2048 * BF16),
        ("lfm2-8b-a1b", 6, 2 * 8 * 64 * BF16, 18, 2 * 2048 * BF16),
        (
            "mamba-codestral-7b-v0.1",
            0,
            0,
            64,
            3 * (128 * 64 + 2 * 8 * 128) * BF16 + 128 * 64 * 128 * 4,
        ),
        (
            "qwen3.5-27b",
            16,
            2 * 4 * 256 * BF16,
            48,
            3 * (2 * 16 * 128 + 48 * 128) * BF16 + 48 * 128 * 128 * 4,
        ),
        (
            "qwen3.5-35b-a3b",
            10,
            2 * 2 * 256 * BF16,
            30,
            3 * (2 * 16 * 128 + 32 * 128) * BF16 + 32 * 128 * 128 * 4,
        ),
        (
            "zamba2-7b",
            13,
            2 * 32 * 224 * BF16,
            81,
            3 * (112 * 64 + 2 * 2 * 64) * BF16 + 112 * 64 * 64 * 4,
        ),
        ("jamba-v0.1", 4, 2 * 8 * 128 * BF16, 28, (3 + 16) * 8192 * BF16),
        ("mamba-2.8b-hf", 0, 0, 64, (3 + 16) * 5120 * BF16),
        ("kimi-linear-48b-a3b", 7, (512 + 64) * BF16, 20, 3 * 3 * 4096 * BF16 + 4096 * 128 * 4),
    ],
)
def test_published_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    attention: int,
    token_bytes: int,
    states: int,
    state_bytes: int,
) -> None:
    monkeypatch.setattr(kv_layers_module, "computes_linear_attention", lambda: True)
    found = kv_layers(config_of(tmp_path, CONFIGS[name]), BF16, cuda=False)

    assert (found.attention, found.token_bytes) == (attention, token_bytes)
    assert (found.states, found.state_bytes) == (states, state_bytes)


def test_a_decoder_keeps_what_an_encoder_made(tmp_path: Path) -> None:
    """Of each request, in as many layers as keep its tokens: 29 MiB with Whisper's turbo model."""
    found = kv_layers(config_of(tmp_path, CONFIGS["whisper-large-v3-turbo"]), BF16, cuda=False)

    assert found == KvLayers(attention=4, token_bytes=2 * 1280 * BF16, heads=20, encoded=1500)
    tables = found.tables(32, 448)
    assert (tables.layers, tables.tables, tables.state_blocks) == (4, 1, 47)
    assert tables.blocks(448) == 47 + 14


def test_layers_that_a_file_does_not_list(tmp_path: Path) -> None:
    """LFM2 may say where its attention is only; Zamba 2 has layers that are of both kinds."""
    listed = dict(CONFIGS["lfm2-1.2b"])
    del listed["layer_types"]
    found = kv_layers(config_of(tmp_path, listed), BF16, cuda=False)
    assert (found.attention, found.states) == (6, 10)
    zamba = {
        "model_type": "zamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "attention_head_dim": 160,
        "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 9,
        **{"n_mamba_heads": 80, "mamba_headdim": 64, "mamba_ngroups": 1, "mamba_d_state": 64},
    }
    found = kv_layers(config_of(tmp_path, zamba), BF16, cuda=True)
    assert (found.attention, found.states) == (9, 54)
    assert found.token_bytes == 2 * 32 * 160 * BF16
    assert found.state_bytes == (3 * (80 * 64 + 2 * 64) + 80 * 64 * 64) * BF16


def test_a_count_of_layers_that_no_model_has(tmp_path: Path) -> None:
    """It is no loop."""
    many = {**CONFIGS["jamba-v0.1"], "num_hidden_layers": 1 << 39}
    assert kv_layers(config_of(tmp_path, many), BF16, cuda=True).attention == 1 << 36


def test_states_on_cpus_of_two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps those of Mamba 2 in float32 where the CPU has certain instructions."""
    config = config_of(tmp_path, CONFIGS["granite-4.0-h-tiny"])
    monkeypatch.setattr(kv_layers_module, "computes_linear_attention", lambda: True)
    newer = kv_layers(config, BF16, cuda=False).state_bytes
    monkeypatch.setattr(kv_layers_module, "computes_linear_attention", lambda: False)
    older = kv_layers(config, BF16, cuda=False).state_bytes
    assert newer - older == 48 * 64 * 128 * BF16
    assert older == kv_layers(config, BF16, cuda=True).state_bytes


def test_linear_attention_keeps_less_on_a_gpu(tmp_path: Path) -> None:
    """There a state is of the type that the model is computed in, if the file says no other; on the
    CPU, of float32."""
    exact = config_of(tmp_path, CONFIGS["qwen3.5-27b"])
    one, other = (kv_layers(exact, BF16, cuda=cuda) for cuda in (False, True))
    assert one.state_bytes == other.state_bytes
    config = config_of(tmp_path, CONFIGS["qwen3-next-80b-a3b-instruct"])
    on_cpu, on_gpu = (kv_layers(config, BF16, cuda=cuda) for cuda in (False, True))
    assert on_cpu.state_bytes - on_gpu.state_bytes == 32 * 128 * 128 * BF16


def test_ranks_share_all_but_compressed_kv() -> None:
    whole = KvLayers(attention=4, token_bytes=4096, heads=8, states=2, state_bytes=MIB)
    half = KvLayers(attention=4, token_bytes=2048, heads=4, states=2, state_bytes=MIB // 2)
    assert whole.share(2) == half
    assert KvLayers(attention=4, token_bytes=1152, compressed=True).share(2).token_bytes == 1152
    assert KvLayers(attention=4, token_bytes=2048, heads=4).share(8).token_bytes == 512


counts = st.integers(1, 40)


@given(counts, st.integers(0, 40), st.integers(1, 64 * KIB), st.integers(1, 4 * MIB), counts)
def test_tables_have_room_for_all_layers(
    attention: int, states: int, token_bytes: int, state_bytes: int, tokens: int
) -> None:
    """Each layer has a place, a block holds a state, and no table is more than one layer too
    many."""
    kept = KvLayers(
        attention=attention, token_bytes=token_bytes, states=states, state_bytes=state_bytes
    )
    tables = kept.tables(32, 4096)

    assert tables.tables * tables.layers >= attention
    assert tables.state_blocks * tables.layers >= states
    assert (tables.tables - 1) * tables.layers < attention
    assert tables.block_tokens % 32 == 0
    assert tables.layer_block_bytes == tables.block_tokens * token_bytes
    assert not states or tables.layer_block_bytes >= state_bytes
    assert tables.blocks(tokens) == tables.state_blocks + tables.tables * -(
        -tokens // tables.block_tokens
    )


@pytest.mark.parametrize("kinds", [[], ["unheard_of"] * 32])
def test_layers_of_no_kind_that_is_known_are_usual_ones(tmp_path: Path, kinds: list[str]) -> None:
    config = config_of(tmp_path, {**CONFIGS["llama-3.1-8b-instruct"], "layer_types": kinds})
    assert kv_layers(config, BF16, cuda=False).attention == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
        {"linear_attn_config": {"kda_layers": 1, "full_attn_layers": None}},
        {"layer_types": ["mamba", "attention"], "mamba_d_state": "many"},
        {"layer_types": ["conv", "attention"], "conv_L_cache": -3},
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_of(tmp_path, {**CONFIGS["llama-3.1-8b-instruct"], **changes})
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        kv_layers(config, BF16, cuda=False)


@pytest.mark.parametrize(
    ("name", "attention", "windowed", "window"),
    [
        ("mistral-7b-v0.1", 32, 32, 4096),
        ("starcoder2-7b", 32, 32, 4096),
        ("phi-3-mini-4k-instruct", 32, 32, 2047),
        ("gemma-2-2b-it", 26, 13, 4096),
        ("gemma-3-1b-it", 26, 22, 512),
        ("gemma-3-4b-it", 34, 29, 1024),
        ("gemma-3n-e4b-it", 20, 16, 512),
        ("gemma-3n-e2b-text", 20, 16, 512),
        ("gemma-4-e2b-it", 15, 12, 512),
        ("gemma-4-e4b-text", 24, 20, 512),
        ("gemma-4-26b-a4b-it", 30, 25, 1024),
        ("gemma-4-31b-it", 60, 50, 1024),
        ("c4ai-command-r7b-12-2024", 32, 24, 4097),
        ("olmo-3-7b-instruct", 32, 24, 4096),
        ("exaone-4.0-32b", 64, 48, 4096),
        ("gpt-oss-20b-bf16", 24, 12, 128),
        ("llama-4-scout-17b-16e-instruct", 48, 36, 8192),
        ("k-exaone-236b-a23b", 48, 36, 128),
        ("trinity-mini", 32, 24, 2048),
        ("cwm", 64, 48, 8192),
        ("step-3.5-flash-bf16", 45, 33, 512),
        ("exaone-4.0-1.2b", 30, 0, 0),
        ("qwen2.5-7b-instruct", 28, 0, 0),
        ("qwen3-8b", 36, 0, 0),
    ],
)
def test_windows(tmp_path: Path, name: str, attention: int, windowed: int, window: int) -> None:
    """Of all layers, of those that a file lists, and of those that it leaves to its type."""
    found = kv_layers(config_of(tmp_path, CONFIGS[name]), BF16, cuda=False)

    assert (found.attention, found.windowed, found.window) == (attention, windowed, window)


def test_windows_that_a_file_leaves_to_its_type(tmp_path: Path) -> None:
    exaone = {**CONFIGS["exaone-4.0-32b"], "layer_types": None}
    assert kv_layers(config_of(tmp_path, exaone), BF16, cuda=False).windowed == 48
    gemma = {key: v for key, v in CONFIGS["gemma-2-2b-it"].items() if key != "sliding_window"}
    assert kv_layers(config_of(tmp_path, gemma), BF16, cuda=False).window == 4096
    none = {**CONFIGS["mistral-7b-v0.1"], "sliding_window": None}
    assert kv_layers(config_of(tmp_path, none), BF16, cuda=False).windowed == 0
    odd = {**CONFIGS["mistral-7b-v0.1"], "sliding_window": "long"}
    assert kv_layers(config_of(tmp_path, odd), BF16, cuda=False).windowed == 0


@pytest.mark.parametrize(
    ("changes", "windowed", "window"),
    [
        ({"no_rope_layers": []}, 36, 8192),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, 32, 8192),
        ({"no_rope_layers": [0] * 48}, 0, 8192),
        ({"attention_chunk_size": 64}, 36, 64),
        ({"attention_chunk_size": None}, 0, 0),
    ],
)
def test_chunks_are_windows(
    tmp_path: Path, changes: dict[str, Any], windowed: int, window: int
) -> None:
    """Of Llama 4's layers that have rotary embeddings."""
    whole = CONFIGS["llama-4-scout-17b-16e-instruct"]
    config = {**whole, "text_config": {**whole["text_config"], **changes}}
    found = kv_layers(config_of(tmp_path, config), BF16, cuda=False)
    assert (found.windowed, found.window) == (windowed, window)


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("falcon-7b", {}, 1),
        ("falcon-7b", {"multi_query": False}, 71),
        ("falcon-40b", {}, 8),
        ("falcon-rw-1b", {}, 32),
        ("starcoder", {}, 1),
        ("starcoder", {"multi_query": False}, 48),
    ],
)
def test_heads_of_multi_query_types(
    tmp_path: Path, name: str, changes: dict[str, Any], wanted: int
) -> None:
    """One for keys and values, if the file does not say otherwise."""
    assert kv_heads(config_of(tmp_path, {**CONFIGS[name], **changes})) == wanted


@pytest.mark.parametrize(
    ("name", "full", "in_window"),
    [
        ("gemma-3n-e4b-it", 2 * 2 * 256, 2 * 2 * 256),
        ("gemma-4-e2b-it", 2 * 1 * 512, 2 * 1 * 256),
        ("gemma-4-e4b-text", 2 * 2 * 512, 2 * 2 * 256),
        ("gemma-4-26b-a4b-it", 2 * 2 * 512, 2 * 8 * 256),
        ("gemma-4-31b-it", 2 * 4 * 512, 2 * 16 * 256),
    ],
)
def test_layers_of_two_sizes(tmp_path: Path, name: str, full: int, in_window: int) -> None:
    """Layers that read what another one keeps count nothing."""
    found = kv_layers(config_of(tmp_path, CONFIGS[name]), BF16, cuda=False)
    tables = found.tables(32, 32768)

    assert found.token_bytes == full * BF16
    assert found.windowed_token_bytes == found.windowed * in_window * BF16
    others = (found.attention - found.windowed) * full * BF16
    assert found.all_token_bytes == others + found.windowed_token_bytes
    in_blocks = tables.window_tokens or tables.block_tokens
    assert tables.layer_block_bytes == 32 * max(full, in_window) * BF16
    assert tables.block_tokens * full == in_blocks * in_window
    assert set(tables.windows) == {-(-(found.window - 1) // in_blocks) + 1}
    # However long the longest request is: a table has layers of one size.
    short = found.tables(32, 64)
    assert bool(short.windows) is (full != in_window)


def gemma_4(tmp_path: Path, **changes: Any) -> KvLayers:
    config = {**CONFIGS["gemma-4-e4b-text"], **changes}
    return kv_layers(config_of(tmp_path, config), BF16, cuda=False)


def test_what_a_file_of_gemma_4_leaves_out(tmp_path: Path) -> None:
    """Or says in transformers' newer way. The last layer is a full one, whatever is said."""
    whole = gemma_4(tmp_path)
    own = {"per_layer_config": {str(n): {"head_dim": 512} for n in range(5, 42, 6)}}
    assert gemma_4(tmp_path, global_head_dim=64, **own) == whole
    assert gemma_4(tmp_path, layer_types=None) == whole
    found = gemma_4(tmp_path, num_kv_shared_layers=0, layer_types=["sliding_attention"] * 42)
    assert (found.attention, found.windowed) == (42, 41)
    without = {k: v for k, v in CONFIGS["gemma-4-e4b-text"].items() if k != "global_head_dim"}
    assert kv_layers(config_of(tmp_path, without), BF16, cuda=False) == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_kv_shared_layers": 42}, "num_kv_shared_layers is 42, of 42 layers"),
        ({"num_kv_shared_layers": "all"}, "num_kv_shared_layers is 'all'"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers is True"),
        ({"layer_types": ["sliding_attention"] * 42}, "a layer of each kind"),
        ({"layer_types": ["full_attention"] * 41}, "each of 42 layers"),
        ({"layer_types": ["chunked_attention"] * 42}, "each of 42 layers"),
        ({"layer_types": None, "num_hidden_layers": 1 << 39}, "each of 549755813888 layers"),
        ({"global_head_dim": 640}, "neither is a multiple"),
        ({"per_layer_config": [1]}, "no table"),
        ({"per_layer_config": {"5": {"head_dim": [1]}}}, "says of a layer"),
        ({"per_layer_config": {"5": {"head_dim": 64}, "11": {"head_dim": 32}}}, "several sizes"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "several sizes"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, "several sizes"),
        ({"per_layer_config": {"5": {"sliding_window": 64}}}, "says of a layer"),
        ({"per_layer_config": {"5": {"head_dim": True}}}, "says of a layer"),
        ({"per_layer_config": {"42": {"head_dim": 512}}}, "has '42', of 42 layers"),
        ({"per_layer_config": {"last": {"head_dim": 512}}}, "has 'last', of 42 layers"),
    ],
)
def test_unequal_layers_that_no_engine_has(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        gemma_4(tmp_path, **changes)


def test_heads_of_each_layer(tmp_path: Path) -> None:
    """By the numbers of layers that keep something; null leaves all of them alike."""
    whole = gemma_4(tmp_path)
    kinds = CONFIGS["gemma-4-e4b-text"]["layer_types"]
    sizes = {"full_attention": 512, "sliding_attention": 256}
    each = {f"{n:02}": {"head_dim": sizes[kind]} for n, kind in enumerate(kinds)}
    assert gemma_4(tmp_path, per_layer_config=each) == whole
    odd = {"head_dim": 64, "num_key_value_heads": 1}
    assert gemma_4(tmp_path, per_layer_config=each | {"24": odd}) == whole, "it keeps nothing"
    narrow = {key: {"head_dim": one["head_dim"] // 2} for key, one in each.items()}
    found = gemma_4(tmp_path, per_layer_config=narrow)
    assert (found.token_bytes, found.window_token_bytes) == (2 * 2 * 256 * 2, 2 * 2 * 128 * 2)
    alike = gemma_4(tmp_path, per_layer_config=None)
    assert (alike.token_bytes, alike.window_token_bytes) == (2 * 2 * 256 * 2, 0)


@pytest.mark.parametrize("name", ["gemma-3n-e2b-text", "gemma-4-e4b-text"])
def test_null_is_no_number_of_layers(tmp_path: Path, name: str) -> None:
    """transformers does not read such a file, so no engine is built of it."""
    config = config_of(tmp_path, {**CONFIGS[name], "num_kv_shared_layers": None})
    with pytest.raises(StrictDataclassFieldValidationError, match="expected int, got NoneType"):
        AutoConfig.from_pretrained(config.path)
    with pytest.raises(CheckpointError, match="num_kv_shared_layers is null; write a number"):
        kv_layers(config, BF16, cuda=False)


@pytest.mark.parametrize("shared", [9, 11, 14])
def test_layers_that_gemma_3n_reads(tmp_path: Path, shared: int) -> None:
    """vLLM looks in the last two places that keep something, where the last one must be a full
    layer."""
    config = {**CONFIGS["gemma-3n-e2b-text"], "num_kv_shared_layers": shared}
    with pytest.raises(CheckpointError, match="and then full_attention at their end"):
        kv_layers(config_of(tmp_path, config), BF16, cuda=False)
    config |= {"num_kv_shared_layers": 15, "layer_types": None}
    assert kv_layers(config_of(tmp_path, config), BF16, cuda=False).attention == 15


def test_windows_on_a_long_context_save_memory() -> None:
    """Five of six layers, of 1024 tokens, and blocks of 32."""
    layers = KvLayers(attention=36, token_bytes=1024, windowed=30, window=1024)
    tables = layers.tables(32, 32768)

    assert (tables.layers, tables.tables, tables.windows) == (6, 1, (33,) * 5)
    assert tables.blocks(32768) == 1024 + 5 * 33
    assert tables.step_blocks == 64
    assert layers.tables(32, 1024).windows == ()
