"""Encoders with rotary embeddings, whose published files come with code: what their settings may
be, and how long a prompt may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.overrides import language_config
from tests.configs import CONFIGS

Make = Callable[..., Path]

GTE, RERANKER = "gte-base-en-v1.5", "gte-multilingual-reranker-base"
NOMIC, EXPERTS = "nomic-embed-text-v1.5", "nomic-embed-text-v2-moe"
LEFT_OUT = "left out"


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        (GTE, "logn_attention_scale", True, "logn_attention_scale of GteNewModel is True: only"),
        (GTE, "layer_norm_type", "rms_norm", "is 'rms_norm': only 'layer_norm' is served"),
        (GTE, "pack_qkv", False, "pack_qkv of GteNewModel is False: only True is served"),
        (GTE, "hidden_act", "relu", "hidden_act of GteNewModel is 'relu'"),
        (GTE, "position_embedding_type", "absolute", "is 'absolute': only 'rope' is served"),
        (GTE, "position_embedding_type", LEFT_OUT, "is left out: only 'rope' is served"),
        (GTE, "rope_scaling", {"type": "linear", "factor": 2.0}, "only by ntk, with a factor"),
        (GTE, "rope_scaling", {"type": "ntk"}, "only by ntk, with a factor"),
        (GTE, "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.7}, "only by ntk"),
        (GTE, "rope_theta", LEFT_OUT, "it does not say rope_theta, which vLLM needs"),
        (GTE, "rope_theta", None, "rope_theta of GteNewModel is None, not a positive number"),
        (GTE, "max_position_embeddings", LEFT_OUT, "it does not say max_position_embeddings"),
        (RERANKER, "type_vocab_size", 2, "type_vocab_size of GteNewForSequenceClassification is 2"),
        (NOMIC, "activation_function", "geglu", "is 'geglu': only 'swiglu' or 'gelu' is served"),
        (NOMIC, "activation_function", LEFT_OUT, "it does not say activation_function, which vLLM"),
        (NOMIC, "rotary_emb_fraction", 0.5, "rotary_emb_fraction of NomicBertModel is 0.5"),
        (NOMIC, "rotary_emb_scale_base", 512, "is 512: only null is served"),
        (NOMIC, "rope_scaling", {"type": "dynamic", "factor": 2.0}, "only null is served"),
        (NOMIC, "prenorm", True, "prenorm of NomicBertModel is True"),
        (NOMIC, "mlp_fc1_bias", True, "some layers of NomicBertModel have biases"),
        (NOMIC, "position_embedding_type", "absolute", "is 'absolute': only 'rope' is served"),
        (NOMIC, "num_heads_kv", 4, "num_heads_kv of NomicBertModel is 4: only null is served"),
        (NOMIC, "rotary_emb_dim", 32, "rotary_emb_dim of NomicBertModel is 32"),
        (NOMIC, "n_inner", None, "n_inner of NomicBertModel is None, not a positive integer"),
        (EXPERTS, "num_experts", LEFT_OUT, "it does not say num_experts, which vLLM needs"),
        (EXPERTS, "moe_top_k", LEFT_OUT, "it does not say moe_top_k, which vLLM needs"),
        (EXPERTS, "activation_function", "swiglu", "is 'swiglu': only 'gelu' is served"),
        (EXPERTS, "num_shared_experts", 1, "num_shared_experts of NomicBertModel is 1"),
    ],
)
def test_settings_that_are_not_computed_are_named(
    fake_checkpoint: Make, name: str, key: str, value: Any, reason: str
) -> None:
    path = fake_checkpoint()
    config = CONFIGS[name] | {key: value}
    if value == LEFT_OUT:
        del config[key]
    (path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        (GTE, {}, 8192),
        (NOMIC, {}, 2048),
        (NOMIC, {"max_trained_positions": 512}, 512),
        (NOMIC, {"n_positions": 1024}, 1024),
        (NOMIC, {"position_embedding_type": "rope"}, 2048),
        (GTE, {"rope_theta": 5e5}, 8192),
        ("jina-reranker-v2-base-multilingual", {}, 1024),
    ],
)
def test_a_prompt_is_no_longer_than_it_may_be(
    fake_checkpoint: Make, name: str, changes: dict[str, int], tokens: int
) -> None:
    """Nomic's embeddings have another base behind the positions that the model was trained for."""
    path = fake_checkpoint()
    (path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))

    assert read_checkpoint("tiny", path).max_positions == tokens


def test_vllm_is_given_names_that_it_reads() -> None:
    """Of what transformers reads by names that are newer than the files."""
    nomic, gte = SimpleNamespace(), SimpleNamespace()
    for config, values in (
        (nomic, CONFIGS[NOMIC] | {"n_embd": 512, "n_head": 8}),
        (gte, CONFIGS["gte-multilingual-base"]),
    ):
        vars(config).update(values, get_text_config=lambda config=config: config)

    seen = language_config(nomic)

    assert (seen.num_attention_heads, seen.head_dim) == (8, 64)
    assert seen.rope_parameters == {"rope_type": "default", "rope_theta": 1000}
    assert language_config(gte).architectures == ["GteNewModel", "NewForTokenClassification"]
