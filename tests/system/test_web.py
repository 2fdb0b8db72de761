"""The dashboard in a real browser, on a real daemon: in with a key, a look, and a model evicted.

Needs Chromium: `make test-top`, not part of `make test`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port
from tests.chromium import chromium
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import until

MODELS = ("llama-a", "qwen2-a")


class Box(NamedTuple):
    """A daemon, and a key that opens all of it."""

    url: str
    key: str

    def ask(self, method: str, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        options: dict[str, Any] = {"json": body} if body else {}
        answer = httpx.request(
            method, self.url + path, headers=headers, timeout=PATIENCE_SECONDS, **options
        )
        return answer.raise_for_status().json()

    def residency(self, model: str) -> dict[str, str]:
        (found,) = (
            one for one in self.ask("GET", "/api/status")["models"] if one["model"] == model
        )
        return found["residency"]


@pytest.fixture
def box(checkpoints: Path, tmp_path: Path) -> Iterator[Box]:
    port = free_port()
    file = write_config(checkpoints, MODELS, bind=f"127.0.0.1:{port}", instances=1)
    secured = tmp_path / "appliance.toml"
    secured.write_text(
        file.read_text().replace('admin_socket = ""', 'admin_socket = ""\nkeys = "keys.json"')
    )
    load_config(secured)
    key = subprocess.run(
        [sys.executable, "-m", "appliance", "key", "create", "operator", "--config", str(secured),
         "--scope", "admin", "--scope", "infer"],
        check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    ).stdout.strip()  # fmt: skip
    log = tmp_path / "daemon.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(secured)],
            stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return httpx.get(f"{url}/readyz", timeout=PATIENCE_SECONDS).is_success
        except httpx.TransportError:
            return False  # not listening yet

    try:
        until(ready)
        yield Box(url, key)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)


@pytest.fixture
def address(box: Box) -> Iterator[str]:
    """Where its dashboard is."""
    environment = {name: value for name, value in os.environ.items() if name != "APPLIANCE_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-m", "appliance", "top", "--web", "--connect", box.url,
         "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        found = re.fullmatch(r"the dashboard is at (http://127\.0\.0\.1:\d+)/\n", told)
        assert found is not None, told
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


async def test_a_model_is_evicted_in_a_browser(box: Box, address: str, tmp_path: Path) -> None:
    """Behind the key: the overview; in Models a model is sent from its device. Nothing is asked of
    another host, and the browser has nothing to complain of."""
    model = MODELS[0]
    await asyncio.to_thread(
        box.ask, "POST", "/v1/completions", model=model, prompt="Hello", max_tokens=2
    )
    assert box.residency(model) == {"0": "loaded"}
    async with chromium(tmp_path / "chromium") as tab:
        await tab.do("Page.navigate", url=f"{address}/")
        await tab.until("document.activeElement?.name === 'key'")
        assert await tab.evaluate("document.querySelector('#terminal') === null")
        tab.complaints.clear()  # of 401, which a login page is
        await tab.type(f"{box.key}\n")
        await tab.hears("Overview", f"{len(MODELS)} models", "mixed")
        (tmp_path / "overview.png").write_bytes(await tab.picture())

        await tab.until("document.activeElement?.tagName === 'TEXTAREA'")
        await tab.type("4")
        await tab.hears("MODEL", "STATE", *MODELS)
        await tab.type(f"/{model}\n")
        await tab.hears(f"1 of {len(MODELS)}, /{model})")
        await tab.type("E")
        await tab.hears(f"Evict {model}?")
        (tmp_path / "question.png").write_bytes(await tab.picture())
        await tab.type("y")
        await tab.hears(f"{model} leaves its devices")
        (tmp_path / "evicted.png").write_bytes(await tab.picture())
        await asyncio.to_thread(until, lambda: box.residency(model) == {"0": "cold"})

        await tab.type("q")
        await tab.until("document.body.classList.contains('-closed')")
        (tmp_path / "ended.png").write_bytes(await tab.picture())
        assert tab.complaints == []
        hosts = {urlsplit(url).netloc for url in tab.asked if not url.startswith("data:")}
        assert hosts == {urlsplit(address).netloc}
