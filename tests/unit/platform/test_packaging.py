"""What is packaged beside the code: units, manual pages, completions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from appliance.cli.docs.manpages import command_page, configuration_page, write_pages
from appliance.cli.main import cli
from appliance.config.layers import directory
from appliance.config.schema import Api, schema
from appliance.platform.systemd import Notifier
from appliance.platform.torchvision import FOLDER
from tests.patience import PATIENCE_SECONDS
from tests.unit.cli.command_tree import commands, groups

pytestmark = pytest.mark.thorough

UNITS = Path(__file__).parents[3] / "packaging" / "systemd"
HARDENING = {
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "yes",
    "DevicePolicy": "closed",
    "LockPersonality": "yes",
    "PrivateTmp": "yes",
    "ProtectClock": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHome": "read-only",
    "ProtectHostname": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectProc": "invisible",
    "ProtectSystem": "strict",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
    "User": "appliance",
}


def unit(name: str) -> ConfigParser:
    """A unit file; of a repeated directive the last counts."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return parser


def test_the_service_is_confined() -> None:
    """Nothing of what its exposure of 1.9 (systemd 252) rests on is missing."""
    service = dict(unit("appliance.service")["Service"])

    assert service.items() >= HARDENING.items()
    filters = (UNITS / "appliance.service").read_text()
    assert "SystemCallFilter=@system-service\n" in filters
    assert "SystemCallFilter=~@privileged @obsolete\n" in filters


def test_the_service_may_write_what_it_has_to() -> None:
    """The drop-ins of operators, in a directory that is its own; and it hears of a reload."""
    service = unit("appliance.service")["Service"]
    configuration = Path(service["ExecStart"].split()[-1])
    owned = (UNITS / "appliance.tmpfiles").read_text()

    assert service["ReadWritePaths"] == f"-{directory(configuration)}"
    assert f"d {directory(configuration)} 0750 appliance appliance -" in owned
    assert service["ExecReload"].split() == ["/bin/kill", "-HUP", "$MAINPID"]


def test_systemd_agrees() -> None:
    """The exposure is at most 3 of 10, and no directive is unknown."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    done = subprocess.run(
        [
            *("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager"),
            str(UNITS / "appliance.service"),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )

    assert done.returncode == 0, done.stdout[-500:]
    assert "Unknown" not in done.stderr


def test_the_service_waits_for_the_drain() -> None:
    """The manager is more patient than the daemon, tells only it to end, and listens to it."""
    service = unit("appliance.service")["Service"]
    drain = schema()["[api]"][1]["drain"].sample

    assert float(service["TimeoutStopSec"]) > 2 * float(drain) > 0  # type: ignore[arg-type]
    assert service["KillMode"] == "mixed"
    assert service["Type"] == "notify"
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": f"{service['WatchdogSec']}000000"}
    assert Notifier.taken_from(environment).watchdog_seconds == 60


def test_what_may_go_away_is_tried_again() -> None:
    """Restarts after a failure come too rarely to reach the limit of starts, which is for what a
    waiting client starts at once; also after a refused configuration, as a disk or a GPU may come
    late. Where memory runs out, the kernel ends a worker of ours, and the daemon stays."""
    start, service = unit("appliance.service")["Unit"], unit("appliance.service")["Service"]
    often = int(start["StartLimitBurst"])

    assert service["Restart"] == "on-failure"
    assert "RestartPreventExitStatus" not in service
    assert often * float(service["RestartSec"]) > float(start["StartLimitIntervalSec"])
    assert often < 10
    assert (service["OOMPolicy"], service["MemoryMax"]) == ("continue", "95%")


def test_the_socket_is_where_clients_look() -> None:
    """It listens on the default address, whether the daemon is up or not."""
    assert unit("appliance.socket")["Socket"]["ListenStream"] == str(Api().bind)


def test_the_manual_has_every_command() -> None:
    """Each in a section of its own, with its arguments and options and what they mean."""
    sections = command_page().split(".SS ")[1:]
    found = {section.splitlines()[0]: section for section in sections}

    for path, command in commands():
        words = roff(f"appliance {path} ")
        (section,) = (found[title] for title in found if f"{title} ".startswith(words))
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                assert roff(parameter.human_readable_name) in section
                continue
            assert isinstance(parameter, click.Option)
            for name in parameter.opts:
                assert roff(name) in section, (path, name)
            assert roff((parameter.help or "").split("\n")[0]) in section
    assert len(found) == len(list(commands()))


def roff(text: str) -> str:
    return text.replace("-", r"\-")


def test_the_manual_has_every_key() -> None:
    """Of every table of the configuration."""
    page = configuration_page()

    for header, (_, keys) in schema().items():
        section = page.partition(f".SH {header}\n")[2].partition("\n.SH ")[0]
        for key in keys:
            assert rf"\fB{key}\fR (" in section


def test_the_manual_is_well_formed(tmp_path: Path) -> None:
    """groff has nothing to say about it."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    write_pages(tmp_path)
    pages = sorted(tmp_path.iterdir())
    assert [page.name for page in pages] == ["appliance.1", "appliance.toml.5"]
    for page in pages:
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert (done.returncode, done.stderr) == (0, "")


PLAIN, CPU = "2.13.0", "2.13.0+cpu"
LIBRARIES = pytest.mark.parametrize(
    ("builds", "expected"),
    [
        ([PLAIN], {"engine==1", f"torch=={PLAIN}", "nvidia-x==1"}),
        ([PLAIN, CPU], {"engine==1", f"torch=={CPU}"}),
    ],
)
REFUSALS = [
    (b"!", True, "DO NOT MATCH THE HASHES"),
    (b"", False, "Hashes are required"),
]


@LIBRARIES
def test_make_installs_the_libraries_of_a_torch_that_needs_them(
    tmp_path: Path, builds: list[str], expected: set[str]
) -> None:
    """The CPU build is taken where pip finds one; the plain build comes with CUDA's libraries."""
    environment = only_wheels(tmp_path / "wheels", builds)
    (tmp_path / "requirements").mkdir()
    engine_lists(tmp_path / "requirements", "cpu.txt", tmp_path / "wheels")

    done = made(tmp_path, environment)

    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    assert installed(site) == expected
    assert ("fetching the CUDA build" in done.stdout) == (builds == [PLAIN])


@LIBRARIES
def test_the_package_installs_the_libraries_of_a_torch_that_needs_them(
    tmp_path: Path, builds: list[str], expected: set[str]
) -> None:
    """`appliance-engine install cpu` does as `make` does."""
    environment = only_wheels(tmp_path / "wheels", builds)
    (tmp_path / "share").mkdir()
    engine_lists(tmp_path / "share", "engine-cpu.txt", tmp_path / "wheels")

    done = engine_installed(tmp_path, "cpu", environment)

    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "engine") == expected
    assert installed(tmp_path / "engine" / FOLDER) == {"reader==1"}


@pytest.mark.parametrize(("added", "digests", "said"), REFUSALS)
def test_make_refuses_what_is_not_pinned(
    tmp_path: Path, added: bytes, digests: bool, said: str
) -> None:
    """Another file of the same name and version; any file, where the list has no digest."""
    environment = only_wheels(tmp_path / "wheels", [CPU])
    (tmp_path / "requirements").mkdir()
    engine_lists(tmp_path / "requirements", "cpu.txt", tmp_path / "wheels", digests=digests)
    (wheel,) = (tmp_path / "wheels").glob("engine-*")
    wheel.write_bytes(wheel.read_bytes() + added)

    done = made(tmp_path, environment)

    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(("added", "digests", "said"), REFUSALS)
def test_the_package_refuses_what_is_not_pinned(
    tmp_path: Path, kind: str, added: bytes, digests: bool, said: str
) -> None:
    """As `make` does; the engine that was there before stays."""
    environment = only_wheels(tmp_path / "wheels", [CPU])
    for name in ("share", "engine"):
        (tmp_path / name).mkdir()
    (tmp_path / "engine" / "before").touch()
    wheels = tmp_path / "wheels"
    engine_lists(tmp_path / "share", f"engine-{kind}.txt", wheels, digests=digests)
    (wheel,) = wheels.glob("engine-*")
    wheel.write_bytes(wheel.read_bytes() + added)

    done = engine_installed(tmp_path, kind, environment)

    assert done.returncode != 0
    assert said in done.stderr
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["before"]


def made(home: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`make venv/.cpu` with the lists in `home`, into an environment there."""
    venv.create(home / "venv", with_pip=False)
    (home / "venv" / ".created").touch()
    pip = f"PIP={sys.executable} -m pip --python venv/bin/python"
    makefile = UNITS.parents[1] / "Makefile"
    return subprocess.run(
        ["make", "-f", str(makefile), "VENV=venv", pip, "venv/.cpu"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def engine_installed(
    home: Path, kind: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """`appliance-engine install` with the lists in `home`, as if the package were there."""
    (home / "bin").mkdir()
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = shutil.copy(UNITS.parent / "deb" / "appliance-engine", home / "bin")
    return subprocess.run(
        [script, "install", kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def engine_lists(directory: Path, engine: str, wheels: Path, *, digests: bool = True) -> None:
    """An engine of one package, and the two builds of torch with one library, with the digests of
    the wheels that there are, or with none."""
    none = hashlib.sha256().hexdigest()  # of a wheel that is not there
    for file, pins in (
        (engine, ["engine==1"]),
        ("torch-cpu.txt", [f"torch=={CPU}"]),
        ("torch-cuda.txt", [f"torch=={PLAIN}", "nvidia-x==1"]),
        ("images-cpu.txt", ["reader==1"]),
    ):
        lines = []
        for pin in pins:
            wheel = wheels / f"{pin.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
            content = wheel.read_bytes() if wheel.exists() else b""
            digest = hashlib.sha256(content).hexdigest() if content else none
            lines.append(f"{pin} --hash=sha256:{digest}" if digests else pin)
        (directory / file).write_text("".join(f"{line}\n" for line in lines))


def only_wheels(directory: Path, builds: list[str]) -> dict[str, str]:
    """An environment in which pip finds these builds of torch, one library, and the engine."""
    directory.mkdir()
    for name, version in [
        *(("torch", build) for build in builds),
        ("nvidia_x", "1"),
        ("engine", "1"),
        ("reader", "1"),
    ]:
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    ours = {name: os.environ[name] for name in os.environ if not name.startswith(("PIP_", "MAKE"))}
    pip = {"CONFIG_FILE": os.devnull, "FIND_LINKS": str(directory), "NO_INDEX": "1"}
    return ours | {f"PIP_{name}": value for name, value in pip.items()}


def installed(directory: Path) -> set[str]:
    """Names and versions of what is there."""
    found = importlib.metadata.distributions(path=[str(directory)])
    return {f"{each.name.replace('_', '-')}=={each.version}" for each in found}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_made(shell: str) -> None:
    """As the package asks click for them; each asks the command itself what comes next."""
    environment = {"_APPLIANCE_COMPLETE": f"{shell}_source"}

    script = CliRunner().invoke(cli, prog_name="appliance", env=environment).output

    assert f"_APPLIANCE_COMPLETE={shell}_complete" in script


def test_a_completion_knows_the_commands() -> None:
    """What the shell is answered for the beginning of a word, and for none: all that may follow, of
    every group and every command."""
    assert completed("ser") == ["serve"]
    for path, group in groups():
        names = group.list_commands(click.Context(group))
        assert completed(*path.split(), "") == names
    for path, command in commands():
        options = {
            name
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.hidden
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("--")
        }
        assert set(completed(*path.split(), "--")) == options | {"--help"}


def completed(*words: str) -> list[str]:
    """What bash is offered in place of the last word."""
    environment = {
        "_APPLIANCE_COMPLETE": "bash_complete",
        "COMP_WORDS": f"appliance {' '.join(words)}",
        "COMP_CWORD": str(len(words)),
    }
    answer = CliRunner().invoke(cli, prog_name="appliance", env=environment).output
    return [line.partition(",")[2] for line in answer.splitlines()]


def test_the_manual_of_operations_names_real_commands() -> None:
    """What an example calls is a command, as it is written there."""
    text = (UNITS.parents[1] / "docs" / "operations.md").read_text()
    called = [line.split() for line in text.splitlines() if line.startswith("appliance ")]
    assert called
    for _, *words in called:
        command: click.Command = cli
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None
            command = found
