"""Directories that appear while a daemon serves those that it found (`appliance serve DIR`): a
reload does not look for them, and a command serves one at once."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from appliance.checkpoints.discovery.find import find_models
from appliance.config.starter import Terms, write_starter
from appliance.units import Address
from tests.conftest import write_checkpoint
from tests.unit.api.test_catalog_changes import box, call, client, settings
from tests.unit.api.test_catalog_reloads import reload
from tests.unit.doubles.daemon import Box
from tests.unit.doubles.serving import Call

__all__ = ["box", "call", "client", "settings"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in "ab":
        write_checkpoint(folder / name)
    return folder


@pytest.fixture
def path(models: Path, tmp_path: Path) -> Path:
    """The configuration that the command writes for itself."""
    file = tmp_path / "appliance.toml"
    terms = Terms(Address("127.0.0.1:11500"), tmp_path / "pulled", "")
    write_starter(file, find_models([models]), terms, now=True)
    return file


async def test_a_directory_that_appears(
    box: Box, client: httpx.AsyncClient, call: Call, models: Path
) -> None:
    """docs/models.md says so."""
    box.settle()
    write_checkpoint(models / "new")

    assert await reload(client) == ([], [])
    assert [card.id for card in box.daemon.models()] == ["a", "b"]
    linked = await call("pull", "--link", str(models / "new"))
    assert linked.exit_code == 0, linked.output
    assert [card.id for card in box.daemon.models()] == ["a", "b", "new"]
    assert await reload(client) == ([], [])
    assert [found.name for found in find_models([models]).models] == ["a", "b", "new"]
