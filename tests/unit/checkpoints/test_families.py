"""Published models get the verdict that an engine would give, with the reason and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints import families
from appliance.checkpoints.adapters import UnsupportedAdapter, check_base
from appliance.checkpoints.architectures.transcribers import TRANSCRIBERS
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.drafts import check_drafts
from appliance.checkpoints.families import (
    TRIED,
    UnsupportedModel,
    base_architecture,
    check_cpu,
    check_cuda,
    check_family,
    is_tried,
)
from appliance.checkpoints.language_models import MEDIA, why_no_images
from appliance.checkpoints.model_config import known_models, read_model_config
from appliance.config.loader import load_config
from appliance.errors import CheckpointError, ConfigError
from appliance.platform import torchvision
from appliance.vocabulary import Task
from tests.configs import CONFIGS, NOT_ON_CPU, REFUSED

Make = Callable[..., Path]
POSITIONS = (
    "max_position_embeddings",
    "model_max_length",
    "seq_length",
    "max_target_positions",
    "conv_kernel",
)
"""One of them is in each file."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configurations(tmp_path: Path, name: str) -> None:
    """Facts of published models, with their shapes and flags."""
    config = read_model_config(write(tmp_path, CONFIGS[name]))

    if name in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[name]) as caught:
            check_family(config)
        assert str(caught.value) == f"{caught.value.wrong}; {caught.value.remedy}"
        assert caught.value.remedy.startswith("take ")
    else:
        check_family(config)
        for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
            assert config.integer(key) > 0
        assert config.first(*POSITIONS) > 0


def test_a_check_of_the_configuration_names_the_remedy(
    fake_checkpoint: Make, tmp_path: Path
) -> None:
    fake_checkpoint(quantization_config={"quant_method": "awq"})
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nmemory = "8MiB"\n[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\n'
    )

    with pytest.raises(ConfigError) as caught:
        load_config(file)

    (problem,) = caught.value.problems
    assert (problem.key, problem.line) == ("model[0].path", 5)
    assert "its weights are quantized (awq: config.json does not say bits)" in problem.wrong
    assert problem.remedy.startswith("take the model's checkpoint with weights in bfloat16")


def test_another_file_may_say_that_weights_are_quantized(fake_checkpoint: Make) -> None:
    path = fake_checkpoint()
    (path / "hf_quant_config.json").write_text("{}")

    with pytest.raises(UnsupportedModel, match=r"quantized \(hf_quant_config.json\)"):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": 7}, "has no model_type"),
        ({"model_type": "exaone"}, "'exaone', so that it can only be read with code"),
        (
            {"architectures": ["LlamaForRanking"]},
            "vLLM has no architecture LlamaForRanking of its own",
        ),
        ({"is_causal": False}, "attends in both directions"),
        (
            {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"},
            'does not say position_embedding_type, .*; add "position_embedding_type": "absolute"',
        ),
        (
            {
                "architectures": ["BertModel"],
                "model_type": "bert",
                "position_embedding_type": "relative_key",
            },
            "positions of BertModel are relative_key",
        ),
        (
            {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "model_type": "qwen3"},
            "attends in both directions",
        ),
        ({"attention_chunk_size": 64}, "attends to chunks"),
        (
            {
                "architectures": ["Llama4ForCausalLM"],
                "model_type": "llama4_text",
                "attention_chunk_size": 100,
            },
            "attention_chunk_size is 100, which is no multiple of 32",
        ),
        ({"index_topk": 2048}, "chooses which tokens to read .* vLLM has no such attention"),
        (
            {
                "architectures": ["DeepseekV4ForCausalLM"],
                "model_type": "deepseek_v4",
                "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
            },
            "chooses which tokens to read .* vLLM needs Triton",
        ),
        (
            {
                "architectures": ["MiMoV2ForCausalLM"],
                "model_type": "mimo_v2",
                "quantization_config": {"quant_method": "fp8"},
            },
            "stores queries, keys and values in shards.*; take a model of another family",
        ),
        (
            {"architectures": ["MiniMaxM3SparseForCausalLM"]},
            "needs torchvision for MiniMaxM3SparseForCausalLM, which no test serves",
        ),
    ],
)
def test_what_is_not_served_is_named(
    fake_checkpoint: Make, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", fake_checkpoint(**changes))


def test_what_reads_sound_is_refused_for_that(fake_checkpoint: Make) -> None:
    """All of vLLM's that do; of those with cross attention that is said, also of what reads
    images."""
    known = known_models().architectures
    heard = {name for name, traits in known.items() if "sound" in traits} - set(MEDIA)
    crossed = {name for name, traits in known.items() if "cross" in traits}
    assert heard >= {
        "CohereAsrForConditionalGeneration",
        "VibeVoiceAsrForConditionalGeneration",
        "MiniCPMO",
        "VoxtralRealtimeGeneration",
    }

    for name in (heard | crossed) - TRANSCRIBERS:
        with pytest.raises(UnsupportedModel) as caught:
            read_checkpoint("tiny", fake_checkpoint(name, architectures=[name]))

        assert name in caught.value.wrong
        assert ("no test serves its text" in caught.value.wrong) == (name not in crossed)
        assert ("(cross attention)" in caught.value.wrong) == (name in crossed)
        assert caught.value.remedy.startswith("take a checkpoint of a model that reads text")


def test_what_makes_text_of_sound_is_served_by_one_processor(tmp_path: Path) -> None:
    """Whose ranks are one, and no GPU's; a quantized one is not."""
    values = CONFIGS["whisper-large-v3-turbo"]
    config = read_model_config(write(tmp_path, values))
    check_cpu(config, "bfloat16")
    assert is_tried(config)
    with pytest.raises(UnsupportedModel, match="not served by several ranks yet"):
        check_cpu(config, "bfloat16", 2)
    with pytest.raises(UnsupportedModel, match="served on the CPU only"):
        check_cuda(config)
    with pytest.raises(UnsupportedAdapter, match=r"adapters of WhisperFor.* are not served"):
        check_base(config, task=Task.TRANSCRIPTION, ranks=1, cuda=False)
    with pytest.raises(UnsupportedModel, match="drafts were not tried with what WhisperFor"):
        check_drafts(config, Task.TRANSCRIPTION, on_cpu=True, ranks=1)
    packed = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    quantized = write(tmp_path, {**values, "quantization_config": packed})
    with pytest.raises(UnsupportedModel, match=r"no test serves WhisperFor.* quantized"):
        check_family(read_model_config(quantized))


@pytest.mark.parametrize(
    "name", ["gemma-3n-e2b-text", "gemma-4-e4b-text", "gemma-4-31b-it", "mimo-v2-flash-bf16"]
)
def test_what_was_not_tried_with_unequal_layers(tmp_path: Path, name: str) -> None:
    config = read_model_config(write(tmp_path, CONFIGS[name]))
    check_cpu(config, "bfloat16")
    assert is_tried(config)
    with pytest.raises(UnsupportedModel, match="on several ranks"):
        check_cpu(config, "bfloat16", ranks=2)
    with pytest.raises(UnsupportedModel, match="only tried on the CPU"):
        check_cuda(config)
    if "3n" in name:
        check_drafts(config, Task.GENERATE, on_cpu=True, ranks=1)
        return
    with pytest.raises(UnsupportedModel, match="drafts were not tried with layers that keep KV"):
        check_drafts(config, Task.GENERATE, on_cpu=True, ranks=1)


@pytest.mark.parametrize("name", ["gemma-3n-e4b-it", "gemma-4-31b-it"])
def test_what_is_not_served_of_gemma(tmp_path: Path, name: str) -> None:
    config = read_model_config(write(tmp_path, CONFIGS[name]))
    assert "are not served, only text" in why_no_images(config)
    with pytest.raises(CheckpointError, match="adapters of Gemma"):
        check_base(config, task=Task.GENERATE, ranks=1, cuda=False)
    quantized = {**CONFIGS[name], "quantization_config": AWQ}
    with pytest.raises(UnsupportedModel, match="no test serves Gemma"):
        check_family(read_model_config(write(tmp_path, quantized)))
    both = {**CONFIGS["gemma-4-e4b-text"], "use_bidirectional_attention": "all"}
    with pytest.raises(UnsupportedModel, match="attends in both directions"):
        check_family(read_model_config(write(tmp_path, both)))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize("name", NOT_ON_CPU)
def test_what_is_computed_on_gpus_only(tmp_path: Path, name: str) -> None:
    """A pull does not know the device; a check of the configuration does."""
    config = read_model_config(write(tmp_path, CONFIGS[name]))
    check_family(config)
    assert not is_tried(config)

    with pytest.raises(UnsupportedModel, match=NOT_ON_CPU[name]):
        check_cpu(config, "float32")


def test_linear_attention_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants certain instructions, and bfloat16."""
    config = read_model_config(write(tmp_path, CONFIGS["qwen3-next-80b-a3b-instruct"]))
    monkeypatch.setattr(families, "computes_linear_attention", lambda: True)
    check_cpu(config, "bfloat16")
    with pytest.raises(UnsupportedModel, match="computed in bfloat16 on the CPU, not float32"):
        check_cpu(config, "float32")
    monkeypatch.setattr(families, "computes_linear_attention", lambda: False)
    with pytest.raises(UnsupportedModel, match="lacks the instructions"):
        check_cpu(config, "bfloat16")


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-35b-a3b-text"])
def test_code_that_imports_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """vLLM's module of Qwen3.5 does, also for a checkpoint of text."""
    config = read_model_config(write(tmp_path, CONFIGS[name]))
    monkeypatch.setattr(families, "computes_linear_attention", lambda: True)
    monkeypatch.setattr(torchvision, "is_there", lambda: True)
    check_cpu(config, "bfloat16")
    check_cuda(config)
    monkeypatch.setattr(torchvision, "is_there", lambda: False)
    for check in (check_cuda, lambda config: check_cpu(config, "bfloat16")):
        with pytest.raises(UnsupportedModel, match=r"torchvision is not there, .*; run `make"):
            check(config)


def test_names_and_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """GPT-2 has names of its own; a file may leave out what its type has by default; what is null
    is left out on purpose."""
    gpt2 = read_model_config(write(tmp_path, {"model_type": "gpt2", "n_head": 16}))
    assert gpt2.integer("num_attention_heads") == 16
    assert gpt2.integer("hidden_size") == 768

    gemma = read_model_config(
        write(tmp_path, {"model_type": "gemma3", "text_config": {"hidden_size": 2560}})
    )
    assert (gemma.model_type, gemma.integer("hidden_size")) == ("gemma3_text", 2560)
    assert (gemma.integer("num_attention_heads"), gemma.integer("head_dim")) == (8, 256)

    heads = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": None}
    assert read_model_config(write(tmp_path, heads)).get("num_key_value_heads") is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ernie-4.5-0.3b-pt", {"use_bias": True}, "use_bias = false only"),
        ("ernie-4.5-21b-a3b-pt", {"use_bias": True}, "use_bias = false only"),
        ("bloom-560m", {"tie_word_embeddings": False}, "tie_word_embeddings = true only"),
        ("phi-3.5-moe-instruct", {"attention_bias": False}, "attention_bias = true only"),
        ("phi-3.5-moe-instruct", {"lm_head_bias": None}, "lm_head_bias = true only"),
        ("lfm2-8b-a1b", {"layer_types": None}, "has no layer_types"),
        ("mamba-codestral-7b-v0.1", {"num_heads": None}, "has no num_heads"),
        ("mamba-codestral-7b-v0.1", {"head_dim": None}, "has no head_dim"),
        ("mamba-codestral-7b-v0.1", {"n_groups": None}, "has no n_groups"),
        ("mamba-codestral-7b-v0.1", {"state_size": None}, "has no state_size"),
        ("zamba2-7b", {"layers_block_type": None}, "has no layers_block_type"),
        ("zamba2-7b", {"n_mamba_heads": None}, "has no n_mamba_heads"),
    ],
)
def test_keys_that_a_type_must_have(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    """One that is None here is not in the file."""
    said = {key: value for key, value in (CONFIGS[name] | changes).items() if value is not None}
    with pytest.raises(UnsupportedModel, match=words):
        check_family(read_model_config(write(tmp_path, said)))


@pytest.mark.parametrize(
    ("name", "architecture", "words"),
    [
        ("dbrx-instruct", "DbrxForSequenceClassification", "experts that vLLM 0.32 does not load"),
        ("longcat-flash-chat", "LongcatFlashModel", "attends twice in each layer"),
        ("mimo-v2-flash-bf16", "MiMoV2Model", "queries, keys and values in shards"),
    ],
)
def test_what_is_not_served_is_not_pooled(
    tmp_path: Path, name: str, architecture: str, words: str
) -> None:
    config = CONFIGS[name] | {"architectures": [architecture]}
    with pytest.raises(UnsupportedModel, match=words):
        check_family(read_model_config(write(tmp_path, config)))


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        ("Qwen3ForSequenceClassification", "Qwen3ForCausalLM"),
        ("LlamaModel", "LlamaModel"),
        ("LlamaForRanking", None),
    ],
)
def test_pooling_models_are_those_that_generate(architecture: str, base: str | None) -> None:
    assert base_architecture(architecture) == base


def test_all_that_is_tried_is_known() -> None:
    assert set(known_models().architectures) >= TRIED


def test_an_architecture_that_no_test_serves(fake_checkpoint: Make) -> None:
    assert is_tried(read_model_config(fake_checkpoint("a")))
    spelled = CONFIGS["k-exaone-236b-a23b"] | {"architectures": ["ExaoneMoeForCausalLM"]}
    assert is_tried(read_model_config(write(fake_checkpoint("k"), spelled)))
    other = fake_checkpoint("b", architectures=["VaultGemmaForCausalLM"], model_type="vaultgemma")
    assert not is_tried(read_model_config(other))
