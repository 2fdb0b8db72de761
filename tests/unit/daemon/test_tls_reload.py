"""A certificate is renewed: a reload takes it in for handshakes to come, and ends no connection."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.daemon.reload import LiveConfig, tls_pair
from appliance.errors import ConfigError
from appliance.platform.tls import LiveTls
from appliance.serve import make_server
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.certificates import certify
from tests.unit.doubles.daemon import Box, setup_of, small

CONFIG = """\
[api]
bind = "127.0.0.1:0"
tls_certificate = "box.crt"
tls_key = "box.key"
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"
[policy]
use = ["serverlessllm"]
[[model]]
name = "tiny"
path = "tiny"
max_context = 64
"""


class Https(NamedTuple):
    """A server that speaks TLS, and its operator, who asks without a network."""

    port: int
    operator: httpx.AsyncClient

    def client(self, trust: ssl.SSLContext) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=trust, base_url=f"https://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS
        )

    async def is_trusted(self, trust: ssl.SSLContext) -> bool:
        """Whether a new connection is made."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trust)
        except (ssl.SSLError, ConnectionResetError):  # the server's refusal may come as a reset
            return False
        writer.close()
        await writer.wait_closed()
        return True

    async def reload(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.operator.post("/api/config/reload")).json()
        return answer

    async def check(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.operator.post("/api/config/check")).json()
        return answer


def trust(folder: Path, name: str = "box") -> ssl.SSLContext:
    """A client that trusts the certificate which is in the file now, and no other."""
    return ssl.create_default_context(cafile=str(folder / f"{name}.crt"))


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture
def file(tmp_path: Path, fake_checkpoint: Callable[[], Path]) -> Path:
    """The configuration; its certificate is one with an RSA key."""
    fake_checkpoint()
    certify(tmp_path, "box", key=rsa.generate_private_key(public_exponent=65537, key_size=2048))
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
async def https(monkeypatch: pytest.MonkeyPatch, file: Path) -> AsyncIterator[Https]:
    models = {"tiny": small("a")["a"]}
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    async with serving(box, load_config(file), file) as https:
        yield https
    box.daemon.host.close()
    assert box.take_failures() == []


@asynccontextmanager
async def serving(box: Box, config: Config, file: Path) -> AsyncIterator[Https]:
    """The daemon of the box behind the server of the configuration, put together as `serve` does,
    on a port."""
    pair = tls_pair(config, file)
    assert pair is not None
    tls = LiveTls(pair)
    server = make_server(box.daemon, config, LiveConfig(box.daemon, config, file, tls), tls)
    listener = socket.create_server(("127.0.0.1", 0))
    beginning = asyncio.create_task(server.serve([listener]))
    await server.listening.wait()
    transport = httpx.ASGITransport(server.config.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as operator:
        yield Https(listener.getsockname()[1], operator)
    server.should_exit = True
    await beginning


async def test_a_reload_takes_in_a_renewed_certificate(https: Https, tmp_path: Path) -> None:
    """New connections are shown that one alone; what was up goes on, and hears of it."""
    before = trust(tmp_path)
    async with (
        https.client(before) as client,
        client.stream("GET", "/api/events") as events,
    ):
        certify(tmp_path, "box")
        renewed = trust(tmp_path)
        unread = (await https.is_trusted(before), await https.is_trusted(renewed))
        differs = await https.check()

        reloaded = await https.reload()

        (change,) = reloaded["applied"]
        assert unread == (True, False)
        assert differs["changes"] == [change]
        assert reloaded["restart"] == []
        assert (change["key"], change["applies"]) == ("api.tls_certificate", "reload")
        assert change["old"] != change["new"]
        assert await https.is_trusted(renewed)
        assert not await https.is_trusted(before)
        async for line in events.aiter_lines():
            if line.startswith("data:") and "config_reloaded" in line:
                facts = json.loads(line.removeprefix("data:"))["facts"]
                assert facts == {"applied": ["api.tls_certificate"], "restart": []}
                break
        else:
            pytest.fail("the connection ended before it was told")


async def test_nothing_is_left_of_another_kind_of_key(https: Https, tmp_path: Path) -> None:
    """A client that takes RSA alone is not shown the certificate that was, with its RSA key."""
    rsa_alone = trust(tmp_path)
    rsa_alone.maximum_version = ssl.TLSVersion.TLSv1_2
    rsa_alone.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    before = await https.is_trusted(rsa_alone)
    certify(tmp_path, "box")

    await https.reload()

    assert before
    assert not await https.is_trusted(rsa_alone)


async def test_files_that_did_not_change_are_not_reported(https: Https, tmp_path: Path) -> None:
    """Neither before a reload nor by it; the same holds after one that took a pair in."""
    unchanged = await https.check(), await https.reload()
    certify(tmp_path, "box")
    await https.reload()
    again = await https.check(), await https.reload()

    for check, reload in (unchanged, again):
        assert (check["ok"], check["changes"]) == (True, [])
        assert reload == {"applied": [], "restart": []}


async def test_a_pair_that_is_wrong_is_refused(https: Https, tmp_path: Path, file: Path) -> None:
    """With the line, the key and the remedy; the pair that was is served on, and put right it is
    taken in."""
    before, key = trust(tmp_path), tmp_path / "box.key"
    old = key.rename(tmp_path / "old.key")
    certify(tmp_path, "box")
    renewed, right = trust(tmp_path), key.rename(tmp_path / "right.key")
    old.rename(key)

    answer = await https.operator.post("/api/config/reload")
    check = await https.check()
    served = await https.is_trusted(before)
    right.rename(key)
    corrected = await https.reload()

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "api.tls_key")
    wrong = f"{key} is not the key of {tmp_path / 'box.crt'}"
    assert f"{file}:4: api.tls_key: {wrong}; give files that belong together" in answer.text
    assert [(row["key"], row["wrong"]) for row in check["problems"]] == [("api.tls_key", wrong)]
    assert served
    assert len(corrected["applied"]) == 1
    assert await https.is_trusted(renewed)


async def test_other_files_are_taken_in_too(https: Https, tmp_path: Path, file: Path) -> None:
    """When the configuration names them; each path is a change, and they are in force then."""
    paths = certify(tmp_path, "new")
    edit(file, '"box.', '"new.')

    reloaded = await https.reload()

    assert [(row["key"], row["old"], row["new"]) for row in reloaded["applied"]] == [
        ("api.tls_certificate", str(tmp_path / "box.crt"), paths[0]),
        ("api.tls_key", str(tmp_path / "box.key"), paths[1]),
    ]
    assert reloaded["restart"] == []
    assert await https.is_trusted(trust(tmp_path, "new"))
    in_force = (await https.operator.get("/api/config")).json()["config"]["api"]
    assert (in_force["tls_certificate"], in_force["tls_key"]) == paths


async def test_https_or_not_waits_for_a_restart(https: Https, tmp_path: Path, file: Path) -> None:
    """Until then the listener is what it was."""
    edit(file, 'tls_certificate = "box.crt"\ntls_key = "box.key"\n', "")

    reloaded = await https.reload()

    assert reloaded["applied"] == []
    assert [row["key"] for row in reloaded["restart"]] == ["api.tls_certificate", "api.tls_key"]
    assert await https.is_trusted(trust(tmp_path))


def test_files_that_go_while_they_are_read(tmp_path: Path, file: Path) -> None:
    """What was fine when the configuration was checked is named if it is no longer."""
    config = load_config(file)
    (tmp_path / "box.key").unlink()

    with pytest.raises(ConfigError, match=r"api\.tls_key: .* cannot be read"):
        tls_pair(config, file)
