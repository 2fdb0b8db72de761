"""Exact replay: the policies of then order again what they ordered, in any process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import cli
from appliance.journal import read
from appliance.lab.experiments.run import play
from appliance.lab.replay.journal_workload import recording
from appliance.policies.loader import installed
from appliance.service.policy_report import PolicyChosen
from tests.unit.test_journal import record, record_swaps

SCENARIO = """
title = "Two chats that never rest"
duration = "20s"

[hardware]
gpu = "A100"
count = 2
host_cache = "256GiB"

[slo]
ttft = "5s"
tbt = "150ms"

[[models]]
names = ["chat", "chat-old", "coder"]
mix = ["Qwen2.5-7B", "Llama-2-13B"]
context = 4096

[arrivals]
rate = 0.7
lengths = "lengths.csv"
"""


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["lab", "replay", *arguments], catch_exceptions=False)


def elsewhere(place: Path, hash_seed: int, *arguments: str) -> str:
    """What the lab prints in a process of its own, where sets are in an order of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "appliance", "lab", *arguments],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def events_in(path: Path) -> int:
    return len(path.read_bytes().splitlines()) - 1


@pytest.mark.parametrize("options", [(), ("--policy", "aegaeon")])
def test_a_journal_follows_from_its_policy(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The policy of then orders again what it ordered, and the command says so."""
    path = tmp_path / "journal"
    record(path, "aegaeon")
    result = replay(str(path), *options)
    assert result.exit_code == 0
    assert result.stdout == f"replayed {events_in(path)} events: commands identical\n"


def test_a_journal_that_does_not_follow(tmp_path: Path) -> None:
    """The first difference is shown with its line, its event and both answers; exit status 1."""
    path = tmp_path / "journal"
    record(path)
    lines = path.read_bytes().splitlines()
    index = next(index for index, line in enumerate(lines) if b'"RunTurn"' in line)
    lines[index] = json.dumps(json.loads(lines[index]) | {"commands": []}).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")

    result = replay(str(path))

    told = result.stdout.splitlines()
    assert result.exit_code == 1
    assert told[0].startswith(f"line {index + 1} is the first that is answered otherwise: ")
    assert told[1] == "recorded: nothing"
    assert "RunTurn(" in told[2]


def test_what_a_machine_could_not_have_lived(tmp_path: Path) -> None:
    """A journal in which a model holds more than the pool has is the caller's mistake."""
    path = tmp_path / "journal"
    record(path)
    before, done, after = path.read_bytes().partition(b'"type":"PrefillDone"')
    after = re.sub(rb'"kv_slabs":\d+', b'"kv_slabs":99', after, count=1)
    path.write_bytes(before + done + after)
    result = replay(str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: it contradicts itself: ")


def test_changes_of_policies_are_replayed_anywhere(tmp_path: Path) -> None:
    """A run in which every policy of ours decided for a while, with both classes, mixed turns and
    cancelled requests, follows from its events in a process that orders its sets otherwise."""
    path = tmp_path / "journal"
    record_swaps(path)
    told = elsewhere(tmp_path, 4711, "replay", "journal")
    assert told == f"replayed {events_in(path)} events: commands identical\n"


def test_policies_that_were_changed_are_changed_in_the_lab(tmp_path: Path) -> None:
    """What the lab makes of a journal has every policy of then, each from when it was chosen."""
    path = tmp_path / "journal"
    record_swaps(path)
    found = recording(path)
    first = found.happened.recorder.lives[0]
    chosen = [entry.event for entry in read(path)[1] if isinstance(entry.event, PolicyChosen)]
    successors = found.contender.successors
    assert [one.use for _, one in successors] == [event.choice.use for event in chosen]
    assert first.arrived < successors[0][0] < successors[-1][0] < found.setting.seconds
    lives = play(found.setting, found.contender).run.recorder.lives
    assert len(lives) == len(found.setting.arrivals)


def test_a_scenario_means_the_same_everywhere(tmp_path: Path) -> None:
    """The same scenario and seed make the same file, to the byte, under every policy of ours, in
    processes that order their sets otherwise."""
    (tmp_path / "mine.toml").write_text(SCENARIO)
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,30\n900,200\n20,60\n")
    names = [one.name for one in installed() if one.shipped]
    policies = [word for name in names for word in ("--policy", name)]
    for seed in (1, 2):
        options = ("--seeds", "1", "--jobs", "1", "--json", f"{seed}.json")
        elsewhere(tmp_path, seed, "run", "mine.toml", *policies, *options)
    first, second = ((tmp_path / f"{seed}.json").read_bytes() for seed in (1, 2))
    assert first == second
    assert len(json.loads(first)["outcomes"]) == len(names)
