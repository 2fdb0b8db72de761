"""Times from data sheets: shares of peaks that measurements have, sizes that publishers give, and
plans for a daemon's configuration that say where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import pytest
from click.testing import CliRunner

from appliance.checkpoints.kv_layers import kv_layers
from appliance.checkpoints.model_config import read_model_config
from appliance.errors import LabError
from appliance.lab.cli import lab
from appliance.lab.data_sheet import (
    COMPUTE_SHARE,
    KV_SHARE,
    MEMORY_SHARE,
    ModelSizes,
    estimated,
    known_sizes,
)
from appliance.lab.experiments import scenario
from appliance.lab.hardware import ModelProfile, gpu, gpu_names, profile, profiled
from tests.published import write_config

Make = Callable[..., Path]
MEASURED: Final = [
    (profile(name, kind, tp), gpu(kind)) for name, kind, tp in sorted(profiled()) if tp == 1
]
PUBLISHED: Final = {
    "Llama-3.1-8B": "llama-3.1-8b-instruct",
    "Llama-3.2-1B": "llama-3.2-1b",
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen2.5-7B": "qwen2.5-7b-instruct",
    "Mistral-7B-v0.3": "mistral-7b-v0.3",
    "gpt-oss-20b": "gpt-oss-20b",
}


def sizes(of: ModelProfile) -> ModelSizes:
    """Of a measured model: bfloat16, without experts."""
    return ModelSizes(
        name=of.name,
        weight_bytes=of.weight_bytes,
        active_parameters=of.weight_bytes // 2,
        layers=of.layers,
        hidden=of.hidden,
        kv_bytes_per_token=of.kv_bytes_per_token,
    )


def test_shares_are_medians_of_what_was_measured() -> None:
    """Of the memory's rate for weights and KV, of the peak for prompts."""
    weights = [
        one.weight_bytes / (one.step_seconds(1, 0) * of.memory_bytes_per_second)
        for one, of in MEASURED
    ]
    kv = [
        one.kv_bytes_per_token / (one.step_seconds_per_kv_token * of.memory_bytes_per_second)
        for one, of in MEASURED
    ]
    prompts = [
        one.weight_bytes
        / (one.prefill_seconds_per_token + one.prefill_seconds_per_token_past_knee)
        / of.bf16_flops
        for one, of in MEASURED
    ]

    assert len(MEASURED) == 25
    assert [median(weights), median(kv), median(prompts)] == pytest.approx(
        [MEMORY_SHARE, KV_SHARE, COMPUTE_SHARE], rel=0.02
    )


def test_estimates_are_near_what_was_measured() -> None:
    """Steps and prompts of all measured pairs: at the median within a third."""
    errors: dict[str, list[float]] = {"step": [], "prompt": []}
    for one, of in MEASURED:
        made = estimated(sizes(one), of)
        errors["step"].append(made.step_seconds(8, 8000) / one.step_seconds(8, 8000))
        errors["prompt"].append(made.prefill_seconds(1000) / one.prefill_seconds(1000))
    for ratios in errors.values():
        assert 0.85 < median(ratios) < 1.15
        assert median([abs(ratio - 1) for ratio in ratios]) < 0.33
        assert max(ratios) < 2.5
        assert min(ratios) > 0.4


def test_more_gpus_share_the_work() -> None:
    model, of = known_sizes("Llama-3.1-8B"), gpu("H100")
    one, two = estimated(model, of), estimated(model, of, 2)

    assert two.tp == 2
    assert two.step_seconds(4, 4000) == pytest.approx(one.step_seconds(4, 4000) / 2)
    assert two.shard_bytes == one.weight_bytes // 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """Layers, width and KV, as config.json has them; weights in bfloat16."""
    write_config(tmp_path, PUBLISHED[name])
    config, found = read_model_config(tmp_path), known_sizes(name)
    kv = kv_layers(config, 2, cuda=True)

    assert (found.layers, found.hidden, found.kv_bytes_per_token) == (
        config.integer("num_hidden_layers"),
        config.integer("hidden_size"),
        kv.all_token_bytes,
    )
    assert 2 * found.active_parameters < 1.01 * found.weight_bytes


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(LabError, match="no model 'Llama-9'"):
        known_sizes("Llama-9")


@pytest.fixture
def configuration(tmp_path: Path, fake_checkpoint: Make) -> Path:
    fake_checkpoint(num_hidden_layers=2)
    path = tmp_path / "my.toml"
    path.write_text(
        '[api]\nbind = "127.0.0.1:11500"\n[devices]\nkind = "cpu"\nmemory = "64MiB"\n'
        'host_cache = "64MiB"\n[[model]]\nname = "tiny"\npath = "tiny"\nslo = { ttft = "3s" }\n',
        encoding="utf-8",
    )
    return path


def test_a_daemons_configuration_is_planned_for(configuration: Path) -> None:
    """On GPUs of the table, with its models and targets; the plan says what was not measured."""
    found = scenario.read(configuration)
    options = ["--gpus", "RTX-4090,L4", "--seeds", "1", "--set", "duration=20s", "--jobs", "1"]
    planned = CliRunner().invoke(lab, ["plan", str(configuration), *options])

    assert found.models[0].names == ("tiny",)
    assert (float(found.slo.ttft), found.models[0].context) == (3.0, 2048)
    assert planned.exit_code == 0, planned.output
    rows = [line.split() for line in planned.output.splitlines()[2:]]
    assert [(row[0], row[1], row[-4:]) for row in rows] == [
        ("RTX-4090", "1", ["from", "data", "sheets:", "tiny"]),
        ("L4", "1", ["from", "data", "sheets:", "tiny"]),
    ]


def test_a_configuration_with_a_mistake_is_refused(configuration: Path) -> None:
    """With its own message."""
    configuration.write_text('[[model]]\npath = "tiny"\n', encoding="utf-8")
    refused = CliRunner().invoke(lab, ["plan", str(configuration)])

    assert refused.exit_code == 2
    assert "model[0].name" in refused.stderr


def test_common_gpus_are_known() -> None:
    assert {"RTX-4090", "RTX-5090", "RTX-PRO-6000", "L4", "L40S", "A10", "B200"} <= set(gpu_names())
    assert all(gpu(name).bf16_flops > 1e14 for name in gpu_names())
