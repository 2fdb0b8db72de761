"""Open WebUI: its server in both dialects, and its page in a browser. Needs Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.chromium import Chromium, chromium
from tests.clients.conftest import BUILD, EMBEDDER, SMALL, VECTOR_SIZE, WORDY, Appliance
from tests.docblocks import code_blocks
from tests.parrot import ANSWER, THOUGHT
from tests.patience import PATIENCE_SECONDS

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
DIALECTS = {"openai": "", "ollama": ":latest"}
"""What each adds to models' names."""
COMMANDS = {
    "openai": code_blocks("docs/recipes/open-webui.md", "sh", containing="OPENAI_API_BASE_URL"),
    "ollama": code_blocks("docs/recipes/open-webui.md", "sh", containing="OLLAMA_BASE_URL"),
}
SAID = "(document.querySelector('#messages-container')?.innerText ?? '')"


@dataclass(frozen=True)
class WebUI:
    """A running one that asks the appliance in one dialect."""

    url: str
    suffix: str
    client: httpx.Client

    def streamed(self, model: str) -> list[dict[str, Any]]:
        """The pieces of an answer."""
        body = {"model": model + self.suffix, "messages": HELLO, "stream": True}
        with self.client.stream("POST", "/api/chat/completions", json=body) as answer:
            text = answer.read().decode()
        assert answer.status_code == 200, text
        lines = re.findall("^data: (.*)$", text, re.MULTILINE)
        assert lines.pop() == "[DONE]"
        return [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]


@pytest.fixture(params=DIALECTS)
def webui(
    tmp_path: Path, recipe: Callable[..., str], request: pytest.FixtureRequest
) -> Iterator[WebUI]:
    """As the recipe starts it; slim leaves out what reads documents and speech, and offline what
    it would fetch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = recipe(COMMANDS[request.param])
    environment = {
        "PATH": f"{BUILD / 'openwebui/bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "DATA_DIR": str(tmp_path / "data"),
        "STATIC_DIR": str(tmp_path / "static"),
        "USE_SLIM_DOCKER": "True",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "unused",
        # They would ask the model once more, some time after an answer.
        "ENABLE_TITLE_GENERATION": "False",
        "ENABLE_TAGS_GENERATION": "False",
        "ENABLE_FOLLOW_UP_GENERATION": "False",
    }
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["bash", "-euc", f"{command.strip()} --host 127.0.0.1 --port {port}"],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            signed = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            client.headers["authorization"] = f"Bearer {signed.raise_for_status().json()['token']}"
            yield WebUI(url, DIALECTS[request.param], client)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=10).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-4000:])


def test_server(webui: WebUI) -> None:
    """Models, an answer whole and in a stream, and vectors."""
    listed = webui.client.get("/api/models").raise_for_status().json()["data"]
    body = {"model": SMALL + webui.suffix, "messages": HELLO}
    answer = webui.client.post("/api/chat/completions", json=body).raise_for_status().json()
    message = answer["choices"][0]["message"]
    pieces = webui.streamed(SMALL)
    body = {"model": EMBEDDER + webui.suffix, "input": ["Hello", "river"]}
    vectors = webui.client.post("/api/embeddings", json=body).raise_for_status().json()["data"]

    assert [one["id"] for one in listed] == [
        name + webui.suffix for name in (SMALL, WORDY, EMBEDDER)
    ]
    thought = message.get("reasoning") or message["reasoning_content"]
    assert (thought, message["content"]) == (THOUGHT, ANSWER)
    assert answer["usage"]["completion_tokens"]
    assert "".join(piece.get("content") or "" for piece in pieces) == ANSWER
    assert sum(bool(piece.get("content")) for piece in pieces) > 1
    assert [len(one["embedding"]) for one in vectors] == [VECTOR_SIZE] * 2


async def _send(tab: Chromium, webui: WebUI, model: str) -> None:
    """Open the page, put its news away, choose a model and send it a message."""
    await tab.do("Page.navigate", url=f"{webui.url}/")
    await _press(tab, "b.innerText.startsWith('Okay')")
    await tab.until("!document.body.innerText.includes('Release Notes')")
    await _press(tab, "b.id === 'model-selector-model-button'")
    await _press(tab, f"b.ariaLabel === 'Select {model}{webui.suffix} model'")
    await tab.until(
        "document.querySelector('#model-selector-model-button').innerText.trim()"
        f" === '{model}{webui.suffix}'"
    )
    await tab.evaluate("document.querySelector('#chat-input').focus()")
    await tab.until("document.activeElement.id === 'chat-input'")
    await tab.type("Hello, river\n")


async def _press(tab: Chromium, which: str) -> None:
    """Press the button `b` of which this is true, once there is one."""
    await tab.until(
        f"(() => {{ const found = [...document.querySelectorAll('button')].find(b => {which});"
        " found?.click(); return found !== undefined })()"
    )


async def test_page(webui: WebUI, tmp_path: Path) -> None:
    """A message is answered, behind calls of a tool that the page has not; nothing is asked of
    another host, and the browser has nothing to complain of."""
    async with chromium(tmp_path / "chromium") as tab:
        await _send(tab, webui, SMALL)
        await tab.until(f"{SAID}.includes({json.dumps(ANSWER)})")
        (tmp_path / "answered.png").write_bytes(await tab.picture())

        assert re.search(r"Explor(ed|ing) 2 book", await tab.evaluate(SAID))
        assert tab.complaints == []
        hosts = {urlsplit(url).netloc for url in tab.asked} - {""}
        assert hosts == {urlsplit(webui.url).netloc}


async def test_page_shows_a_stream_and_stops_it(
    appliance: Appliance, webui: WebUI, tmp_path: Path
) -> None:
    """An answer grows while it is computed; its stop ends the computing."""
    async with chromium(tmp_path / "chromium") as tab:
        with appliance.cancels():
            await _send(tab, webui, WORDY)
            await tab.until(f"{SAID}.length > 200")
            shown = await tab.evaluate(f"{SAID}.length")
            await tab.until(f"{SAID}.length > {shown}")
            assert appliance.busy(WORDY)
            (tmp_path / "streamed.png").write_bytes(await tab.picture())
            await _press(tab, "b.ariaLabel === 'Stop'")
