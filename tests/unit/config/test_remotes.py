"""Tables `[[model]]` with `remote`: what they may say, and who looks at them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.config.checks import warnings
from appliance.config.diff import as_written, changes
from appliance.config.loader import load_config
from appliance.config.remotes import SecretUnusable, read_secret, remote_models
from appliance.config.schema import Config
from appliance.demo.checkpoints import make_checkpoints
from appliance.errors import ConfigError, Problem
from appliance.lab.daemon_config import scenario_of
from appliance.vocabulary import Task

OWN = '[[model]]\nname = "own"\npath = "own"\nmax_context = 512\naliases = ["mine"]\n'
FAR = '[[model]]\nname = "far"\nremote = "http://192.0.2.9:8000"\nmax_context = 1000\n'
PEERS = '[catalog]\npeers = ["http://192.0.2.1:11500", "https://box2.example.org/"]\n'


def loaded(folder: Path, text: str, *, check_files: bool = False) -> Config:
    file = folder / "appliance.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, check_files=check_files)


def problems(folder: Path, text: str, *, check_files: bool = False) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, check_files=check_files)
    return list(caught.value.problems)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "far.key"
    file.write_text("sk-far\n")
    file.chmod(0o600)
    return file


def test_a_model_of_another_server_is_none_of_this_box(tmp_path: Path, secret: Path) -> None:
    """What reads models of this box does not see it; all that it says is kept apart."""
    more = (
        'remote_model = "their/model"\nremote_key_file = "far.key"\ntask = "embed"\n'
        'remote_timeout = "2m"\nremote_connect_timeout = "3s"\nmax_queue = 7\naliases = ["ada"]\n'
    )
    config = loaded(tmp_path, FAR + more + OWN)

    assert [model.name for model in config.models] == ["own"]
    (model,) = remote_models(config, 5)
    assert (model.name, model.called, model.key, model.created) == (
        "far", "their/model", "sk-far", 5
    )  # fmt: skip
    assert (model.connect_seconds, model.silence_seconds, model.max_queue) == (3.0, 120.0, 7)
    assert (model.task, model.aliases, model.max_context) == (Task.EMBED, ("ada",), 1000)
    shown = json.dumps(as_written(config.remotes[0]))
    assert "far.key" in shown
    assert "sk-far" not in shown


@pytest.mark.parametrize(
    ("written", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1", "https://h/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://[2001:db8::1]:8000", "http://[2001:db8::1]:8000/v1"),
    ],
)
def test_an_address_with_or_without_a_path(tmp_path: Path, written: str, base: str) -> None:
    config = loaded(tmp_path, OWN + FAR.replace("http://192.0.2.9:8000", written))
    assert remote_models(config, 0)[0].address == base


@pytest.mark.parametrize(
    ("row", "key", "words"),
    [
        (FAR + 'path = "x"\n', "model[1].path", "leave it out"),
        (FAR + 'dtype = "auto"\n', "model[1].dtype", "leave it out"),
        (FAR + "instances = [0]\n", "model[1].instances", "leave it out"),
        (FAR + "pin = true\n", "model[1].pin", "a model with remote has only name, remote"),
        (FAR + "weather = 1\n", "model[1].weather", "unknown key"),
        (OWN.replace('"own"', '"two"') + 'remote_model = "x"\n', "model[1].remote_model", "remote"),
        (FAR.replace("max_context = 1000\n", ""), "model[1].max_context", "is missing"),
        (FAR.replace("1000", '"auto"'), "model[1].max_context", "expected"),
        (FAR.replace("http://192.0.2.9:8000", "192.0.2.9"), "model[1].remote", "no address"),
        (FAR.replace("http://", "ftp://"), "model[1].remote", "no address"),
        (FAR.replace("http://", "http://u:p@"), "model[1].remote", "remote_key_file"),
        (FAR.replace(":8000", ":8000/v1?x=1"), "model[1].remote", "more than a path"),
        (FAR.replace(":8000", ":port"), "model[1].remote", "no URL"),
        (FAR.replace('"far"', '"own"'), "model[1].name", "a name of own already"),
        (FAR.replace('"far"', '"mine"'), "model[1].name", "a name of own already"),
        (FAR + 'aliases = ["own"]\n', "model[1].aliases", "a name of own already"),
        (FAR + 'task = "score"\n', "model[1].task", "choice"),
    ],
)
def test_what_it_may_not_say(tmp_path: Path, row: str, key: str, words: str) -> None:
    """Each problem has the key of its row in the file."""
    found = problems(tmp_path, OWN + row)
    assert [problem.key for problem in found] == [key]
    assert words in str(found[0])


def test_problems_are_at_their_lines(tmp_path: Path) -> None:
    """Of rows in any order, and of drop-ins."""
    text = FAR.replace("http://", "ftp://") + OWN + FAR.replace('"far"', '"own"')
    found = problems(tmp_path, text)
    assert [(one.key, one.line) for one in found] == [("model[0].remote", 3), ("model[2].name", 11)]


def test_a_box_has_a_model_of_its_own(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, FAR)
    assert "with a path, for at least one model of this box" in str(found)


def test_one_that_is_not_enabled_is_ignored(tmp_path: Path) -> None:
    """As a drop-in may say."""
    folder = tmp_path / "appliance.toml.d"
    folder.mkdir()
    (folder / "90.toml").write_text('[[model]]\nname = "far"\nenabled = false\n')
    assert loaded(tmp_path, OWN + FAR).remotes == ()


@pytest.mark.parametrize("data", [b"", b"one\ntwo\n", b"a b\n", "clé\n".encode(), b"x" * 5000])
def test_a_file_with_no_key_in_it(tmp_path: Path, data: bytes) -> None:
    """The message shows nothing of it."""
    make_checkpoints(tmp_path, ["llama-a"])
    own = OWN.replace('path = "own"', 'path = "llama-a"')
    (tmp_path / "far.key").write_bytes(data)
    text = own + FAR + 'remote_key_file = "far.key"\n'
    devices = '[devices]\nkind = "cpu"\n'
    (found,) = problems(tmp_path, devices + text, check_files=True)
    assert found.key == "model[1].remote_key_file"
    assert "first line" in str(found)
    assert "two" not in str(found)
    (tmp_path / "far.key").unlink()
    (found,) = problems(tmp_path, devices + text, check_files=True)
    assert "cannot be read" in str(found)
    peers = PEERS + 'peer_key_file = "far.key"\n'
    (found,) = problems(tmp_path, devices + peers + own, check_files=True)
    assert (found.key, "cannot be read" in str(found)) == ("catalog.peer_key_file", True)


def test_a_file_that_others_can_read_is_a_warning(tmp_path: Path, secret: Path) -> None:
    config = loaded(tmp_path, OWN + FAR + 'remote_key_file = "far.key"\n')
    assert not [one for one in warnings(config) if "far" in one]
    secret.chmod(0o640)
    (found,) = [one for one in warnings(config) if "far" in one]
    assert found.startswith("model.far.remote_key_file: others than its owner can read")
    assert "chmod 600" in found


def test_a_pipe_is_no_file_of_a_key(tmp_path: Path) -> None:
    """It is refused at once: nothing may ever be written to it."""
    os.mkfifo(tmp_path / "far.key")
    with pytest.raises(SecretUnusable, match="is no file"):
        read_secret(str(tmp_path / "far.key"))


def test_a_reload_applies_all_of_it(tmp_path: Path) -> None:
    """Models of other servers come, change and go."""
    other = FAR.replace('"far"', '"second"')
    before = loaded(tmp_path, OWN + FAR)
    after = loaded(tmp_path, OWN + FAR.replace("1000", "2000") + other)
    found = {change.key: change.applies for change in changes(before, after)}
    assert found == {"model.far.max_context": "reload", "model.second": "reload"}
    gone: Any = {change.key: change.applies for change in changes(after, loaded(tmp_path, OWN))}
    assert gone == {"model.far": "reload", "model.second": "reload"}


def test_the_lab_and_fit_look_at_models_of_this_box(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, ["llama-a"])
    own = OWN.replace('path = "own"', 'path = "llama-a"')
    file = tmp_path / "appliance.toml"
    file.write_text('[devices]\nkind = "cpu"\n' + FAR + own)
    shown = CliRunner().invoke(cli, ["fit", "--config", str(file), "--json"])
    assert shown.exit_code == 0, shown.output
    assert "far" not in shown.stdout
    assert "far" not in json.dumps(scenario_of(file))


def test_boxes_to_pull_from(tmp_path: Path, secret: Path) -> None:
    """Their key is in a file next to the configuration, which others than its owner cannot read."""
    text = PEERS + 'peer_key_file = "far.key"\n' + OWN
    config = loaded(tmp_path, text)
    assert config.catalog.peers == ("http://192.0.2.1:11500", "https://box2.example.org/")
    assert config.catalog.peer_key_file == str(secret)
    assert "sk-far" not in json.dumps(as_written(config))
    assert not [one for one in warnings(config) if "peer_key_file" in one]

    secret.chmod(0o644)
    (found,) = [one for one in warnings(config) if "peer_key_file" in one]
    assert found.startswith("catalog.peer_key_file: others than its owner can read")


@pytest.mark.parametrize(
    ("text", "key", "wrong"),
    [
        (PEERS.replace("http:", "ftp:"), "catalog.peers", "no address of an HTTP server"),
        (PEERS.replace("http://", "http://u:p@"), "catalog.peers", "belongs into peer_key_file"),
        (PEERS.replace(":11500", ":11500?x=1"), "catalog.peers", "more than a path"),
        ('[catalog]\npeer_key_file = "far.key"\n', "catalog.peer_key_file", "there are no peers"),
    ],
)
def test_boxes_that_are_none(tmp_path: Path, secret: Path, text: str, key: str, wrong: str) -> None:
    (found,) = problems(tmp_path, text + OWN)

    assert (found.key, wrong in found.wrong) == (key, True)
