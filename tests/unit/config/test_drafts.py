"""Drafts are configured as they can be made, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoints.drafts import Speculation, check_drafts
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.model_config import read_model_config
from appliance.config.loader import load_config
from appliance.platform import torchvision
from appliance.vocabulary import Task
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
        ('{ method = "eagle" }', "speculate.method", 'only "ngram" is available'),
        ('{ method = "mtp", tokens = 2 }', "speculate.method", 'only "ngram" is available'),
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
    fake_checkpoint(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=text | {"model_type": "gemma3_text"},
    )
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
    )
    (problem, *_) = [only_problem(tmp_path, f'{GOOD}speculate = {{ method = "ngram" }}\n')]
    assert "keep a state" in str(problem)


def test_only_what_was_tried_may_have_drafts(tmp_path: Path, fake_checkpoint: Make) -> None:
    path = fake_checkpoint(quantization_config={"quant_method": "awq", "bits": 4})
    config = read_model_config(path)
    with pytest.raises(UnsupportedModel, match="quantized weights"):
        check_drafts(config, Task.GENERATE, on_cpu=True, ranks=1)
    plain = read_model_config(fake_checkpoint("plain"))
    with pytest.raises(UnsupportedModel, match="on the CPU only"):
        check_drafts(plain, Task.GENERATE, on_cpu=False, ranks=1)
    check_drafts(plain, Task.GENERATE, on_cpu=True, ranks=1)
