"""A node of the Ray cluster as a process: how it is started, and what it knows of its box."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from appliance.errors import FleetError
from appliance.fleet.ray_serve.settings import (
    BOX_KEY,
    BOX_NAME,
    BOX_RESOURCE,
    BOX_URL,
    FRONT_RESOURCE,
)
from appliance.vocabulary import Word

OBJECT_STORE_BYTES: Final = 100 << 20
"""Answers go by other ways; long bodies of requests lie here for a moment."""
END_SECONDS: Final = 60.0
"""Ray itself takes up to 30 to drain a node."""
_CPUS: Final = 2
"""As Ray counts them; nothing that runs here asks for one."""
_MANY: Final = "1000000"


TOKEN_FILE: Final = Path(".ray", "auth_token")
"""Below the user's home, where Ray looks for it."""


def use_token(environment: MutableMapping[str, str], home: Path, *, make: bool) -> None:
    """Let Ray, in this process and those it starts, talk only to those that have the fleet's token.
    Has to come before Ray is imported. Without a token Ray would run the code of anything that
    reaches its ports. With `make`, make one if there is none. Raises `FleetError`."""
    environment["RAY_AUTH_MODE"] = "token"
    file = home / TOKEN_FILE
    if environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"):
        return
    if file.exists():
        return
    if not make:
        raise FleetError(
            f"{file}: there is no token to join with: copy this file from the head's user, or set "
            "$RAY_AUTH_TOKEN_PATH"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32))
    except OSError as error:
        raise FleetError(f"{file}: no token can be written: {error.strerror}") from error


class Node(Word, frozen=True, kw_only=True):
    """One machine of the fleet."""

    join: str = ""
    """HOST:PORT of the cluster; empty for its head."""
    port: int
    """Of the head, for other nodes."""
    address: str = ""
    """Of this machine, for the others; empty for what Ray finds."""
    box_name: str = ""
    box_url: str = ""
    """Empty where there is no box."""
    front: bool = True
    """Whether clients can talk to this node."""

    def command(self) -> list[str]:
        """That of Ray, which stays in the foreground."""
        resources = ({BOX_RESOURCE: 1} if self.box_url else {}) | (
            {FRONT_RESOURCE: 1} if self.front else {}
        )
        where = [f"--address={self.join}"] if self.join else ["--head", f"--port={self.port}"]
        if self.address:
            where.append(f"--node-ip-address={self.address}")
        if not self.join:
            where += ["--include-dashboard=false", "--disable-usage-stats"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block"),
            *(f"--num-cpus={_CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            f"--resources={json.dumps(resources)}",
        ]

    def environment(self, own: Mapping[str, str], key: str | None) -> dict[str, str]:
        """Of this process and of all that Ray starts here. The key is not on any command line."""
        box = {BOX_NAME: self.box_name, BOX_URL: self.box_url} if self.box_url else {}
        if self.box_url and key:
            box[BOX_KEY] = key
        return {
            **own,
            **box,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": _MANY,
        }

    def start(self, key: str | None) -> subprocess.Popen[bytes]:
        """Ray's process. It gets no signals of this one's terminal: `end` ends it."""
        return subprocess.Popen(
            self.command(), env=self.environment(os.environ, key), start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a node's Ray, and what it has started."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
