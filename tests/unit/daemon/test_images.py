"""The folder for images, from the configuration to the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import Recipe
from appliance.serve import make_daemon
from appliance.worker import frames

TINY = Recipe(
    name="tiny",
    family="llama",
    layers=1,
    hidden=64,
    intermediate=64,
    heads=2,
    kv_heads=2,
    head_dim=32,
    seed=1,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of one small model, whose images go to a folder beside the file."""
    make_checkpoints(tmp_path, recipes=[TINY])
    file = write_config(tmp_path, ["tiny"], host_cache="16MiB")
    file.write_text(file.read_text().replace("[devices]\n", '[devices]\nimages = "images"\n'))
    return load_config(file)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that workers are told of."""
    folders: list[str] = []

    def note(configuration: frames.Configure, *others: object) -> None:
        folders.append(configuration.images)

    monkeypatch.setattr("appliance.daemon.daemon.WorkerProcess", note)
    return folders


def test_the_folder_is_made(config: Config, told: list[str], tmp_path: Path) -> None:
    """It need not be there; a path is relative to the file."""
    make_daemon(config).host.close()
    assert set(told) == {str(tmp_path / "images")}
    assert (tmp_path / "images").is_dir()


def test_a_folder_that_cannot_be_one_is_named(
    config: Config, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The appliance serves without."""
    (tmp_path / "images").write_text("no folder")
    make_daemon(config).host.close()
    assert set(told) == {""}
    assert "devices.images is not used" in caplog.text
    assert str(tmp_path / "images") in caplog.text
