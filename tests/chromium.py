"""A headless Chromium, driven by its own protocol (Chrome DevTools) over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_SECONDS

OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--window-size=1280,800"),
)
ESCAPE = re.compile(r"\x1b(\[[0-9;:?<>=]*[ -/]*[@-~]|[()].|[=>78])")
LARGEST_MESSAGE_BYTES = 64 << 20


class Chromium:
    """One tab of it. What comes by WebSockets of its pages, without a terminal's escapes, is in
    `heard`; addresses that were asked for are in `asked`, and what it complains of in `complaints`.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.heard = ""
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """Take in what it says, until it ends."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if not answer.done():  # somebody waited long enough
                    answer.set_result(said)
            else:
                self._note(said["method"], said["params"])
            self._changed.set()
        self._changed.set()

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.webSocketFrameReceived" and told["response"]["opcode"] == 2:
            data = base64.b64decode(told["response"]["payloadData"])
            self.heard += ESCAPE.sub("", data.decode(errors="replace"))
        elif method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.asked.append(told["url"])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))

    async def do(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol; its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, PATIENCE_SECONDS)
        assert "error" not in said, said
        return said["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of JavaScript in the page."""
        found = await self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until this JavaScript is true; pages come and go meanwhile."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self.evaluate(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def hears(self, *words: str) -> None:
        """Wait until all of this came since this was last asked."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(word in self.heard for word in words):
                assert not self._socket.closed, "Chromium ended"
                self._changed.clear()
                await self._changed.wait()
        self.heard = ""

    async def type(self, text: str) -> None:
        """Key by key; a line feed is Enter."""
        for character in text:
            key = "Enter" if character == "\n" else character
            typed = "\r" if character == "\n" else character
            # Of others the number is that of no character: 45 is Insert, not a hyphen.
            code = ord(typed.upper()) if typed.isalnum() or typed == "\r" else 0
            for kind in ("keyDown", "keyUp"):
                await self.do(
                    "Input.dispatchKeyEvent",
                    type=kind, key=key, windowsVirtualKeyCode=code,
                    **({"text": typed} if kind == "keyDown" else {}),
                )  # fmt: skip

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode((await self.do("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Chromium]:
    """A fresh one, which keeps what it has in `folder`. The test fails where none is installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("this needs a browser: install Chromium (apt-get install chromium)")
    process = await asyncio.create_subprocess_exec(
        program, *OPTIONS, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            address = await _page(session, folder / "DevToolsActivePort", process)
            async with session.ws_connect(address, max_msg_size=LARGEST_MESSAGE_BYTES) as socket:
                tab = Chromium(socket)
                following = asyncio.create_task(tab.follow())
                for domain in ("Network", "Page", "Runtime", "Log"):
                    await tab.do(f"{domain}.enable")
                yield tab
            await following
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _page(
    session: aiohttp.ClientSession, port: Path, process: asyncio.subprocess.Process
) -> str:
    """Where its first tab is driven, once it listens."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (number := _first_line(port)):
            assert process.returncode is None, "Chromium ended"
            await asyncio.sleep(0.05)
        while True:
            async with session.get(f"http://127.0.0.1:{number}/json/list") as answer:
                for target in await answer.json():
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)


def _first_line(file: Path) -> str:
    """Once it is whole; else nothing."""
    line, end, _ = (file.read_text() if file.exists() else "").partition("\n")
    return line if end else ""
