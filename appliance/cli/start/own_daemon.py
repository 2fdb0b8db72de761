"""A daemon of the user's own, which serves the user's folder of models and outlives the command
that starts it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click
import httpx
from rich.console import Console

from appliance.checkpoints.discovery.find import find_models
from appliance.cli.start.folders import models_folder
from appliance.client import connect
from appliance.config.starter import Terms, write_starter
from appliance.errors import ApplianceError
from appliance.platform.admin_socket import UNIX, is_listening, own_path
from appliance.platform.children import module_command
from appliance.units import Address
from appliance.user_folders import state_folder

START_SECONDS: Final = 600.0
"""For a daemon to load its libraries and to answer, on a slow machine."""
POLL_SECONDS: Final = 0.2
PROBE_SECONDS: Final = 5.0
_LOG_BYTES: Final = 16 << 20
"""A larger log is begun anew at the next start."""
_LOG_LINES: Final = 12
"""Of a daemon that ended at once, shown to the user."""
_SOCKET_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""


def own_address(url: str) -> Address | None:
    """Where a daemon of the user's own would listen to be reached at `url`; None for an address of
    another machine, with TLS or below a path, and for a socket."""
    try:
        asked = httpx.URL(url)
        host = f"[{asked.host}]" if ":" in asked.host else asked.host
        address = Address.read(f"{host}:{asked.port or 80}")
    except (httpx.InvalidURL, ValueError):
        return None
    plain = asked.scheme == "http" and asked.path in ("", "/")
    return address if plain and address.local else None


def operators_url(url: str) -> str:
    """Where the daemon at `url` does what operators ask: the admin socket of a daemon of the user's
    own, else `url`."""
    address = own_address(url)
    path = address and own_path(address.port)
    return f"{UNIX}{path}" if path and is_listening(path) else url


def start_own_daemon(url: str, address: Address) -> None:
    """Start it, and return when it answers requests. One that another command has started meanwhile
    is as good.

    Raises `ApplianceError` if it ends or never answers, `ConfigError` and `NotFound` for what is
    wrong with the folder of models, and `OSError`."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"daemon-{address.port}.log"
    with connect(url) as client, _lock(folder / f"daemon-{address.port}.lock") as lock:
        if not _has_turn(client, lock, url, log) or _is_ready(client):
            return
        file = _configuration(folder / f"daemon-{address.port}", address)
        begin = _begin(log)
        process = _spawn(file, log, lock)
        click.echo(
            f"starting a daemon at {url}; its log is {log}; stop it with: kill {process.pid}",
            err=True,
        )
        with Console(stderr=True).status("waiting for the daemon"):
            _wait_until_ready(client, process, log, begin)


def _configuration(folder: Path, address: Address) -> Path:
    """Of all models of the user, in a folder that is made anew: what operators changed is gone with
    the daemon that they changed. Operators have a socket that is this user's alone, so other local
    users can have no more than answers computed."""
    socket = own_path(address.port)
    if socket is None or len(os.fsencode(socket)) > _SOCKET_BYTES:
        raise ApplianceError(
            f"{socket} is too long for the path of a socket, {_SOCKET_BYTES} bytes; set "
            "$XDG_STATE_HOME to a folder with a shorter path"
        )
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    file = folder / "appliance.toml"
    models = models_folder()
    starter = write_starter(
        file,
        find_models([models], leave_out_clashes=True),
        Terms(address, models, str(socket)),
        now=True,
    )
    for one in starter.left_out:
        click.echo(str(one), err=True)
    return file


def _begin(log: Path) -> int:
    """The byte at which the log of the next daemon begins. It goes on with that of the one before,
    which may say why it ended, unless that is large."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return 0
    if size <= _LOG_BYTES:
        return size
    log.unlink()
    return 0


def _spawn(file: Path, log: Path, lock: int) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the terminal does not end it. It holds the lock for as
    long as it lives."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            module_command("appliance", "serve", str(file)),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            pass_fds=(lock,),
        )


def _wait_until_ready(
    client: httpx.Client, process: subprocess.Popen[bytes], log: Path, begin: int
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        status = process.poll()
        if _is_ready(client):
            return  # if it ended, another one has the address
        if status is not None:
            lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
            end = "\n".join(lines[-_LOG_LINES:])
            raise ApplianceError(f"the daemon ended with status {status}:\n{end}")
        time.sleep(POLL_SECONDS)  # it is another process, and no event tells
    raise ApplianceError(f"the daemon (process {process.pid}) is not ready; its log is {log}")


def _has_turn(client: httpx.Client, lock: int, url: str, log: Path) -> bool:
    """Take the lock; false if the daemon is ready to which it belongs. Raises `ApplianceError` if
    neither comes."""
    said = False
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _taken(lock):
            return True
        if _is_ready(client):
            return False
        if not said:
            click.echo(f"another command started the daemon at {url}; its log is {log}", err=True)
            said = True
        time.sleep(POLL_SECONDS)  # as above
    raise ApplianceError(f"the daemon that another command started is not ready; its log is {log}")


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz", timeout=PROBE_SECONDS).is_success
    except httpx.TransportError:
        return False  # nothing listens, or it is busy starting


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """The file that a command locks to start a daemon, and the daemon goes on to lock."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield held
    finally:
        os.close(held)


def _taken(lock: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
