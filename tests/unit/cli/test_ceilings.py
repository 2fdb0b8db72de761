"""`doctor --ceilings`: what is measured and what is left alone, what is stored, and who uses it."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from appliance.cli.ceilings import MOST_BYTES, Age, measure_ceilings, show_ceilings
from appliance.cli.doctor import DaemonProbe
from appliance.cli.findings import Finding, Level
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.errors import CeilingsError
from appliance.memory.ceilings.disk import DiskRate
from appliance.memory.ceilings.process import Result, Task
from appliance.memory.ceilings.stored import (
    Ceilings,
    ChunkRates,
    MemoryCeilings,
    machine_identity,
    read_ceilings,
    who_reads,
    write_ceilings,
)
from appliance.serve import expected_load_rate
from tests.unit.doubles.pretend_nvml import PretendNvml, install

GIB = 1 << 30
SLAB = 2 << 20
MEMORY = MemoryCeilings(
    copied_bytes=512 << 20,
    chunks=(
        ChunkRates(chunk_bytes=1 << 20, into_pool=20e9, out_of_pool=10e9),
        ChunkRates(chunk_bytes=4 << 20, into_pool=40e9, out_of_pool=30e9),
    ),
    within_pool=2e12,
    slab_bytes=SLAB,
    map_slab_seconds=10e-6,
    unmap_slab_seconds=7e-6,
    lock=4e9,
)
NOW = 1_000_000.0


class Pretend:
    """Answers in the place of the process that measures, and keeps what it was asked."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.errors: dict[int | None, str] = {}
        self.link = (5, 16)

    def __call__(self, task: Task, environment: Mapping[str, str]) -> Result:
        self.tasks.append(task)
        if error := self.errors.get(task.gpu):
            raise CeilingsError(error)
        if task.gpu is not None:
            return Result(memory=MEMORY, link=self.link)
        return Result(memory=MEMORY, disks={task.folders[0]: DiskRate(3e9, GIB, 0.25)})


@pytest.fixture
def configure(tmp_path: Path, fake_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a configuration with a place for ceilings."""
    fake_checkpoint()

    def make(devices: str = 'kind = "cpu"\nmemory = "64MiB"', place: str = "ceilings.json") -> Path:
        file = tmp_path / "appliance.toml"
        file.write_text(
            f'[api]\nbind = "127.0.0.1:1"\nadmin_socket = ""\n[devices]\n{devices}\n'
            f'slab = "2MiB"\nhost_cache = "64MiB"\nceilings = "{place}"\n'
            '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 64\n'
        )
        return file

    return make


@pytest.fixture
def two_gpus(configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Config:
    install(monkeypatch, [8 * GIB, 8 * GIB])
    return load_config(configure('kind = "cuda"\nmemory = "90%"\nruntime = "1GiB"\ninstances = 2'))


def nvml() -> PretendNvml:
    found = sys.modules["pynvml"]
    assert isinstance(found, PretendNvml)
    return found


def measured(
    config: Config,
    asking: Pretend,
    own: frozenset[int] | None = frozenset(),
    *,
    running: bool = False,
    available: int = 64 * GIB,
    now: float = NOW,
) -> dict[str, Finding]:
    return named(measure_ceilings(config, available, own, running, asking, lambda: now))


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_all_that_is_free_is_measured_and_stored(two_gpus: Config) -> None:
    """Each device by a process of its own, in a share of the time; then the host and its disks."""
    asking = Pretend()

    found = measured(two_gpus, asking)

    folder = two_gpus.models[0].path
    assert [task.gpu for task in asking.tasks] == [0, 1, None]
    assert {task.nbytes for task in asking.tasks} == {MOST_BYTES}
    assert sum(task.seconds for task in asking.tasks) <= 8.0
    assert all(finding.level is Level.OK for finding in found.values()), found
    assert found["ceilings of gpu 0"].finding == (
        "40.0 GB/s from the host, 30.0 GB/s to it, 2000.0 GB/s on the device; 10.0 us to map a slab"
        " of 2MiB, 7.0 us to unmap it; page-locking 4.0 GB/s; PCIe generation 5 with 16 lanes under"
        " load; measured now"
    )
    assert (
        "less than 3.0 GB/s, by reading 1GiB, 25% of them from the page cache"
        in found[f"ceilings of the disk of {folder}"].finding
    )
    assert found["ceilings"].finding.endswith("; " + who_reads(two_gpus.devices.ceilings))
    stored = read_ceilings(Path(two_gpus.devices.ceilings))
    assert [(gpu.uuid, gpu.driver, gpu.at) for gpu in stored.gpus] == [
        ("GPU-0", "580.1", NOW), ("GPU-1", "580.1", NOW)
    ]  # fmt: skip
    assert stored.machine == machine_identity()
    assert stored.host is not None
    assert stored.disks[0].folder == folder


def test_the_gpus_of_groups_are_measured(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a group names, and no others; the daemon's rate is that of these."""
    install(monkeypatch, [8 * GIB, 8 * GIB, 8 * GIB])
    devices = 'kind = "cuda"\nmemory = "90%"\nruntime = "1GiB"'
    file = configure(devices)
    group = '[[devices.group]]\nname = "last"\ngpus = [2]\n[[model]]'
    file.write_text(file.read_text().replace("[[model]]", group))
    config = load_config(file)
    asking = Pretend()

    measured(config, asking)

    assert [task.gpu for task in asking.tasks] == [2, None]
    assert [gpu.uuid for gpu in read_ceilings(Path(config.devices.ceilings)).gpus] == ["GPU-2"]
    assert expected_load_rate(config) == pytest.approx(40e9)
    decoding = msgspec.structs.replace(config.devices, host_cache_codec="exp7")
    assert expected_load_rate(msgspec.structs.replace(config, devices=decoding)) is None
    assert expected_load_rate(load_config(configure(devices))) is None


def test_what_is_in_use_is_left_alone(two_gpus: Config) -> None:
    """The GPU of a running daemon, of any other program, and the host's memory while a daemon runs;
    what is known of them stays."""
    measured(two_gpus, Pretend())
    asking = Pretend()
    nvml().users = {0: [7], 1: [8]}

    found = measured(two_gpus, asking, frozenset({7}), running=True, now=NOW + 5)

    assert asking.tasks == []
    assert "in use by the daemon" in found["ceilings of gpu 0"].finding
    assert found["ceilings of gpu 0"].remedy == "stop the daemon, and run this again"
    assert "in use by processes 8" in found["ceilings of gpu 1"].finding
    assert found["ceilings of host memory"].level is Level.WARN
    assert "ceilings" not in found
    nvml().users = {1: [8]}
    found = measured(two_gpus, asking, None, now=NOW + 5)
    assert [task.gpu for task in asking.tasks] == [0]
    assert "may run" in found["ceilings of host memory"].finding
    stored = read_ceilings(Path(two_gpus.devices.ceilings))
    assert [gpu.at for gpu in stored.gpus] == [NOW + 5, NOW]


def test_what_cannot_be_measured_does_not_keep_the_rest(two_gpus: Config) -> None:
    """A GPU that fails is a failure with its reason."""
    asking = Pretend()
    asking.errors = {0: "CUDA_ERROR_OUT_OF_MEMORY from cuMemCreate"}

    found = measured(two_gpus, asking)

    assert found["ceilings of gpu 0"].level is Level.FAIL
    assert "CUDA_ERROR_OUT_OF_MEMORY" in found["ceilings of gpu 0"].finding
    assert [gpu.uuid for gpu in read_ceilings(Path(two_gpus.devices.ceilings)).gpus] == ["GPU-1"]


def test_a_link_that_is_slow_under_load_is_reported(two_gpus: Config) -> None:
    """At rest a lower generation saves power; during copies it is a fault. Also when it is shown
    later."""
    asking = Pretend()
    asking.link = (3, 16)

    found = measured(two_gpus, asking)["ceilings of gpu 0"]
    later = named(show_ceilings(two_gpus, lambda: NOW + 7200))["ceilings of gpu 0"]

    assert (found.level, later.level) == (Level.WARN, Level.WARN)
    assert "PCIe generation 3 with 16 lanes under load, of generation 5" in found.finding
    assert "measured 2 h ago" in later.finding


def test_memory_is_taken_in_bounds(configure: Callable[..., Path]) -> None:
    """A part of what is available, and nothing if that is too little; without a place there is
    nothing to store."""
    asking = Pretend()
    config = load_config(configure())
    measured(config, asking, available=GIB)
    assert asking.tasks[0].nbytes == GIB // 16
    assert asking.tasks[0].folders == (config.models[0].path,)
    found = measured(config, asking, available=100 << 20)
    assert "too little to measure with" in found["ceilings"].finding
    found = measured(load_config(configure(place="")), asking)
    assert found["ceilings"].level is Level.FAIL
    assert len(asking.tasks) == 1


def test_what_is_stored_is_shown_with_its_age(configure: Callable[..., Path]) -> None:
    """Nothing is measured then. What is of another machine is not shown."""
    config = load_config(configure())
    assert "not measured" in named(show_ceilings(config))["ceilings"].finding
    measured(config, Pretend())

    found = named(show_ceilings(config, lambda: NOW + 3 * 86400))

    assert found["ceilings of host memory"].finding.endswith("measured 3 days ago")
    path = Path(config.devices.ceilings)
    write_ceilings(path, msgspec.structs.replace(read_ceilings(path), machine="another"))
    (other,) = show_ceilings(config)
    assert other.level is Level.WARN
    assert "is not used: the daemon expects weights to load at 5 GB/s until" in other.finding
    assert "of another machine; measure with `appliance doctor --ceilings`" in other.remedy


def test_a_file_of_others_is_not_used(
    configure: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor says why, measures nothing that it would have to put there, and a daemon starts
    as without it."""
    config = load_config(configure())
    measured(config, Pretend())
    path = Path(config.devices.ceilings)
    path.rename(path.with_name("moved.json"))
    path.symlink_to("moved.json")
    asking = Pretend()

    (shown,) = show_ceilings(config)
    (refused,) = measured(config, asking).values()

    assert (shown.level, refused.level) == (Level.WARN, Level.FAIL)
    assert "is a symbolic link; remove it" in shown.remedy
    assert shown.remedy == refused.remedy
    assert asking.tasks == []
    assert expected_load_rate(config) is None
    assert "expected without measured ceilings" in caplog.text
    assert "is a symbolic link" in caplog.text


def test_a_damaged_file_is_measured_anew(configure: Callable[..., Path]) -> None:
    """What was edited by mistake, or is of another machine, is replaced; nothing of it is kept."""
    config = load_config(configure())
    path = Path(config.devices.ceilings)
    path.write_text('{"machine": "another", "disks": [')

    found = measured(config, Pretend())

    assert all(finding.level is Level.OK for finding in found.values()), found
    assert read_ceilings(path).machine == machine_identity()


def test_a_disk_that_is_full_is_named(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the remedy, after the figures were shown."""

    def full(path: Path, ceilings: Ceilings) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("appliance.cli.ceilings.write_ceilings", full)

    found = measured(load_config(configure()), Pretend())

    assert found["ceilings"].level is Level.FAIL
    assert "No space left on device; what was measured is lost" in found["ceilings"].finding
    assert found["ceilings of host memory"].level is Level.OK


def test_ages_are_said_in_words() -> None:
    age = Age(lambda: NOW)
    assert [age(NOW - seconds) for seconds in (0, 59, 90, 150, 7200, 200_000, -3600)] == [
        "measured now", "measured now", "measured a minute ago", "measured 2 min ago",
        "measured 2 h ago", "measured 2 days ago",
        "measured in the future, by this machine's clock",
    ]  # fmt: skip


def test_a_daemon_expects_switches_by_them(
    two_gpus: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of its GPUs under their driver; else by the first guess, which the log says."""
    assert expected_load_rate(two_gpus) is None
    assert caplog.text == ""
    measured(two_gpus, Pretend())
    assert expected_load_rate(two_gpus) == pytest.approx(40e9)

    path = Path(two_gpus.devices.ceilings)
    stored = read_ceilings(path)
    write_ceilings(path, msgspec.structs.replace(stored, gpus=stored.gpus[:1]))
    assert expected_load_rate(two_gpus) is None
    assert "has none of these devices under this driver" in caplog.text
    write_ceilings(path, Ceilings(machine="another"))
    assert expected_load_rate(two_gpus) is None
    assert "is of another machine" in caplog.text
    path.write_text("{")
    assert expected_load_rate(two_gpus) is None
    assert "cannot be used" in caplog.text


def test_the_command_measures_this_machine(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really, with a process of its own; its findings are among the others, and the next run of the
    doctor shows them. A daemon's machine then expects its switches by them."""
    from appliance.cli import ceilings
    from appliance.serve import make_daemon

    monkeypatch.setattr(ceilings, "SECONDS", 0.1)
    monkeypatch.setattr(ceilings, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(ceilings, "MOST_BYTES", 32 << 20)
    probe = DaemonProbe("http://none")
    monkeypatch.setattr(DaemonProbe, "find", classmethod(lambda cls, config: probe))
    file = configure()
    command = ["doctor", "--config", str(file), "--json"]

    found = json.loads(CliRunner().invoke(cli, [*command, "--ceilings"]).output)
    again = json.loads(CliRunner().invoke(cli, command).output)

    what = "ceilings of host memory"
    assert [one["level"] for one in found if one["what"].startswith("ceilings")] == ["ok"] * 3
    assert [one["finding"] for one in again if one["what"] == what] == [
        one["finding"] for one in found if one["what"] == what
    ]
    config = load_config(file)
    stored = read_ceilings(Path(config.devices.ceilings))
    assert stored.host is not None
    rate = stored.host.memory.load_rate(SLAB, overlapped=False)
    daemon = make_daemon(config)
    spec = daemon.machine.models["tiny"]
    assert daemon.machine.costs.switch_seconds("tiny") == pytest.approx(spec.weight_bytes / rate)
    daemon.host.close()
