"""TLS: files that cannot be served are named before anything listens, and good ones are served."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from appliance.config.loader import load_config
from appliance.errors import ConfigError
from appliance.platform.tls import LiveTls, Pair, problem_with, read_pair
from appliance.serve import make_server
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.certificates import certify
from tests.unit.doubles.fake_service import FakeService

CONFIG = """\
[api]
bind = "127.0.0.1:0"
{api}
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"
[[model]]
name = "tiny"
path = "tiny"
max_context = 64
dtype = "float32"
"""


def test_files_that_belong_together_are_fine(tmp_path: Path) -> None:
    """And so is neither of them."""
    assert problem_with(*certify(tmp_path, "a")) is None
    assert problem_with("", "") is None


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    """The key of the configuration, and the file."""
    certificate, key = certify(tmp_path, "a")
    _, other = certify(tmp_path, "b")
    _, locked = certify(tmp_path, "c", b"secret")
    kind = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _, of_another_kind = certify(tmp_path, "d", key=kind)
    missing = str(tmp_path / "none")

    def told(certificate: str, key: str) -> tuple[str, str]:
        problem = problem_with(certificate, key)
        assert problem is not None
        return problem.key, problem.wrong

    assert told(certificate, "") == ("tls_key", "is missing, but tls_certificate is set")
    assert told("", key) == ("tls_certificate", "is missing, but tls_key is set")
    assert told(missing, key)[0] == "tls_certificate"
    assert told(certificate, missing) == (
        "tls_key", f"{missing} cannot be read: No such file or directory",
    )  # fmt: skip
    assert told(certificate, other) == ("tls_key", f"{other} is not the key of {certificate}")
    assert told(certificate, of_another_kind)[1] == (
        f"{of_another_kind} is not the key of {certificate}"
    )
    assert told(certificate, locked) == ("tls_key", f"{locked} is encrypted")
    assert told(key, certificate)[0] == "tls_certificate"


def test_the_configuration_is_checked(tmp_path: Path, fake_checkpoint: object) -> None:
    """With the line, and paths relative to the file; keys and TLS free the address."""
    fake_checkpoint()  # type: ignore[operator]
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG.format(api='tls_certificate = "a.crt"\ntls_key = "a.key"'))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (3, "api.tls_certificate")

    certificate, key = certify(tmp_path, "a")
    config = load_config(file)
    assert (config.api.tls_certificate, config.api.tls_key) == (certificate, key)


async def test_https_is_served(tmp_path: Path) -> None:
    """To clients who trust the certificate, and never below TLS 1.2."""
    certificate, key = certify(tmp_path, "a")
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG.format(api=f'tls_certificate = "{certificate}"\ntls_key = "{key}"'))
    config = load_config(file, check_files=False)
    pair = read_pair(certificate, key)
    assert isinstance(pair, Pair)
    server = make_server(FakeService(), config, tls=LiveTls(pair))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    trusting = ssl.create_default_context(cafile=certificate)
    async with httpx.AsyncClient(
        verify=trusting, base_url=f"https://127.0.0.1:{port}", timeout=PATIENCE_SECONDS
    ) as client:
        answer = await client.get("/livez")
    server.should_exit = True
    await serving

    assert answer.status_code == 200
    assert server.config.ssl is not None
    assert server.config.ssl.minimum_version >= ssl.TLSVersion.TLSv1_2
