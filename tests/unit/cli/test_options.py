"""Which configuration a command reads when it is not told."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli import options
from appliance.cli.main import cli
from appliance.cli.options import VARIABLE, default_config


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where it is looked for: nothing is there."""
    places = (Path("etc/appliance.toml"), tmp_path / "installed.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(options, "PLACES", places)
    return places


def test_the_order(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, then the working copy's, then the installed one."""
    here, installed = places
    installed.touch()
    found = [default_config()]
    (tmp_path / here).parent.mkdir()
    here.touch()
    found.append(default_config())
    monkeypatch.setenv(VARIABLE, "mine.toml")
    found.append(default_config())
    monkeypatch.setenv(VARIABLE, "")
    found.append(default_config())

    assert found == [installed, here, Path("mine.toml"), here]


@pytest.mark.parametrize(
    ("variable", "missed"), [("mine.toml", "mine.toml"), (None, "etc/appliance.toml")]
)
@pytest.mark.parametrize("command", [["serve"], ["key", "list"]])
def test_what_is_not_there_is_missed_by_its_name(
    places: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    variable: str | None,
    missed: str,
) -> None:
    """And is the fault of the command line."""
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    result = CliRunner().invoke(cli, command)

    assert result.exit_code == 2
    assert missed in result.output


def test_the_help_says_where() -> None:
    """All places, in order."""
    said = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).output.split())

    assert "$APPLIANCE_CONFIG, else etc/appliance.toml, else /etc/appliance/appliance.toml" in said


@pytest.mark.parametrize("command", [["serve"], ["doctor"], ["config", "check"]])
def test_the_file_may_be_given_either_way(
    places: tuple[Path, Path], command: list[str], tmp_path: Path
) -> None:
    """As an argument or an option, or not at all; not as both."""
    file = tmp_path / "mine.toml"
    file.write_text("[devices]\n", encoding="utf-8")
    found = [
        CliRunner().invoke(cli, [*command, *given])
        for given in ([str(file)], ["--config", str(file)])
    ]
    both = CliRunner().invoke(cli, [*command, str(file), "--config", str(file)])
    none = CliRunner().invoke(cli, command)

    assert all("mine.toml:1: model: is missing" in one.output for one in found)
    assert (both.exit_code, "not both" in both.stderr) == (2, True)
    assert "etc/appliance.toml" in none.output
