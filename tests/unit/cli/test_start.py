"""`serve` and `init` with directories, and no configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from tests.conftest import write_checkpoint


class Served(NamedTuple):
    """What a daemon was started with."""

    config: Config
    file: Path
    text: str
    notes: Sequence[str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """Daemons that were started; none is."""
    found: list[Served] = []

    def serve(config: Config, path: Path, notes: Sequence[str] = ()) -> int:
        found.append(Served(config, path, path.read_text(encoding="utf-8"), notes))
        return 0

    monkeypatch.setattr("appliance.serve.serve", serve)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with checkpoints in `models`, on a machine of 24 GiB."""
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        write_checkpoint(tmp_path / "models" / name)
    memory = MachineMemory(24 << 30, 20 << 30)
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_serve_a_directory(folder: Path, served: list[Served]) -> None:
    """All that is in it, at the usual address; pulled models go to the user's folder. Nothing is
    left of the configuration when the daemon has ended."""
    result = call("serve", "models")

    assert result.exit_code == 0, result.output
    ((config, file, _, notes),) = served
    assert [model.name for model in config.models] == ["a", "b"]
    assert config.api.bind == "127.0.0.1:11500"
    assert config.catalog.folder == str(folder / "data" / "appliance" / "models")
    assert notes == ()
    assert not file.parent.exists()


def test_serve_models_by_name(folder: Path, served: list[Served]) -> None:
    """Along with directories; what has a name is not served under another one as well."""
    result = call("serve", "models", "--model", "org/other=models/b", "--bind", "127.0.0.1:1234")

    assert result.exit_code == 0, result.output
    ((config, *_),) = served
    assert {model.name: model.path for model in config.models} == {
        "org/other": str(folder / "models" / "b"),
        "a": str(folder / "models" / "a"),
    }
    assert config.api.bind == "127.0.0.1:1234"


def test_what_is_not_served_is_logged(folder: Path, served: list[Served]) -> None:
    """By the daemon, before all else."""
    (folder / "models" / "x.gguf").touch()

    assert call("serve", "models").exit_code == 0

    assert served[0].notes == [
        f"not served: {folder}/models/x.gguf: GGUF is not supported; convert or pull safetensors"
    ]


def test_a_configuration_is_still_served(folder: Path, served: list[Served]) -> None:
    """As an argument, whatever it is called, or as an option."""
    assert call("init", "models").exit_code == 0
    (folder / "conf").write_text((folder / "appliance.toml").read_text())

    for given in (["appliance.toml"], ["conf"], ["--config", "appliance.toml"]):
        assert call("serve", *given).exit_code == 0
    assert [str(one.file) for one in served] == ["appliance.toml", "conf", "appliance.toml"]
    assert all(one.config == load_config(one.file) for one in served)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a directory; give a directory with checkpoints in it"),
        (["org/model"], "; for a model of a hub: appliance run org/model"),
        (["nowhere.toml"], "nowhere.toml:1: (file): cannot be read"),
        (["models/a/config.json"], "models/a/config.json:1: "),
        (["q4.gguf"], "q4.gguf: GGUF is not supported; convert or pull safetensors"),
        (["x" * 300], "cannot be read (File name too long); make it readable"),
        (["empty"], "pull one with `appliance pull ORG/MODEL --dir empty --no-add`, or pull"),
        (["empty"], "there is no model that can be served"),
        (["models", "my.toml"], "give one FILE, or directories: my.toml is a file"),
        (["models", "--config", "my.toml"], "give FILE or --config FILE, not both"),
        (["my.toml", "--model", "a=models/a"], "--model and --bind are for directories"),
        (["my.toml", "--bind", "127.0.0.1:1"], "--model and --bind are for directories"),
        (["--model", "models/a"], "'models/a' is not NAME=DIR, such as llama=/srv/models/llama"),
        (["--model", "-a=models/a"], "'-a' cannot be a model's name"),
        (
            ["--model", "a=models/a", "--model", "a=models/b"],
            "a is given twice: give each model a name of its own",
        ),
        (["--model", "b=models/a", "models"], "b is the name of"),
        (["models", "--bind", "0.0.0.0:1"], "can be reached from outside this machine"),
        (["models", "--bind", "1234"], 'expected "host:port"'),
    ],
)
def test_what_cannot_be_served(
    folder: Path, served: list[Served], arguments: list[str], message: str
) -> None:
    """Is the fault of the command line, and nothing is started."""
    (folder / "empty").mkdir()
    for name in ("my.toml", "q4.gguf"):
        (folder / name).touch()

    result = call("serve", *arguments)

    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert served == []


def test_a_home_that_is_no_text(
    folder: Path, served: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No configuration could name the folder for models that are pulled."""
    monkeypatch.setenv("XDG_DATA_HOME", f"{folder}/\udcff")

    result = call("serve", "models")

    assert (result.exit_code, served) == (1, [])
    assert "udcff' is not UTF-8; set $XDG_DATA_HOME to another" in result.stderr


def test_init_writes_what_serve_would_run(folder: Path, served: list[Served]) -> None:
    """A file that is accepted, and serves the same."""
    result = call("init", "models", "--output", "my.toml")

    assert (result.exit_code, result.stdout) == (
        0,
        "my.toml has a, b; run it with: appliance serve my.toml\n",
    )
    checked = call("config", "check", "my.toml")
    assert (checked.exit_code, "my.toml: fine" in checked.stdout) == (0, True), checked.output
    assert call("serve", "models").exit_code == 0
    assert served[0].config == load_config(folder / "my.toml")


def test_init_looks_in_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If none is given, and no model is named."""
    monkeypatch.chdir(folder / "models")
    assert call("init").stdout.startswith("appliance.toml has a, b;")
    monkeypatch.chdir(folder)

    assert call("init", "--model", "x=models/a").stdout.startswith("appliance.toml has x;")


def test_init_replaces_nothing(folder: Path) -> None:
    """Unless it is to."""
    (folder / "appliance.toml").write_text("mine")
    refused = call("init", "models")

    assert refused.exit_code == 2
    assert refused.stderr == (
        "error: appliance.toml is there already; replace it with --force, or give another "
        "--output\n"
    )
    assert (folder / "appliance.toml").read_text() == "mine"
    assert call("init", "models", "--force").exit_code == 0
    assert "[devices]" in (folder / "appliance.toml").read_text()


def test_init_replaces_a_file_as_a_whole(folder: Path) -> None:
    """It is another file under the same name, with the same mode, also where a link leads."""
    mine = folder / "mine.toml"
    mine.write_text("mine")
    mine.chmod(0o640)
    (folder / "before").hardlink_to(mine)
    (folder / "appliance.toml").symlink_to(mine)

    assert call("init", "models", "--force").exit_code == 0

    assert (folder / "before").read_text() == "mine"
    assert "[devices]" in mine.read_text()
    assert mine.stat().st_mode & 0o777 == 0o640
    assert (folder / "appliance.toml").is_symlink()


def test_init_replaces_nothing_that_came_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While checkpoints were read."""

    def text(*_: object) -> str:
        (folder / "appliance.toml").write_text("mine")
        return "new"

    monkeypatch.setattr("appliance.cli.start.serve.commented_text", text)
    refused = call("init", "models")

    assert (refused.exit_code, "is there already" in refused.stderr) == (2, True)
    assert (folder / "appliance.toml").read_text() == "mine"


def test_init_prints(folder: Path) -> None:
    """What it would write, and on standard error what is not served."""
    (folder / "models" / "x.gguf").touch()
    printed = call("init", "models", "--output", "-")
    assert printed.exit_code == 0
    (folder / "printed.toml").write_text(printed.stdout)

    assert load_config(folder / "printed.toml").models
    assert printed.stderr.startswith("not served: ")
    assert not (folder / "appliance.toml").exists()
    assert call("init", "nowhere").exit_code == 2
    assert call("init", "models", "--output", "no/such/folder.toml").exit_code == 1
