"""Pools and the host cache fit into the machine's memory, or the configuration is refused; into
what is available now, or the daemon does not start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.machine_room import TooLittleMemory, host_needs, refuse_now
from appliance.config.schema import Devices
from appliance.errors import ConfigError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.units import Bytes, Memory

Make = Callable[..., Path]
MIB = 1 << 20
TEXT = """\
[devices]
kind = "cpu"
memory = "{memory}"
host_cache = "{host_cache}"
instances = {instances}
slab = "64KiB"
[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
dtype = "float32"
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 100 MiB, of which 60 are available."""
    set_machine(monkeypatch, MachineMemory(100 * MIB, 60 * MIB))


def set_machine(monkeypatch: pytest.MonkeyPatch, memory: MachineMemory) -> None:
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)


@pytest.fixture
def configure(tmp_path: Path, fake_checkpoint: Make) -> Callable[..., Path]:
    """Writes a configuration with these sizes."""
    fake_checkpoint()

    def write(memory: str, host_cache: str, instances: int = 1) -> Path:
        path = tmp_path / "appliance.toml"
        text = TEXT.format(memory=memory, host_cache=host_cache, instances=instances)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ("16MiB", "90MiB"),
            "4: devices.host_cache: pools 16MiB + host cache 90MiB are more than the 100MiB of "
            "memory of this machine; set it to less than 84MiB",
        ),
        (
            ("48MiB", "16MiB", 2),
            "3: devices.memory: pools 96MiB (2 of 48MiB) + host cache 16MiB are more than the "
            "100MiB of memory of this machine; set it to less than 42MiB, or use fewer instances",
        ),
        (
            ("200MiB", "128MiB"),
            "3: devices.memory: pools 200MiB + host cache 128MiB are more than the 100MiB of "
            "memory of this machine; make devices.memory or devices.host_cache smaller, or use "
            "fewer instances",
        ),
    ],
)
def test_more_than_the_machine_has(
    sizes: tuple[str, str], message: str, configure: Callable[..., Path]
) -> None:
    """The key, the machine's figure and the remedy; `config check` refuses it with status 2."""
    path = configure(*sizes)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    checked = CliRunner().invoke(cli, ["config", "check", str(path)])

    assert str(refused.value) == f"{path}:{message}"
    assert (checked.exit_code, checked.stderr) == (2, f"{path}:{message}\n")


def test_all_that_there_is_may_be_used(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly as much as the machine has is allowed; a byte less is not; what is not known is not
    checked, and neither is what keys are read from."""
    path = configure("50MiB", "50MiB")
    load_config(path)
    set_machine(monkeypatch, MachineMemory(100 * MIB - 1, None, limited=True))
    with pytest.raises(ConfigError, match=r"100\.0MiB of memory of this process's control group"):
        load_config(path)
    load_config(path, check_files=False)
    set_machine(monkeypatch, MachineMemory(None, None))
    load_config(path)


def test_more_than_is_available(configure: Callable[..., Path]) -> None:
    """No problem of the configuration; a daemon does not start, and says what to do."""
    devices = load_config(configure("16MiB", "50MiB")).devices
    refuse_now(devices, MachineMemory(None, None))
    refuse_now(devices, MachineMemory(100 * MIB, 66 * MIB))
    with pytest.raises(TooLittleMemory) as refused:
        refuse_now(devices, MachineMemory(100 * MIB, 66 * MIB - 1))

    assert str(refused.value) == (
        "pools 16MiB + host cache 50MiB: only 66.0MiB of memory are available now; end what else "
        "uses memory, or make devices.memory or devices.host_cache smaller, or use fewer instances"
    )


def test_serve_ends_with_1_for_what_may_go_away(configure: Callable[..., Path]) -> None:
    """And with 2 for what cannot: systemd starts it again after one, and not after the other."""
    busy = CliRunner().invoke(cli, ["serve", "--config", str(configure("16MiB", "50MiB"))])
    wrong = CliRunner().invoke(cli, ["serve", "--config", str(configure("16MiB", "90MiB"))])

    assert (busy.exit_code, wrong.exit_code) == (1, 2)
    assert busy.stderr.splitlines()[-1].startswith("error: pools 16MiB + host cache 50MiB: only 60")
    assert len(wrong.stderr.splitlines()) == 1


def test_pools_of_gpus_are_not_host_memory() -> None:
    """Their host cache is."""
    devices = Devices(kind="cuda", memory_bytes=Memory(8 << 30), host_cache_bytes=Bytes(1 << 30))

    assert host_needs(devices).bytes == 1 << 30


def test_what_is_said_of_gpus_is_about_the_host_cache() -> None:
    """`devices.memory` is theirs: less of it would not help."""
    devices = Devices(kind="cuda", memory_bytes=Memory(8 << 30), host_cache_bytes=Bytes(1 << 30))
    with pytest.raises(TooLittleMemory) as refused:
        refuse_now(devices, MachineMemory(2 << 30, 1 << 29))
    assert str(refused.value) == (
        "host cache 1GiB: only 512MiB of memory are available now; end what else uses memory, or "
        "make devices.host_cache smaller"
    )


def test_what_is_said_without_a_host_cache_is_about_the_pools() -> None:
    devices = Devices(kind="cpu", memory_bytes=Memory(1 << 30), host_cache_bytes=Bytes(0))
    with pytest.raises(TooLittleMemory, match=r"make devices\.memory smaller, or use fewer"):
        refuse_now(devices, MachineMemory(2 << 30, 1 << 29))
