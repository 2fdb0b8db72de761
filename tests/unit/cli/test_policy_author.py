"""`appliance policy new`, `test` and `docs`: what they print, and their exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.cli.docs.hooks import generate
from appliance.cli.main import cli
from appliance.testing import kit
from appliance.testing.scenes import SCENES, arrivals

BROKEN = """
from appliance.hookspecs import hookimpl
from appliance.vocabulary import Word


class Broken(Word, frozen=True, forbid_unknown_fields=True):
    @hookimpl
    def phase(self):
        raise LookupError("nothing there")
"""


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported from a folder is not to be found by other tests; one scene is enough."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(kit, "SCENES", {name: SCENES[name] for name in ("lone", "pair")})
    monkeypatch.setattr(kit, "RUN_SCENES", ("lone",))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["policy", *map(str, arguments)])


def package(folder: Path, name: str, code: str, entry: str) -> Path:
    """A policy's package that nobody generated."""
    (folder / "src").mkdir(parents=True)
    (folder / "src" / f"{name}.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        f'[project.entry-points."appliance.policies"]\n{name} = "{entry}"\n'
    )
    return folder


def test_new_writes_and_says_so(tmp_path: Path) -> None:
    """The files on standard output; what to do next beside it."""
    result = run("new", "cli_made", "--dir", tmp_path)

    assert result.exit_code == 0
    assert str(tmp_path / "cli_made" / "appliance_cli_made.py") in result.stdout.splitlines()
    assert f"appliance policy test {tmp_path / 'cli_made'}" in result.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Not-A-Name", "cannot be a policy's name"),
        ("aegaeon", "a policy 'aegaeon' is installed already"),
        ("there", "is there already"),
    ],
)
def test_new_refuses(name: str, reason: str, tmp_path: Path) -> None:
    """Names that cannot be used, are taken, or would overwrite something."""
    (tmp_path / "there").mkdir()

    result = run("new", name, "--dir", tmp_path)

    assert result.exit_code == 2
    assert reason in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_new_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """As something that went wrong, not as a traceback."""
    (tmp_path / "file").touch()

    result = run("new", "mine", "--dir", tmp_path / "file" / "below")

    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_new_policy_passes(tmp_path: Path) -> None:
    """Before anything was changed, from its folder, nothing installed."""
    run("new", "fresh", "--dir", tmp_path)

    result = run("test", tmp_path / "fresh")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"fresh ({tmp_path / 'fresh'})"
    assert lines[1].split() == ["HOOK", "ASKED", "ANSWERED", "VALID", "P99", "µs"]
    assert [line.split()[0] for line in lines[2:4]] == ["admit", "round"]
    assert lines[4] == f"{len(arrivals(SCENES['lone']))} requests served to their end"
    assert lines[5:] == ["Fresh: nothing to object to"]


def test_a_bad_policy_fails(tmp_path: Path) -> None:
    """With the traceback of what it raised, and status 1."""
    folder = package(tmp_path / "b", "broken", BROKEN, "broken:Broken")

    result = run("test", folder)

    assert result.exit_code == 1
    assert "exceptions: phase: LookupError: nothing there" in result.stdout
    assert 'raise LookupError("nothing there")' in result.stdout


def test_results_as_json(tmp_path: Path) -> None:
    """For programs: the same report."""
    folder = package(tmp_path / "j", "broken_json", BROKEN, "broken_json:Broken")

    result = run("test", folder, "--json")

    (report,) = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["name"], report["source"], report["ok"]) == ("broken_json", str(folder), False)
    assert report["hooks"][0]["hook"] == "phase"
    assert report["hooks"][0]["valid"] == 0
    assert report["findings"][0]["check"] == "exceptions"


def test_installed_policies_and_classes_can_be_tested() -> None:
    """By name with the distribution's version, and by module and class; a limit can be set."""
    by_name = run("test", "aegaeon")
    by_class = run("test", "appliance.plugins.aegaeon:Aegaeon", "--p99-ms", "0.000001")

    assert by_name.exit_code == 0, by_name.output
    assert by_name.stdout.startswith("aegaeon (appliance ")
    assert by_class.exit_code == 1
    assert "budget: round: " in by_class.stdout


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("aegeon", "no installed policy; did you mean aegaeon?"),
        ("no_such_module:Policy", "cannot be imported: ModuleNotFoundError"),
        ("appliance.plugins.aegaeon:UNLIMITED", "is not a class"),
    ],
)
def test_what_cannot_be_loaded_is_a_wrong_command(target: str, reason: str) -> None:
    """Status 2, and why."""
    result = run("test", target)

    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "pyproject.toml cannot be read: No such file or directory"),
        ("[project", "pyproject.toml: "),
        ("[project]\nname = 'x'", 'has no [project.entry-points."appliance.policies"]'),
    ],
)
def test_a_folder_without_a_policy_is_a_wrong_command(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    """It says what the folder lacks."""
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)

    result = run("test", tmp_path)

    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_module_that_raises_is_shown_with_its_traceback(tmp_path: Path) -> None:
    """Where its author has to look."""
    folder = package(tmp_path / "r", "raises_early", "1 / 0", "raises_early:Policy")

    result = run("test", folder)

    assert result.exit_code == 2
    assert "raises_early.py" in result.stderr
    assert "cannot be imported: ZeroDivisionError" in result.stderr


def test_docs_prints_the_hooks() -> None:
    """What docs/hooks.md holds."""
    assert run("docs").stdout == generate()
