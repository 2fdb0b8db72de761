"""`appliance policy advise`: the table, the reason, what to set, and what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from appliance.cli.main import cli
from appliance.lab.advice import advise as advising
from appliance.lab.advice import cpu_time
from appliance.lab.advice.advise import Advice, advise
from appliance.lab.advice.candidates import Candidate
from appliance.service.policy_report import PolicyChoice
from tests.unit.lab.advice.test_advise import StepMeter
from tests.unit.lab.test_journal_workload import write

pytestmark = pytest.mark.thorough

MODEL = '[devices]\nmemory = "8MiB"\n[[model]]\nname = "a"\npath = "a"\nmax_context = 256\n'


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a box with the wrong policy."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write(path, policy="aegaeon", noise=0.2)
    return path


@pytest.fixture(autouse=True)
def niceness(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the process was made nicer, which it is not here; replays take a second each."""
    given: list[int] = []
    monkeypatch.setattr(os, "nice", given.append)
    monkeypatch.setattr(cpu_time, "CpuMeter", StepMeter)
    return given


def call(*arguments: str) -> Result:
    words = ["policy", "advise", *arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def config(folder: Path, journal: str, policy: str = "aegaeon") -> str:
    """A configuration that has the daemon write that journal."""
    file = folder / "my.toml"
    text = f'{MODEL}[policy]\nuse = ["{policy}"]\n[journal]\npath = {json.dumps(journal)}\n'
    file.write_text(text)
    return str(file)


def rows(result: Result) -> dict[str, list[str]]:
    """The words of each line of the table, by the candidate."""
    lines = result.stdout.splitlines()
    table = lines[2 : lines.index("")]
    return {line.partition("  ")[0]: line.partition("  ")[2].split() for line in table}


def test_the_table_and_the_reason(journal: Path, niceness: list[int]) -> None:
    """What was recorded, the lab's replay of it, then others; the lab's level error, the CPU time,
    one sentence, and what to set. All at the lowest priority."""
    result = call("--from", str(journal), "--cpu-seconds", "15")
    assert result.exit_code == 0
    assert niceness == [19]
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{journal}: 66 requests in the last 1.1 minutes")
    assert lines[1].split()[:4] == ["CANDIDATE", "REPLAYED", "TOKENS", "REQUESTS"]
    table = rows(result)
    assert list(table)[:2] == ["aegaeon, recorded", "aegaeon, in the lab"]
    assert table["aegaeon, in the lab"][-1] == "+0.0"
    assert table["appliance"][0] == "100%"
    assert float(table["appliance"][-1]) > 50
    assert (
        "not tried: serverlessllm_sjf: it needs to know how long answers will be" in result.stdout
    )
    assert "the lab's level error here: " in result.stdout
    assert " s of 15 s, at the lowest priority" in result.stdout
    reason = next(number for number, line in enumerate(lines) if line.startswith("Have "))
    name = lines[reason].split()[1]
    assert f'    use = ["{name}"]' in lines[reason:]
    assert lines[-1] == f"    appliance policy set {name}"


def test_as_json(journal: Path) -> None:
    """All candidates, also those that were not replayed."""
    found = json.loads(call("--from", str(journal), "--cpu-seconds", "8", "--json").stdout)
    assert found["current"] == {"use": ["aegaeon"], "decisions": {}, "parameters": {}}
    assert len(found["rows"]) > 50
    assert found["rows"][-1]["score"] is None
    assert found["rows"][-1]["difference"] is None
    assert 0 < found["verdict"]["error"] < 1
    assert found["cpu_seconds"] <= 8


def test_what_to_set_can_be_set(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are TOML of `[policy]`, and the command is one that takes the same."""
    choice = PolicyChoice(
        use=("prism", "aegaeon"),
        decisions={"round": "aegaeon"},
        parameters={"prism": {"weighting": "rate", "turn_seconds": 0.1}, "aegaeon": {}},
    )
    real = advise(journal, 10.0, 7.0, StepMeter())
    chosen = Candidate(name="prism+aegaeon", choice=choice)

    def fake(*_: object, **__: object) -> Advice:
        return replace(real, verdict=replace(real.verdict, candidate=chosen))

    monkeypatch.setattr(advising, "advise", fake)
    text = call("--from", str(journal)).stdout.partition("[policy] as it is (keep `budget`):\n")[2]
    toml, _, command = text.partition("or, until the daemon restarts:\n")
    assert tomllib.loads(toml)["policy"] == {
        "use": ["prism", "aegaeon"],
        "round": "aegaeon",
        "prism": {"weighting": "rate", "turn_seconds": 0.1},
    }
    assert shlex.split(command) == [
        *("appliance", "policy", "set", "prism", "aegaeon", "--decision", "round=aegaeon"),
        *("--param", 'prism.weighting="rate"', "--param", "prism.turn_seconds=0.1"),
    ]


def test_the_journal_of_the_configuration(journal: Path, tmp_path: Path) -> None:
    """It is found by `journal.path`, relative to the file; it has to be of the policies that the
    configuration has."""
    target = tmp_path / "journal.jsonl"
    target.write_bytes(journal.read_bytes())
    result = call("--config", config(tmp_path, "journal.jsonl"), "--cpu-seconds", "7")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{target}: ")
    other = call("--config", config(tmp_path, "journal.jsonl", policy="qlm"))
    assert other.exit_code == 2
    assert other.stderr.startswith("error: policy: ")
    assert f"give --from {target}" in other.stderr


def test_no_journal(journal: Path, tmp_path: Path) -> None:
    """Neither written nor there: the key or the option, and what to do; exit status 2."""
    none = call("--config", config(tmp_path, ""))
    assert (none.exit_code, none.stderr.startswith("error: journal.path: ")) == (2, True)
    assert 'Set [journal] path = "journal.jsonl", restart the daemon' in none.stderr
    gone = call("--config", config(tmp_path, "gone"))
    assert gone.exit_code == 2
    assert f"journal.path: there is no file {tmp_path / 'gone'}" in gone.stderr
    named = call("--from", str(tmp_path / "gone"))
    assert named.exit_code == 2
    assert named.stderr.startswith("error: --from: there is no file ")
    broken = call("--config", str(tmp_path / "no.toml"))
    assert broken.exit_code == 2
    assert "cannot be read" in broken.stderr


def test_what_cannot_be_advised_on(journal: Path) -> None:
    """It goes to standard error, with the option; exit status 2."""
    result = call("--from", str(journal), "--minutes", "0.1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --minutes: 0 requests arrived in the 6 s")
