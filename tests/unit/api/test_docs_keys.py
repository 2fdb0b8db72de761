"""docs/keys.md: every command in it does what it says there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from appliance.api.operator_socket import OperatorProtocol
from appliance.config.loader import load_config
from appliance.platform.admin_socket import open_socket
from appliance.serve import AdminServer, Server, make_gateway, make_server, running
from tests.docblocks import code_blocks
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.front import FrontDouble, Fronted
from tests.unit.doubles.serving import served

ROOT = Path(__file__).parents[3]
DEFAULT = "http://127.0.0.1:11500"


def commands() -> list[tuple[str, str]]:
    """Every command of the page with what it prints there."""
    found: list[tuple[str, str]] = []
    for block in code_blocks("docs/keys.md", "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:.*\\\n)*.*\n", part)
            assert command is not None
            found.append((command[0], part[command.end() :]))
    return found


@pytest.mark.thorough
async def test_the_page_is_true(tmp_path: Path) -> None:
    """All commands in one shell, in order, against the API with keys and an admin socket, and a
    front end that is a double."""
    (tmp_path / "my.toml").write_text(
        '[api]\nkeys = "keys.json"\n[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "llama-a"\npath = "m"\nmax_context = 64\n'
    )
    service = FakeService(lambda generation: generation.say("hello"))
    service._cards["llama-a"] = service._cards["small"]
    config = load_config(tmp_path / "my.toml", check_files=False)
    gateway = make_gateway(service, config)  # type: ignore[arg-type]
    app = make_server(service, config, gateway=gateway).config.app  # type: ignore[arg-type]
    settings = uvicorn.Config(app, http=OperatorProtocol, lifespan="off", log_config=None)
    path = tmp_path / "admin.sock"
    admin = AdminServer(Server(settings), open_socket(path), path)
    async with running(admin), served(Fronted(app, FrontDouble(gateway.sessions))) as port:
        said = await asyncio.to_thread(run, tmp_path, path, port)

    assert len(said) == len(commands()) > 10
    for (command, expected), actual in zip(commands(), said, strict=True):
        assert actual == expected, command


def run(folder: Path, path: Path, port: int) -> list[str]:
    """What each command prints; all of them have to succeed."""
    shim = folder / "bin" / "appliance"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m appliance "$@"\n')
    shim.chmod(0o755)
    mark = "-- next --"
    script = "".join(f"{command}echo '{mark}'\n" for command, _ in commands())
    result = subprocess.run(
        ["bash", "-euc", script.replace(DEFAULT, f"http://127.0.0.1:{port}")],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{shim.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SOCKET": str(path),
            "NO_PROXY": "*",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split(f"{mark}\n")[:-1]
