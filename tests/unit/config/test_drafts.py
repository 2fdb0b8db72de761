"""Drafts are configured as they can be made, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.draft_heads import MTP_TRIED, UnsupportedHead, read_head
from appliance.checkpoints.drafts import Speculation, check_drafts
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.model_config import read_model_config
from appliance.config.loader import load_config
from appliance.config.sizing import read_model
from appliance.platform import torchvision
from appliance.vocabulary import Task
from tests.configs import CONFIGS
from tests.conftest import write_checkpoint
from tests.engine.quantizing import awq_config, fp8_config, gptq_config
from tests.unit.config.test_loader import GOOD, only_problem, write

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ('{ method = "ngram" }', Speculation(4, 2, 5)),
        ('{ method = "ngram", tokens = 16, prompt_lookup_max = 3 }', Speculation(16, 2, 3)),
        ("{}", None),
    ],
)
def test_drafts_are_chosen(
    tmp_path: Path, fake_checkpoint: Make, said: str, chosen: Speculation | None
) -> None:
    fake_checkpoint()
    config = load_config(write(tmp_path, f"{GOOD}speculate = {said}\n"))
    assert config.models[0].speculate.chosen == chosen


@pytest.mark.parametrize(
    ("said", "key", "words"),
    [
        ('{ method = "draft_model" }', "speculate.method", "there are ngram, mtp, eagle, eagle3"),
        ('{ method = "medusa", tokens = 2 }', "speculate.method", "there are ngram"),
        ('{ method = "eagle" }', "speculate.path", "has no path"),
        ('{ method = "ngram", path = "head" }', "speculate.path", "no folder"),
        ("{ tokens = 2 }", "speculate", "no method"),
        ('{ method = "ngram", tokens = 17 }', "speculate.tokens", "17"),
        ('{ method = "ngram", tokens = 0 }', "speculate.tokens", "0"),
        ('{ method = "ngram", model = "small" }', "speculate.model", "unknown key"),
        (
            '{ method = "ngram", prompt_lookup_min = 6 }',
            "speculate.prompt_lookup_min",
            "more than prompt_lookup_max (5)",
        ),
    ],
)
def test_other_drafts_are_refused(
    tmp_path: Path, fake_checkpoint: Make, said: str, key: str, words: str
) -> None:
    fake_checkpoint()
    problem = only_problem(tmp_path, f"{GOOD}speculate = {said}\n")
    assert problem.key.endswith(key)
    assert words in str(problem)


def test_models_that_may_not_have_drafts_are_refused(tmp_path: Path, fake_checkpoint: Make) -> None:
    asked = 'speculate = { method = "ngram" }\n'
    fake_checkpoint()
    ranks = GOOD.replace("[devices]", "[devices]\ntensor_parallel = 2")
    assert "several ranks" in str(only_problem(tmp_path, ranks + asked))
    pooled = only_problem(tmp_path, f'{GOOD}task = "embed"\n{asked}')
    assert "generates no text" in str(pooled)


def test_images_and_drafts_are_not_served_together(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision, "is_there", lambda: True)
    text = json.loads((fake_checkpoint("text") / "config.json").read_text())
    path = fake_checkpoint(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=text | {"model_type": "gemma3_text"},
    )
    (path / "preprocessor_config.json").write_text("{}")
    asked, enough = 'speculate = { method = "ngram" }\n', GOOD.replace("8MiB", "16MiB")
    load_config(write(tmp_path, enough + asked))
    load_config(write(tmp_path, f"{enough}images = 2\n"))
    problem = only_problem(tmp_path, f"{enough}images = 2\n{asked}")
    assert problem.key.endswith("speculate")
    assert problem.wrong.endswith("not tried with images in prompts (`images` is 2)")
    assert problem.remedy == "leave speculate out"


def test_states_cannot_have_drafts(tmp_path: Path, fake_checkpoint: Make) -> None:
    fake_checkpoint(
        "tiny",
        architectures=["Mamba2ForCausalLM"],
        model_type="mamba2",
        **{"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16},
    )
    (problem, *_) = [only_problem(tmp_path, f'{GOOD}speculate = {{ method = "ngram" }}\n')]
    assert "keep a state" in str(problem)


def test_only_what_was_tried_may_have_drafts(tmp_path: Path, fake_checkpoint: Make) -> None:
    plain = read_model_config(fake_checkpoint("plain"))
    with pytest.raises(UnsupportedModel, match="on the CPU only"):
        check_drafts(plain, Task.GENERATE, on_cpu=False, ranks=1)
    check_drafts(plain, Task.GENERATE, on_cpu=True, ranks=1)


@pytest.mark.parametrize(
    "said", [awq_config(32), gptq_config(32, bits=8), fp8_config((128, 128)), fp8_config(None)]
)
def test_quantized_weights_have_no_drafts(fake_checkpoint: Make, said: dict[str, Any]) -> None:
    """Nor those that are multiplied as they are read."""
    config = read_model_config(fake_checkpoint(quantization_config=said))
    with pytest.raises(UnsupportedModel, match="quantized weights"):
        check_drafts(config, Task.GENERATE, on_cpu=True, ranks=1)


def make_head(folder: Path, **changes: Any) -> None:
    """Of EAGLE, for the models of these tests, with 1 MiB of weights; keywords change its config,
    and `tensors` are its own."""
    tensors = changes.pop("tensors", ("fc.weight", "layers.0.self_attn.q_proj.weight"))
    path = write_checkpoint(folder / "head", num_hidden_layers=1, **changes)
    each = np.zeros((1 << 18) // len(tensors), np.float32)
    save_file(dict.fromkeys(tensors, each), path / "model.safetensors")


EAGLE3_TENSORS = ("fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t", "t2d")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle", {}),
        ("eagle3", {"tensors": EAGLE3_TENSORS, "draft_vocab_size": 64}),
    ],
)
def test_a_head_of_a_folder_counts(
    tmp_path: Path, fake_checkpoint: Make, method: str, changes: dict[str, Any]
) -> None:
    """Its weights, but for what is not loaded, and KV as in one layer more."""
    fake_checkpoint()
    make_head(tmp_path, **changes)
    (model,) = load_config(write(tmp_path)).models
    said = f'speculate = {{ method = "{method}", tokens = 3, path = "head" }}\n'
    config = load_config(write(tmp_path, GOOD + said))
    (drafting,) = config.models
    path = str(tmp_path / "head")
    assert drafting.speculate.chosen == Speculation(3, method=method, path=path)
    alone, both = (read_model(one, config.devices) for one in (model, drafting))
    kept = (1 << 20) if method == "eagle" else (1 << 18) // 5 * 4 * 4
    assert both.weight_bytes == alone.weight_bytes + kept
    assert both.kv.attention == alone.kv.attention + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but 64 in the model"),
        ({"vocab_size": 64}, "vocab_size is 64, but 128 in the model"),
        ({"num_key_value_heads": 4}, "keeps 128 numbers of a token, one of the model's 64"),
        ({"architectures": ["EagleDeepSeekMTPModel"]}, "heads of EagleDeepSeekMTPModel"),
        ({"quantization_config": {"quant_method": "awq"}}, "a quantized head was not tried"),
        ({"tensors": ("layers.0.w",)}, "no fc.weight"),
        ({"tensors": EAGLE3_TENSORS}, "its layer is of the other kind"),
        ({"tensors": ("fc.weight", "lm_head.weight")}, "use that of the model"),
        ({"architectures": 3}, "architectures is not a list"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, fake_checkpoint: Make, changes: dict[str, Any], words: str
) -> None:
    fake_checkpoint()
    make_head(tmp_path, **changes)
    found = only_problem(tmp_path, GOOD + 'speculate = { method = "eagle", path = "head" }\n')
    assert found.key.endswith("speculate")
    assert words in found.wrong


def test_heads_are_refused_that_are_not_there(tmp_path: Path, fake_checkpoint: Make) -> None:
    fake_checkpoint()
    eagle3 = 'speculate = { method = "eagle3", path = "head" }\n'
    assert "head" in only_problem(tmp_path, GOOD + eagle3).wrong
    make_head(tmp_path, tensors=("fc.weight", "midlayer.hidden_norm.weight"), draft_vocab_size=9)
    assert "it has no d2t" in only_problem(tmp_path, GOOD + eagle3).wrong
    fake_checkpoint("other", architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    other = GOOD.replace('path = "tiny"', 'path = "other"')
    assert "no test drafts for Qwen3ForCausalLM" in only_problem(tmp_path, other + eagle3).wrong


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_which_published_checkpoints_have_a_head(tmp_path: Path, name: str) -> None:
    """Of those that are said to have one, two architectures are tried."""
    path = write_checkpoint(tmp_path / "published")
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    config, asked = read_model_config(path), Speculation(2, method="mtp")
    layers = config.get("num_hidden_layers")
    tensors = {
        f"model.layers.{layers}.{own}": np.zeros(size, np.float32)
        for own, size in (("eh_proj.weight", 7), ("embed_tokens.weight", 90))
    }
    if not config.get("num_nextn_predict_layers"):
        with pytest.raises(UnsupportedHead, match="there is no head in the checkpoint"):
            read_head(config, asked)
        return
    if config.architecture not in MTP_TRIED:
        with pytest.raises(UnsupportedHead, match=f"with the head of {config.architecture}"):
            read_head(config, asked)
        return
    with pytest.raises(UnsupportedHead, match=f"no tensor is of model.layers.{layers}"):
        read_head(config, asked)
    save_file(tensors, path / "model.safetensors")
    head = read_head(config, asked)
    assert head.layers == 1
    assert [tensor.nbytes for tensor in head.tensors] == [28]


def test_a_head_of_several_layers_is_refused(fake_checkpoint: Make) -> None:
    name = "Glm4MoeForCausalLM"
    path = fake_checkpoint(architectures=[name], model_type="glm4_moe", num_nextn_predict_layers=3)
    with pytest.raises(UnsupportedHead, match="a head of 3 layers"):
        read_head(read_model_config(path), Speculation(2, method="mtp"))
