"""``appliance lab plan``: how much hardware a workload needs, and what a box carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.main import cli
from appliance.lab.experiments.capacity import fewest

ROOT = Path(__file__).parents[3]

PROFILE = """
[[profiles]]
name = "toy"
weight_bytes = 8000000000
layers = 4
hidden = 8
kv_bytes_per_token = 100000
prefill_base_seconds = 0.05
prefill_seconds_per_token = 0.0001
prefill_seconds_per_token2 = 0
step_base_seconds = 0.02
step_seconds_per_kv_token = 0
step_seconds_per_sequence = 0.001
measured = { prompt_tokens = 4096, requests = 256, kv_tokens = 1000000 }
"""

SCENARIO = """
title = "a toy"
duration = "40s"
[hardware]
gpu = "A10"
count = 2
host_cache = "256GiB"
[slo]
ttft = "2s"
tbt = "50ms"
[[models]]
count = 6
mix = ["toy"]
context = 4096
[arrivals]
rate = 0.3
lengths = "lengths.csv"
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A scenario of six models on GPUs that hold two, in a profile of its own."""
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n200,100\n800,200\n")
    path = tmp_path / "toy.toml"
    path.write_text(SCENARIO + PROFILE)
    return path


def invoke(*arguments: str | Path) -> Result:
    words = ["lab", "plan", *(str(argument) for argument in arguments), "--jobs", "1"]
    return CliRunner().invoke(cli, words, catch_exceptions=False)


@given(st.integers(1, 80), st.integers(0, 70), st.integers(1, 80))
def test_thefewest_that_are_enough(start: int, most: int, needed: int) -> None:
    """Or none, if the most are not; nothing is tried twice or beyond."""
    tried = []

    def enough(count: int) -> bool:
        tried.append(count)
        return count >= needed

    assert fewest(start, most, enough) == (needed if needed <= most else None)
    assert len(tried) == len(set(tried))
    assert all(1 <= count <= most for count in tried)


def test_thefewest_gpus_of_a_kind(toy: Path, tmp_path: Path) -> None:
    """One fewer does not keep what the answer keeps; the host holds every model."""
    report = tmp_path / "plan.json"

    result = invoke(toy, "--gpus", "A10", "--at", "0.9", "--policy", "aegaeon", "--json", report)

    assert result.exit_code == 0, result.output
    [need] = json.loads(report.read_text())["plan"]
    gpus = need["gpus"]
    assert gpus > 1
    assert need["attained"] >= 0.9
    assert need["masters_bytes"] >= 6 * 8 * 10**9
    assert f"A10  {gpus}" in result.stdout
    fewer = invoke(
        *(toy, "--gpus", "A10", "--at", "0.9", "--policy", "aegaeon", "--most", str(gpus - 1))
    )
    assert f"{gpus - 1} are not enough" in fewer.stdout


def test_a_kind_that_cannot_serve_has_its_reason(toy: Path) -> None:
    """A given profile is of its own GPU; a GPU without profiles has none; a model may be too
    large for all of them together."""
    assert "of its own GPU" in invoke(toy, "--gpus", "H800").stdout
    large = ("--set", "profiles.0.weight_bytes=900000000000")
    assert "toy has no room on 1 of them" in invoke(toy, "--gpus", "A10", *large).stdout
    shipped = ROOT / "benchmarks/scenarios/first_look.toml"
    assert "no profile of Yi-9B on A10" in invoke(shipped, "--gpus", "A10").stdout


def test_a_model_that_is_too_large_for_one_gets_several(tmp_path: Path) -> None:
    """The fewest to an instance on which it fits, and for which it was measured."""
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n200,100\n800,200\n")
    path, report = tmp_path / "toy.toml", tmp_path / "plan.json"
    path.write_text(SCENARIO.replace("toy", "Llama-2-13B").replace("A10", "H800"))
    small = ("--set", "hardware.vram=24GiB", "--extrapolate")

    invoke(path, "--gpus", "H800", "--at", "0.5", *small, "--json", report)

    [need] = json.loads(report.read_text())["plan"]
    assert need["tp"] == 2
    assert need["gpus"] % 2 == 0


def test_other_kinds_relay_over_their_own_nvlink(tmp_path: Path) -> None:
    """Or not at all if they have none, whatever the scenario's own GPU has."""
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n200,100\n800,200\n")
    path, report = tmp_path / "relayed.toml", tmp_path / "plan.json"
    scenario = SCENARIO.replace("toy", "Qwen2.5-7B").replace("A10", "H800")
    path.write_text(scenario.replace("count = 2", "count = 2\nrelay = true\nnvlink_gbps = 100"))

    small = ("--set", "duration=20s", "--extrapolate", "--json", report)
    result = invoke(path, "--gpus", "A10,H100", "--at", "0.1", *small)

    assert result.exit_code == 0, result.output
    assert [need["gpu"] for need in json.loads(report.read_text())["plan"]] == ["A10", "H100"]
    assert "relay" not in result.stdout


def test_what_a_box_carries(toy: Path, tmp_path: Path) -> None:
    """A load that it keeps, one that it does not, and what more of each resource would do."""
    report = tmp_path / "box.json"

    result = invoke(toy, "--box", "--at", "0.9", "--policy", "serverlessllm", "--json", report)

    assert result.exit_code == 0, result.output
    rate, models = json.loads(report.read_text())["plan"]
    assert (rate["load"], models["load"]) == ("times the rate", "models")
    for found in (rate, models):
        assert 0 < found["largest"] < found["too_much"]
        assert found["attained"] >= 0.9
        assert set(found["relieved"]) == {"compute", "GPU memory", "link", "host cache"}
    assert max(rate["relieved"].values()) >= 0.9


def test_a_box_with_named_models_is_asked_for_the_rate_only(toy: Path) -> None:
    """They cannot be more."""
    result = invoke(
        toy, "--box", "--at", "0.9", "--set", 'models.0.names=["a","b","c","d","e","f"]'
    )

    assert "times the rate" in result.stdout
    assert "\nmodels" not in result.stdout


def test_nothing_is_extrapolated_in_silence(toy: Path) -> None:
    """A plan beyond what was measured is refused, unless it is asked for; a run says so."""
    small = ("--set", "profiles.0.measured.prompt_tokens=400")
    plan = ("--gpus", "A10", "--at", "0.5")

    refused = invoke(toy, *plan, *small)
    asked = invoke(toy, *plan, *small, "--extrapolate")
    run = CliRunner().invoke(
        cli, ["lab", "run", str(toy), "--policy", "aegaeon", "--jobs", "1", *small]
    )

    assert refused.exit_code == 2
    assert "prompts of 800 (measured to 400)" in refused.stderr
    assert "--extrapolate" in refused.stderr
    assert asked.exit_code == 0
    assert "prompts of 800 (measured to 400)" in asked.stderr
    assert run.exit_code == 0
    assert "toy: " in run.stderr
    assert "of its computing is extrapolated: prompts of 800 (measured to 400)" in run.stderr


def test_a_metric_that_is_none_is_named(toy: Path) -> None:
    """Exit status 2."""
    result = invoke(toy, "--gpus", "A10", "--metric", "beauty")
    assert result.exit_code == 2
    assert "there is no beauty" in result.stderr
