"""``appliance lab``: the newcomer's path of docs/lab.md, and what is wrong is said."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import cli
from tests.conftest import write_checkpoint
from tests.docblocks import code_blocks
from tests.unit.lab.test_journal_workload import write

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
SCENARIO = "benchmarks/scenarios/first_look.toml"
PLOTS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the repository's benchmarks in it, a journal, and a configuration."""
    write_checkpoint(tmp_path / "tiny")
    model = '[[model]]\nname = "tiny"\npath = "tiny"\n'
    (tmp_path / "my.toml").write_text(f'[devices]\nmemory = "64MiB"\n{model}')
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    write(tmp_path / "journal.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda by: by)  # or all other tests would be nice, too
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["lab", *arguments], catch_exceptions=False)


def test_the_path_of_a_newcomer(place: Path) -> None:
    """Every command of the document does what the document says, one after the other."""
    printed = []
    for block in code_blocks("docs/lab.md", "sh", "toml"):
        if block.language == "toml":
            Path("mine.toml").write_text(block.text)
            continue
        for line in block.text.splitlines():
            program, command, *arguments = shlex.split(line)
            assert (program, command) in (("appliance", "lab"), ("appliance", "policy"))
            alone = arguments[0] in ("replay", "calibrate", "advise")
            words = [command, *arguments, *([] if alone else ["--jobs", "1"])]
            result = CliRunner().invoke(cli, words, catch_exceptions=False)
            if "--plot" in arguments and not PLOTS:
                assert (result.exit_code, "pip install" in result.output) == (2, True)
            else:
                assert result.exit_code == 0, result.output
                printed.append(result.stdout)
    assert len(printed) == 12 + PLOTS
    assert printed[0].split().count("aegaeon") == 1
    assert "a third prefills" in printed[-10]
    assert "appliance, residency_prefix" in printed[-9]
    assert "MODELS AT 90.0%" in printed[-8]
    assert "HOST GIB" in printed[-7]
    assert "from data sheets: tiny" in printed[-6]
    assert "BOUND BY" in printed[-5]
    assert "commands identical" in printed[-4]
    assert "aegaeon, recorded" in printed[-3]
    assert "the lab's level error here" in printed[-2]
    assert "PROMPTS" in printed[-1]
    three = json.loads(Path("three.json").read_text())
    assert three["changes"] == {"hardware.count": "3"}
    assert [(o["policy"], o["seed"]) for o in three["outcomes"]] == [("aegaeon", 1)]
    if PLOTS:
        made = {path.name for path in Path("plots").iterdir()}
        assert made == {
            *("attainment.png", "tbt.png", "ttft.png", "gpus.png"),
            *(f"{what}-{policy}.png" for what in ["turns", "memory"] for policy in [0, 1]),
        }


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", SCENARIO, "--set", "hardware.gpu=B42"], "no GPU 'B42' is known"),
        (["run", SCENARIO, "--set", "hardware"], "give KEY=VALUE"),
        (["run", SCENARIO, "--policy", "nobody"], "nobody"),
        (["run", SCENARIO, "--set", "policies={}"], "give --policy"),
        (["sweep", SCENARIO, "--metric", "beauty", "--set", "duration=12s"], "there is no beauty"),
        (["sweep", SCENARIO, "--set", 'models.0.names=["a"]'], "cannot be more"),
        (["replay", "journal.jsonl", "--policy", "nobody"], "nobody"),
        (["replay", SCENARIO, "--policy", "serverlessllm"], "first_look.toml"),
    ],
)
def test_mistakes_are_named(place: Path, arguments: list[str], what: str) -> None:
    """Exit status 2, one line."""
    jobs = [] if arguments[0] == "replay" else ["--jobs", "1"]
    result = invoke(*arguments, *jobs)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert what in result.stderr


def test_a_sweep_over_the_rate(place: Path) -> None:
    """More than the least load and less than the most; its points are in the file."""
    result = invoke(
        *(
            "sweep",
            SCENARIO,
            "--over",
            "rate",
            "--policy",
            "serverlessllm",
            "--at",
            "0.95",
            "--step",
            "0.5",
        ),
        *("--set", "duration=30s", "--seeds", "1", "--jobs", "1", "--json", "sweep.json"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(Path("sweep.json").read_text())
    largest = found["largest"]["serverlessllm"]["0.95"]
    points = dict(map(tuple, found["points"]["serverlessllm"]))
    assert 0 < largest < 8
    assert points[largest] >= 0.95 > points[largest + 0.5]
