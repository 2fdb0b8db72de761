"""A client that opens more connections than the daemon has descriptors; others are served."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo import run
from appliance.demo.checkpoints import write_config
from appliance.platform.children import module_command
from tests.hostile.connections import HALF_SENT
from tests.patience import PATIENCE_SECONDS

MODEL = "llama-a"
DESCRIPTORS = 300
EACH = 300
"""Connections of each kind: together more than the core and its front end can have."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as the attack takes here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
def test_half_sent_requests_lock_no_one_out(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither other clients, nor operators on the admin socket."""
    limited = ("sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh")
    monkeypatch.setattr(run, "module_command", lambda *words: (*limited, *module_command(*words)))
    bind = f"127.0.0.1:{run.free_port()}"
    file = write_config(checkpoints, [MODEL], instances=1, bind=bind)
    admin = tmp_path / "admin.sock"
    file.write_text(file.read_text().replace('admin_socket = ""', f'admin_socket = "{admin}"'))
    ask = {"model": MODEL, "prompt": "Once", "max_tokens": 4}
    with run.running_daemon(file, load_config(file)) as (url, _), ExitStack() as attack:
        place = urlsplit(url)
        for begin in HALF_SENT:
            for _ in range(EACH):
                one = socket.create_connection((place.hostname, place.port), PATIENCE_SECONDS)
                attack.enter_context(one)
                one.sendall(begin)

        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            for _ in range(3):
                answer = client.post("/v1/completions", json=ask, headers={"connection": "close"})
                assert answer.is_success
                assert client.get("/livez").is_success
        socket_of_operators = httpx.HTTPTransport(uds=str(admin))
        with httpx.Client(
            transport=socket_of_operators, base_url="http://admin", timeout=PATIENCE_SECONDS
        ) as operator:
            assert operator.get("/api/status").is_success
            assert httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).status_code == 403
            assert operator.post("/v1/completions", json=ask).is_success
        log = file.with_name("daemon.log").read_text()
    assert "connections without a request were closed" in log
    assert "no connection is accepted" not in log
