"""A daemon of the user's own, which serves the user's folder of models and outlives the command
that starts it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import httpx
from rich.console import Console

from appliance.cli.start.folders import models_folder, state_folder
from appliance.client import connect
from appliance.errors import ApplianceError
from appliance.platform.children import module_command
from appliance.units import Address

START_SECONDS: Final = 600.0
"""For a daemon to load its libraries and to answer, on a slow machine."""
POLL_SECONDS: Final = 0.2
PROBE_SECONDS: Final = 5.0
_LOG_LINES: Final = 12
"""Of a daemon that ended at once, shown to the user."""


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


def start_own_daemon(url: str, address: Address) -> None:
    """Start it, and return when it answers requests. One that another command has started meanwhile
    is as good. Raises `ApplianceError` if it ends, or never answers; `OSError`."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"daemon-{address.port}.log"
    with _alone(folder / f"daemon-{address.port}.lock"), connect(url) as client:
        if _is_ready(client):
            return
        process = _spawn(log, address)
        click.echo(
            f"starting a daemon at {url}; its log is {log}; stop it with: kill {process.pid}",
            err=True,
        )
        with Console(stderr=True).status("waiting for the daemon"):
            _wait_until_ready(client, process, log)


def _spawn(log: Path, address: Address) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the terminal does not end it."""
    command = module_command("appliance", "serve", str(models_folder()), "--bind", address)
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (status := process.poll()) is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            end = "\n".join(lines[-_LOG_LINES:])
            raise ApplianceError(f"the daemon ended with status {status}:\n{end}")
        if _is_ready(client):
            return
        time.sleep(POLL_SECONDS)  # it is another process, and no event tells
    raise ApplianceError(f"the daemon (process {process.pid}) is not ready; its log is {log}")


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz", timeout=PROBE_SECONDS).is_success
    except httpx.TransportError:
        return False  # nothing listens, or it is busy starting


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One command at a time starts a daemon at an address."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
