"""Keys, TLS and the admin socket of a real daemon, as an operator and his clients meet them."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.certificates import certify

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
TOKENS = 80


@dataclass(frozen=True)
class Secured:
    """A running daemon that wants keys and speaks TLS."""

    url: str
    file: Path
    admin: Path
    trust: ssl.SSLContext
    process: subprocess.Popen[bytes]

    def cli(self, *arguments: str, **environment: str) -> str:
        """What a command of the appliance prints; it has to succeed."""
        result = subprocess.run(
            [sys.executable, "-m", "appliance", *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def key(self, name: str, *options: str) -> str:
        return self.cli("key", "create", name, "--config", str(self.file), *options).strip()

    def client(self, secret: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=secret,
            max_retries=0,
            http_client=httpx.Client(verify=self.trust, timeout=PATIENCE_SECONDS),
        )

    def get(self, path: str, **headers: str) -> int:
        """The status of the answer."""
        answer = httpx.get(
            self.url + path, verify=self.trust, headers=headers, timeout=PATIENCE_SECONDS
        )
        return answer.status_code


@pytest.fixture(scope="module")
def daemon(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """One model, room for one request at a time, on every address of this machine."""
    folder = tmp_path_factory.mktemp("secured")
    certificate, key = certify(folder, "box")
    port, admin = free_port(), folder / "admin.sock"
    file = write_config(checkpoints, ["llama-a"], bind=f"0.0.0.0:{port}", instances=1)
    secured = folder / "appliance.toml"
    secured.write_text(
        file.read_text().replace(
            'admin_socket = ""',
            f'admin_socket = "{admin}"\nkeys = "keys.json"\nmax_queue = 1\n'
            f'tls_certificate = "{certificate}"\ntls_key = "{key}"',
        )
    )
    log = folder / "daemon.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(secured)],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    trust = ssl.create_default_context(cafile=certificate)
    running = Secured(f"https://127.0.0.1:{port}", secured, admin, trust, process)
    try:
        wait_until_ready(running, log)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(daemon: Secured, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and daemon.process.poll() is None:
        try:
            if daemon.get("/readyz") == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    pytest.fail(f"the daemon did not get ready:\n{log.read_text()[-4000:]}")


def test_keys_over_tls(daemon: Secured) -> None:
    """Made while the daemon runs, they open what they are for, and nothing once revoked."""
    secret = daemon.key("alice", "--model", "llama-a")
    with daemon.client(secret) as client:
        answer = client.chat.completions.create(model="llama-a", messages=HELLO, max_tokens=5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert daemon.get("/api/status") == 401
        assert daemon.get("/api/status", **{"x-api-key": secret}) == 403
        daemon.cli("key", "revoke", "alice", "--config", str(daemon.file))
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_keys_take_turns(daemon: Secured) -> None:
    """With room for one request, those of two keys wait, all are answered, and a key that
    asks for little is not behind one that asks for much: whose requests take seconds, so that
    they are not over when those of the other one come."""
    many, few = daemon.client(daemon.key("many")), daemon.client(daemon.key("few"))
    ended: list[str] = []

    def ask(name: str, client: openai.OpenAI) -> None:
        client.chat.completions.create(
            model="llama-a", messages=HELLO, max_tokens=TOKENS, extra_body={"ignore_eos": True}
        )
        ended.append(name)

    with many, few, ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, "many", many) for _ in range(10)]
        while not waiting(daemon):
            time.sleep(0.01)
        asked += [pool.submit(ask, "few", few) for _ in range(2)]
        for each in asked:
            each.result()

    assert len(ended) == 12
    last_of_few = max(place for place, name in enumerate(ended) if name == "few")
    assert last_of_few < 11


def waiting(daemon: Secured) -> bool:
    """Whether the daemon has a request now."""
    transport = httpx.HTTPTransport(uds=str(daemon.admin))
    with httpx.Client(
        transport=transport, base_url="http://appliance", timeout=PATIENCE_SECONDS
    ) as client:
        (model,) = client.get("/api/status").json()["models"]
    return bool(model["running"] + model["waiting"])


def test_the_admin_socket(daemon: Secured) -> None:
    """The command line needs no key there; on TCP it takes one from the environment."""
    unix = f"unix:{daemon.admin}"
    assert "llama-a" in daemon.cli("list", "--url", unix)
    assert "llama-a" in daemon.cli("ps", "--url", unix)
    assert "appliance" in daemon.cli("policy", "show", "--url", unix)
    secret = daemon.key("operator", "--scope", "admin")
    certificate = next(daemon.file.parent.glob("*.crt"))
    shown = daemon.cli(
        "ps", "--url", daemon.url, APPLIANCE_API_KEY=secret, SSL_CERT_FILE=str(certificate)
    )
    assert "llama-a" in shown
    checked = daemon.cli("doctor", "--config", str(daemon.file), "--verify")
    assert f"ready at {unix}" in checked


def test_a_renewed_certificate(daemon: Secured) -> None:
    """A reload takes it in, and who trusts the one before alone is not served any more."""
    certificate, _ = certify(daemon.file.parent, "box")
    told = daemon.cli("reload", "--url", f"unix:{daemon.admin}")
    renewed = ssl.create_default_context(cafile=certificate)
    answer = httpx.get(f"{daemon.url}/livez", verify=renewed, timeout=PATIENCE_SECONDS)

    assert told.startswith("1 applied, 0 wait for a restart\n")
    assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        daemon.get("/livez")


def test_the_end(daemon: Secured) -> None:
    """The daemon ends as told, and takes its socket with it."""
    daemon.process.send_signal(signal.SIGTERM)

    assert daemon.process.wait(PATIENCE_SECONDS) == 0
    assert not daemon.admin.exists()
