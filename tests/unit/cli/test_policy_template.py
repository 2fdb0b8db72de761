"""`appliance policy new`: a package that is right from the start, and never over another one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from appliance.cli.policy_template import write_policy
from appliance.errors import PolicyError
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]


def test_a_package_is_written(tmp_path: Path) -> None:
    """A module, its tests, and an entry point of the appliance's group."""
    written = write_policy("my_first", tmp_path)

    names = ["pyproject.toml", "appliance_my_first.py", "test_my_first.py", "README.md"]
    assert [path.relative_to(tmp_path / "my_first").as_posix() for path in written] == [
        *names,
        ".gitignore",
    ]
    project = tomllib.loads((tmp_path / "my_first/pyproject.toml").read_text())["project"]
    assert project["name"] == "appliance-policy-my-first"
    assert project["entry-points"] == {
        "appliance.policies": {"my_first": "appliance_my_first:MyFirst"}
    }
    for path in written:
        assert "$" not in path.read_text(), path


@pytest.mark.parametrize("tool", [["check"], ["format", "--check"]])
def test_what_is_written_has_the_house_s_style(tool: list[str], tmp_path: Path) -> None:
    """Authors begin with clean code."""
    write_policy("mine", tmp_path)
    ruff = Path(sys.executable).with_name("ruff")

    result = subprocess.run(
        [ruff, *tool, "--no-cache", "--config", ROOT / "pyproject.toml", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "name", ["", "Mine", "1st", "my-policy", "../mine", "mine.py", "class", "round", "use", "é"]
)
def test_only_names_that_can_be_used(name: str, tmp_path: Path) -> None:
    """A module, a key of the configuration and a word on the command line."""
    with pytest.raises(PolicyError, match="cannot be a policy's name"):
        write_policy(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """What is there stays as it was."""
    (tmp_path / "mine").mkdir()

    with pytest.raises(PolicyError, match="is there already"):
        write_policy("mine", tmp_path)
    assert list((tmp_path / "mine").iterdir()) == []
