"""What a process in a sandbox can no longer do, and what happens where the kernel has none."""

from __future__ import annotations

import errno
import json
import platform
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.platform import sandbox
from appliance.platform.sandbox import checkpoint_files, landlock_version, missing
from appliance.platform.seccomp import filter_code, has_filters

DENIED = errno.errorcode[errno.EPERM]
HIDDEN = errno.errorcode[errno.EACCES]
DONE = "done"
HAS_LANDLOCK, HAS_SECCOMP = landlock_version() > 0, has_filters()

PROGRAM = """
import ctypes, errno, json, os, resource, signal, socket, subprocess, sys, threading
from pathlib import Path
from appliance.platform import sandbox
from appliance.platform.sandbox import Sandbox, interpreter_files

folder = Path(sys.argv[1])
inherited = socket.socket()
inherited.bind(("127.0.0.1", 0))
inherited.listen()
client = socket.create_connection(inherited.getsockname())
log = open(folder / "log", "w")
{before}
{sandbox}.enter()

def unshare():
    if ctypes.CDLL(None, use_errno=True).unshare(0):
        raise OSError(ctypes.get_errno(), "")

def fork():
    if not os.fork():
        os._exit(0)

def accept():
    served, _ = inherited.accept()
    served.sendall(b"x")
    assert client.recv(1) == b"x"

def log_on():
    log.write("x")
    log.flush()

def work_in_thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

tries = {{
    "read": (folder / "allowed" / "file").read_text,
    "read elsewhere": (folder / "secret").read_text,
    "list elsewhere": lambda: list(folder.iterdir()),
    "write": lambda: (folder / "scratch" / "new").write_text("x"),
    "write elsewhere": lambda: (folder / "allowed" / "new").write_text("x"),
    "truncate elsewhere": lambda: os.truncate(folder / "secret", 1),
    "delete elsewhere": (folder / "victim").unlink,
    "use an open file": log_on,
    "start a program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "fork": fork,
    "start a thread": work_in_thread,
    "make a TCP socket": socket.socket,
    "make a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "make a socket pair": socket.socketpair,
    "accept a connection": accept,
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "unshare": unshare,
}}
found = {{}}
for name, attempt in tries.items():
    try:
        attempt()
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
    else:
        found[name] = "done"
status = dict(line.split(":\\t") for line in Path("/proc/self/status").read_text().splitlines())
found["Seccomp"], found["NoNewPrivs"] = status["Seccomp"], status["NoNewPrivs"]
found["core"] = resource.getrlimit(resource.RLIMIT_CORE)
print(json.dumps(found))
"""

STRICT = (
    "Sandbox(reads=(*interpreter_files(), folder / 'allowed', folder / 'not there'),"
    " writes=(folder / 'scratch', Path(os.devnull)), programs=False, sockets=False)"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("allowed", "scratch"):
        (tmp_path / name).mkdir()
    for name in ("allowed/file", "secret", "victim"):
        (tmp_path / name).write_text("word", encoding="utf-8")
    return tmp_path


def tried(folder: Path, wanted: str, before: str = "") -> dict[str, Any]:
    """What happened to each of a process's attempts after it entered a sandbox."""
    program = PROGRAM.format(sandbox=wanted, before=before)
    done = subprocess.run(
        (sys.executable, "-c", program, str(folder)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def files_are_restricted(found: dict[str, Any]) -> bool:
    """Whether no file elsewhere could be used; asserts that each could be, if one could."""
    elsewhere = {name: found[name] for name in found if name.endswith("elsewhere")}
    assert len(elsewhere) == 5
    assert set(elsewhere.values()) in ({HIDDEN}, {DONE}), elsewhere
    return set(elsewhere.values()) == {HIDDEN}


def calls_are_restricted(found: dict[str, Any]) -> bool:
    names = ("fork", "make a TCP socket", "make a Unix socket", "unshare")
    calls = {name: found[name] for name in names}
    assert set(calls.values()) in ({DENIED}, {DONE}), calls
    return set(calls.values()) == {DENIED}


def test_a_strict_sandbox(folder: Path) -> None:
    """No other files, programs or sockets; or, without Landlock or seccomp, what the other one of
    them restricts."""
    found = tried(folder, STRICT)

    assert files_are_restricted(found) == HAS_LANDLOCK
    assert calls_are_restricted(found) == HAS_SECCOMP
    assert found["start a program"] == (DENIED if HAS_SECCOMP else HIDDEN if HAS_LANDLOCK else DONE)
    assert found["signal its parent"] == (DENIED if landlock_version() >= 6 else DONE)
    assert found["Seccomp"] == ("2" if HAS_SECCOMP else "0")


@pytest.mark.parametrize("wanted", [STRICT, "Sandbox()"])
def test_what_every_sandbox_allows(folder: Path, wanted: str) -> None:
    """Threads, the files that are needed, what is open already, and nothing that crashes leave."""
    found = tried(folder, wanted)
    names = ("read", "write", "use an open file", "start a thread", "make a socket pair")

    assert [found[name] for name in (*names, "accept a connection")] == [DONE] * 6
    assert found["core"] == [0, 0]
    assert found["NoNewPrivs"] == "1"


def test_the_mildest_sandbox(folder: Path) -> None:
    """It is for processes that start others."""
    found = tried(folder, "Sandbox()")
    denied = {name for name, what in found.items() if what in (DENIED, HIDDEN)}

    assert denied == ({"unshare"} if HAS_SECCOMP else set())


def test_a_kernel_without_landlock(folder: Path) -> None:
    found = tried(folder, STRICT, "sandbox.landlock_version = lambda: 0")

    assert not files_are_restricted(found)
    assert calls_are_restricted(found) == HAS_SECCOMP


def test_the_first_version_of_landlock(folder: Path) -> None:
    """It knows neither truncating nor scopes, and would refuse to be asked for them."""
    found = tried(folder, STRICT, f"sandbox.landlock_version = lambda: {int(HAS_LANDLOCK)}")

    assert found["read elsewhere"] == (HIDDEN if HAS_LANDLOCK else DONE)
    assert found["delete elsewhere"] == (HIDDEN if HAS_LANDLOCK else DONE)
    assert found["truncate elsewhere"] == DONE
    assert found["signal its parent"] == DONE


def test_a_machine_that_is_not_known(folder: Path) -> None:
    """The numbers of its system calls are not known: there is no filter."""
    found = tried(folder, STRICT, "import platform; platform.machine = lambda: 'riscv64'")

    assert not calls_are_restricted(found)
    assert files_are_restricted(found) == HAS_LANDLOCK
    assert found["Seccomp"] == "0"


def test_a_kernel_that_refuses(folder: Path) -> None:
    """The process goes on, and says so."""
    program = (
        "import logging; logging.basicConfig(); from appliance.platform import sandbox\n"
        "def refuse(*_, **__): raise OSError(28, 'no room')\n"
        "sandbox.system_call = sandbox.filter_calls = refuse\n"
        "sandbox.landlock_version = lambda: 7\n"
        "sandbox.Sandbox(writes=()).enter(); print('went on')"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True
    )
    assert done.stdout == "went on\n"
    for more in ("use more files", "make more system calls"):
        assert f"this process may {more} than it should: [Errno 28] no room" in done.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    assert [what.split()[0] for what in missing()] == ["Landlock", "seccomp"]


# --- the filter, of machines that are not here ----------------------------------------------------

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "x86_64": {"read": 0, "ptrace": 101, "execve": 59, "socket": 41, "clone": 56, "clone3": 435},
    "aarch64": {"read": 63, "ptrace": 117, "execve": 221, "socket": 198}
    | {"clone": 220, "clone3": 435},
}
ALLOWED = 0x7FFF0000
NO_SUCH_CALL = errno.errorcode[errno.ENOSYS]


def decided(program: bytes, machine: int, number: int, argument: int = 0) -> str:
    """What the kernel's interpreter makes of a system call."""
    data = struct.pack("=IIQQ", number, machine, 0, argument)
    lines: Iterator[tuple[int, int, int, int]] = struct.iter_unpack("=HBBI", program)  # type: ignore[assignment]
    code, at, held = list(lines), 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                (held,) = struct.unpack_from("=I", data, operand)
            case 0x15:
                at += if_true if held == operand else if_false
            case 0x35:
                at += if_true if held >= operand else if_false
            case 0x45:
                at += if_true if held & operand else if_false
            case 0x06:
                return DONE if operand == ALLOWED else errno.errorcode[operand & 0xFFFF]
            case _:
                raise AssertionError(f"no operation of a filter: {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_of_each_machine(machine: str) -> None:
    strict = filter_code(machine, programs=False, sockets=False)
    mild = filter_code(machine, programs=True, sockets=True)
    calls = CALLS[machine]

    def both(name: str, argument: int = 0) -> tuple[str, str]:
        found = [decided(one, MACHINES[machine], calls[name], argument) for one in (strict, mild)]
        return found[0], found[1]

    assert both("read") == (DONE, DONE)
    assert both("ptrace") == (DENIED, DENIED)
    assert both("execve") == (DENIED, DONE)
    assert both("socket") == (DENIED, DONE)
    assert both("clone", 0x01200011) == (DENIED, DONE)  # what fork asks for
    assert both("clone", 0x003D0F00) == (DONE, DONE)  # what a thread asks for
    assert both("clone3") == (NO_SUCH_CALL, DONE)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_in_the_manner_of_another_machine_are_denied(machine: str) -> None:
    """Their numbers mean something else: those of 32 bits, and x32's."""
    program = filter_code(machine, programs=True, sockets=True)

    assert decided(program, 0x40000003, CALLS[machine]["read"]) == DENIED
    assert decided(program, MACHINES[machine], CALLS[machine]["read"] | 0x40000000) == DENIED


# --- the files of models --------------------------------------------------------------------------


def test_files_of_a_checkpoint_that_are_links(tmp_path: Path) -> None:
    """As in the cache of a hub."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f").write_text("{}", encoding="utf-8")
    model = tmp_path / "snapshots" / "main"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "config.json").symlink_to("../../blobs/1f")
    (model / "1_Pooling" / "config.json").symlink_to(tmp_path / "blobs" / "1f")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")

    assert checkpoint_files(model) == (model, tmp_path.resolve() / "blobs" / "1f")
    assert checkpoint_files(tmp_path / "gone") == (tmp_path / "gone",)
