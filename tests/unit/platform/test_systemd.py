"""systemd's protocols: what is told, and which sockets are taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.platform.systemd import Notifier, SocketsRefused, refuse_foreign, take_sockets
from tests.activation import start_activated
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.notify import manager

TAKE = """
import os
from appliance.platform.systemd import SocketsRefused, take_sockets
try:
    taken = take_sockets(os.environ)
except SocketsRefused as error:
    print("refused:", error)
else:
    inherited = [os.get_inheritable(one.fileno()) for one in taken]
    left = [name for name in os.environ if name.startswith("LISTEN_")]
    print([one.getsockname()[1] for one in taken], inherited, left)
"""


def taken_by_a_child(*sockets: socket.socket, **environment: str) -> str:
    """What a child says of the sockets it was passed."""
    child = start_activated([sys.executable, "-c", TAKE], sockets, environment=environment)
    output, _ = child.communicate(timeout=PATIENCE_SECONDS)
    return output.decode().strip()


def test_what_is_sent_arrives(tmp_path: Path) -> None:
    """Assignments of one call come in one datagram."""
    with manager(tmp_path) as listening:
        notifier = Notifier(listening.address)
        notifier.tell(READY=1, STATUS="two of 2")
        notifier.tell(WATCHDOG=1)

    assert listening.heard() == [{"READY": "1", "STATUS": "two of 2"}, {"WATCHDOG": "1"}]


def test_a_reload_is_reported_from_beginning_to_end(tmp_path: Path) -> None:
    """With the time that systemd orders such messages by, also when it fails."""
    with manager(tmp_path) as listening:
        before = time.monotonic_ns() // 1000
        with pytest.raises(OSError, match="gone"), Notifier(listening.address).reloading():
            raise OSError("gone")

    begun, done = listening.heard()
    assert begun["RELOADING"] == "1"
    assert before <= int(begun["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert done == {"READY": "1"}


def test_an_abstract_address(tmp_path: Path) -> None:
    """An address that begins with @ is no path."""
    name = f"appliance-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        Notifier(f"@{name}").tell(READY=1)

        assert listener.recv(100) == b"READY=1"


def test_without_a_manager_nothing_is_reported(tmp_path: Path) -> None:
    """Neither no address nor an address where nobody listens is an error."""
    Notifier().tell(READY=1)
    gone = Notifier(str(tmp_path / "gone"))
    gone.tell(READY=1)

    assert gone.listened_to
    assert not Notifier().listened_to


@pytest.mark.parametrize(
    ("pid", "seconds"),
    [("", 30.0), (str(os.getpid()), 30.0), ("1", None)],
    ids=["nobody", "this process", "another"],  # the same in every process that runs tests
)
def test_the_environment_says_who_listens(pid: str, seconds: float | None) -> None:
    """The watchdog's bound is ours if it names us or nobody; children see none of it."""
    environment = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "30000000", "HOME": "/"}
    if pid:
        environment["WATCHDOG_PID"] = pid

    notifier = Notifier.taken_from(environment)

    assert notifier.listened_to
    assert notifier.watchdog_seconds == seconds
    assert environment == {"HOME": "/"}


def test_passed_sockets_are_taken_in_order() -> None:
    """All of them, not for children of ours; the variables are gone."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ports = [a.getsockname()[1], b.getsockname()[1]]

        assert taken_by_a_child(a, b) == f"{ports} [False, False] []"


def test_sockets_of_another_process_are_left() -> None:
    """LISTEN_PID names who they are for; without it there are none."""
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}

    assert take_sockets(environment) == []
    assert environment == {}
    assert take_sockets({}) == []


def test_a_socket_that_does_not_listen_is_refused_by_name() -> None:
    """Before anything is served, with its name and what to write instead."""
    with socket.socket() as idle:
        said = taken_by_a_child(idle, LISTEN_FDNAMES="web")

    assert said.startswith("refused: the passed socket 'web' is no listening TCP socket")
    assert "Accept=no" in said


def test_a_unix_socket_is_refused(tmp_path: Path) -> None:
    """The API is served on TCP."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()

        assert taken_by_a_child(listener).startswith("refused: the passed socket 'number 0'")


@pytest.mark.parametrize(
    ("family", "host", "refused"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET6, "::", True),
    ],
)
def test_without_keys_only_this_machine_is_served(
    family: socket.AddressFamily, host: str, refused: bool
) -> None:
    """A socket that was opened for us to everyone is refused as `api.bind` would be."""
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        if not refused:
            refuse_foreign([listener])
            return
        with pytest.raises(SocketsRefused, match=r"outside this machine.*api\.keys"):
            refuse_foreign([listener])


def test_the_library_agrees(tmp_path: Path) -> None:
    """systemd's own tool tells in the form that the double reads."""
    with manager(tmp_path) as listening:
        try:
            subprocess.run(
                ["systemd-notify", "--ready", "--status=fine"],
                env={**os.environ, "NOTIFY_SOCKET": listening.address},
                check=True,
                timeout=PATIENCE_SECONDS,
            )
        except FileNotFoundError:
            pytest.skip("systemd is not installed")
        Notifier(listening.address).tell(READY=1, STATUS="fine")

    *theirs, ours = listening.heard()
    assert all(word in [told for one in theirs for told in one.items()] for word in ours.items())
