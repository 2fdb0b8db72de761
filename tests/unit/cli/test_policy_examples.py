"""docs/policy-examples.md is true: both policies keep the rules, and do what the page says."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.cli.policy_template import write_policy
from appliance.lab.experiments.run import Contender, Trial, play
from appliance.lab.experiments.scenario import read
from appliance.lab.workload import Arrival
from appliance.scheduling.policy_api import Hold
from appliance.testing import check
from appliance.testing.loading import find
from appliance.vocabulary import FinishReason, RequestClass
from tests.docblocks import code_blocks
from tests.patience import PATIENCE_SECONDS
from tests.unit.plugins.policy_views import request_view

ROOT = Path(__file__).parents[3]
CODE = [block.text for block in code_blocks("docs/policy-examples.md", "python")]
TABLES = [block.text for block in code_blocks("docs/policy-examples.md", "toml")]
LENGTHS = "prompt_tokens,output_tokens\n120,60\n900,40\n60,100\n"
NIGHT_BEGINS = 120.0
"""Seconds from the start of the page's scenario, at 21:58."""


def policy(name: str, folder: Path) -> type[msgspec.Struct]:
    """The class of a package that was made as the page says."""
    (code,) = (block for block in CODE if f"class {name.capitalize()}(" in block)
    write_policy(name, folder)
    (folder / name / f"appliance_{name}.py").write_text(code, encoding="utf-8")
    (found,) = find(str(folder / name))
    return found.kind


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported from a folder is not to be found by other tests."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("appliance_night", "appliance_fair"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["night", "fair"])
def test_the_policies_keep_the_rules(name: str, tmp_path: Path) -> None:
    """And hold requests in the test."""
    report = check(policy(name, tmp_path))

    assert report.ok, str(report)
    assert report.unseen == ()


def test_batch_work_begins_at_night(tmp_path: Path) -> None:
    """In the scenario of the page; interactive requests do not wait."""
    (tmp_path / "evening.toml").write_text(TABLES[0], encoding="utf-8")
    (tmp_path / "lengths.csv").write_text(LENGTHS, encoding="utf-8")
    scenario = read(tmp_path / "evening.toml")
    night = policy("night", tmp_path)()

    trial = play(scenario.setting(1, tmp_path), Contender("night", policy=night))

    began = first_tokens(trial)
    lives = trial.run.recorder.lives
    batch = [life for life in lives if life.request_class is RequestClass.BATCH]
    early = [life.id for life in batch if life.arrived < NIGHT_BEGINS]
    assert len(early) > 10
    assert min(began[life.id] for life in batch if life.id in began) >= NIGHT_BEGINS
    assert max(began[name] for name in early) < NIGHT_BEGINS + 30.0
    interactive = [life for life in lives if life.request_class is RequestClass.INTERACTIVE]
    waits = [began[life.id] - life.arrived for life in interactive if life.id in began]
    assert max(waits) < 10.0
    assert not trial.faults


@pytest.mark.thorough
def test_the_command_of_the_page_compares_both(tmp_path: Path) -> None:
    """With the policy installed as pip leaves it."""
    (command,) = code_blocks("docs/policy-examples.md", "sh")
    (tmp_path / "evening.toml").write_text(TABLES[0], encoding="utf-8")
    (tmp_path / "lengths.csv").write_text(LENGTHS, encoding="utf-8")
    policy("night", tmp_path)
    metadata = tmp_path / "night" / "appliance_policy_night-0.1.0.dist-info"
    metadata.mkdir()
    about = "Metadata-Version: 2.1\nName: appliance-policy-night\nVersion: 0.1.0\n"
    (metadata / "METADATA").write_text(about)
    entry = "[appliance.policies]\nnight = appliance_night:Night\n"
    (metadata / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(tmp_path / "night"), str(ROOT)])

    result = subprocess.run(
        [sys.executable, "-m", *command.text.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^ *night ", result.stdout, re.MULTILINE), result.stdout
    assert re.search(r"^ *appliance ", result.stdout, re.MULTILINE), result.stdout


def test_a_customer_gets_a_share_however_many_requests_another_one_has(tmp_path: Path) -> None:
    """Without it, few requests wait behind very many; with it, hardly."""
    (tmp_path / "evening.toml").write_text(TABLES[0], encoding="utf-8")
    (tmp_path / "lengths.csv").write_text(LENGTHS, encoding="utf-8")
    setting = read(tmp_path / "evening.toml", {"models.0.max_batch": "8"}).setting(1, tmp_path)
    model = setting.models[0].name
    flood = [
        Arrival(seconds=1.0, model=model, prompt_tokens=200, output_tokens=200, key="acme")
        for _ in range(150)
    ]
    few = [
        Arrival(seconds=2.0 + n, model=model, prompt_tokens=200, output_tokens=200, key="beta")
        for n in range(10)
    ]
    kind = policy("fair", tmp_path)

    waits = {}
    for contender in (
        Contender("fair", policy=kind(requests=8)),
        Contender("appliance", ("appliance",)),
    ):
        trial = play(dataclasses.replace(setting, arrivals=[*flood, *few]), contender)
        assert not trial.faults
        began = first_tokens(trial)
        lives = trial.run.recorder.lives
        assert all(life.outcome is FinishReason.STOP for life in lives)
        mine = [life for life in lives if life.key == "beta"]
        waits[contender.name] = max(began[life.id] - life.arrived for life in mine)

    assert waits["fair"] < 0.25 * waits["appliance"], waits


def test_a_share_that_no_other_key_wants_is_used(tmp_path: Path) -> None:
    """And one key alone may have all; named shares are in proportion."""
    fair: Any = policy("fair", tmp_path)(requests=8, shares={"acme": 3})
    ask = Asker(fair)

    assert [ask("acme", held) for held in (0, 7, 8)] == [False, False, True]
    assert ask("beta", 0) is False
    assert [ask("acme", held) for held in (5, 6)] == [False, True]
    assert [ask("beta", held) for held in (1, 2)] == [False, True]
    assert ask("", 1) is True  # a third customer: a fifth of 8 is 1
    ask.now = 100.0
    assert ask("beta", 7) is False


class Asker:
    """Asks whether a request of a key is held that has so many others."""

    def __init__(self, fair: Any) -> None:
        self.now = 0.0
        self._fair = fair

    def __call__(self, key: str, requests: int) -> bool:
        view = msgspec.structs.replace(
            request_view(arrived=self.now), key=key, key_requests=requests
        )
        return isinstance(self._fair.prefill(self.now, view), Hold)


def test_the_configurations_of_the_page_are_right() -> None:
    """The tables that are shown by themselves."""
    tables = [tomllib.loads(block) for block in TABLES[1:]]

    assert tables[0]["policy"]["fair"] == {"requests": 16, "shares": {"acme": 3}}
    assert tables[1]["arrivals"]["keys"] == {"acme": 9, "beta": 1}


def first_tokens(trial: Trial) -> dict[str, float]:
    """When each request had its first token, by its id."""
    recorder = trial.run.recorder
    first: dict[str, float] = {}
    for number, start in zip(recorder.requests, recorder.starts, strict=True):
        first.setdefault(recorder.lives[number].id, start)
    return first
