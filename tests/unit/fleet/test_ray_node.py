"""How nodes of a fleet are started, without Ray."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.errors import FleetError
from appliance.fleet.ray_serve.node import TOKEN_FILE, Node, use_token
from appliance.fleet.ray_serve.settings import (
    BOX_KEY,
    BOX_NAME,
    BOX_RESOURCE,
    BOX_URL,
    FRONT_RESOURCE,
)


def option(command: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in command if word.startswith(f"--{name}=")]
    return found


def test_a_head_has_its_box_and_no_dashboard() -> None:
    node = Node(port=6379, box_name="one", box_url="http://127.0.0.1:11500")
    command = node.command()

    assert "--head" in command
    assert "--block" in command
    assert option(command, "port") == "6379"
    assert option(command, "include-dashboard") == "false"
    assert json.loads(option(command, "resources")) == {BOX_RESOURCE: 1, FRONT_RESOURCE: 1}


def test_a_node_that_joins_says_where() -> None:
    node = Node(join="192.0.2.1:6379", port=6379, address="192.0.2.2", front=False)
    command = node.command()

    assert "--head" not in command
    assert option(command, "address") == "192.0.2.1:6379"
    assert option(command, "node-ip-address") == "192.0.2.2"
    assert json.loads(option(command, "resources")) == {}


def test_the_key_is_in_the_environment_alone() -> None:
    """Command lines can be read by every user."""
    node = Node(port=6379, box_name="one", box_url="http://127.0.0.1:11500")
    environment = node.environment({"PATH": "/bin"}, "sk-secret")

    assert environment[BOX_KEY] == "sk-secret"
    assert (environment[BOX_NAME], environment[BOX_URL]) == ("one", node.box_url)
    assert environment["PATH"] == "/bin"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not any("sk-secret" in word for word in node.command())
    assert BOX_KEY not in Node(port=6379).environment({}, "sk-secret")


def test_the_head_makes_a_token_once(tmp_path: Path) -> None:
    """Only its user can read it, and a node without one does not join."""
    environment: dict[str, str] = {}
    with pytest.raises(FleetError, match=r"copy this file from the head's user"):
        use_token(environment, tmp_path, make=False)

    use_token(environment, tmp_path, make=True)
    file = tmp_path / TOKEN_FILE
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    use_token(environment, tmp_path, make=True)
    use_token(environment, tmp_path, make=False)
    assert file.read_text() == token
    assert environment == {"RAY_AUTH_MODE": "token"}


def test_a_token_in_the_environment_will_do(tmp_path: Path) -> None:
    use_token({"RAY_AUTH_TOKEN": "t"}, tmp_path, make=True)
    assert not (tmp_path / TOKEN_FILE).exists()


def test_a_token_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("in the way")
    with pytest.raises(FleetError, match="no token can be written"):
        use_token({}, tmp_path, make=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--box", "https://192.0.2.1"), "--box: 'https://192.0.2.1': a fleet reaches"),
        (("--box", "here"), "is no address"),
        (("--bind", "8080"), "--bind: '8080' is no address"),
        (("--bind", "0.0.0.0:99999"), "--bind: '0.0.0.0:99999' is no address"),
    ],
)
def test_mistakes_say_what_is_wrong(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(cli, ["fleet", "serve", *arguments])

    assert result.exit_code == 2
    assert complaint in result.stderr


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the base install, which has none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli, ["fleet", "serve"])

    assert result.exit_code == 1
    assert "pip install 'appliance[ray]'" in result.stderr
