"""Where torchvision is looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from appliance.platform.torchvision import FOLDER, VARIABLE, is_there, private_folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])


def put(folder: Path) -> Path:
    library = folder / "torchvision"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    return folder


def test_an_environment_may_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert private_folder() is None
    assert not is_there()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert not is_there()


@pytest.mark.parametrize("place", ["prefix", "packages"])
def test_it_has_a_folder_of_its_own(tmp_path: Path, place: str) -> None:
    folder = put(tmp_path / place / FOLDER)
    assert private_folder() == folder
    assert is_there()


def test_another_folder_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path / "prefix" / FOLDER)
    folder = put(tmp_path / "elsewhere")
    monkeypatch.setenv(VARIABLE, str(folder))
    assert private_folder() == folder


def test_it_may_be_among_other_packages(tmp_path: Path) -> None:
    put(tmp_path / "packages")
    assert private_folder() is None
    assert is_there()
