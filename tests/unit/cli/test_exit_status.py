"""Every command ends as the manual says: 0 done, 1 it went wrong, 2 the command line is wrong."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import cli
from appliance.client import KEY_VARIABLE
from tests.unit.cli.command_tree import commands

COMMANDS = dict(commands())
ASKING = [path for path in COMMANDS if any("--url" in p.opts for p in COMMANDS[path].params)]
"""Those that talk to a daemon."""


def call(path: str, *more: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, [*path.split(), *more], env=environment)


def words(path: str) -> list[str]:
    """What makes the command ask without more: as many arguments as it takes, no terminal."""
    parameters = COMMANDS[path].params
    taken = [one for one in parameters if isinstance(one, click.Argument)]
    given = ["0"] * sum(one.required or path == "run" for one in taken)
    return [*given, *(["--once"] if any("--once" in one.opts for one in parameters) else [])]


@pytest.mark.parametrize("path", COMMANDS)
def test_help_and_what_there_is_not(path: str) -> None:
    """Help is what was asked for; an option that does not exist is the command line's fault."""
    helped, wrong = call(path, "--help"), call(path, "--no-such-option")

    assert (helped.exit_code, helped.stdout.startswith("Usage: ")) == (0, True)
    assert (wrong.exit_code, "No such option" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("path", ASKING)
def test_no_daemon(path: str) -> None:
    """It went wrong, and what to do is said."""
    failed = call(path, *words(path), "--url", "http://127.0.0.1:1")

    assert failed.exit_code == 1
    assert failed.stderr.startswith("error: no daemon answers at http://127.0.0.1:1")
    assert "start one with `appliance serve`" in failed.stderr


@pytest.mark.parametrize(
    "url", ["http://[::1", "nonsense", "ftp://x", "http://", "localhost:11500"]
)
def test_what_is_no_address(url: str) -> None:
    """The command line is wrong, or the variable that stands in for it."""
    for wrong in (call("ps", "--url", url), call("ps", APPLIANCE_URL=url)):
        assert wrong.exit_code == 2
        assert "is no address: give http(s)://HOST:PORT, or unix:/PATH" in wrong.stderr


def test_what_is_no_key() -> None:
    """A key that no header can have is not sent, nor shown."""
    wrong = call("ps", "--url", "http://127.0.0.1:1", **{KEY_VARIABLE: "sk-schön"})

    assert (wrong.exit_code, KEY_VARIABLE in wrong.stderr) == (2, True)
    assert "sch" not in wrong.output


def test_a_word_that_is_no_command() -> None:
    """Nor is a group one by itself."""
    assert call("serv").exit_code == 2
    assert call("policy").exit_code == 2
