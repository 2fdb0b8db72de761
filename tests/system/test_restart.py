"""A restart behind socket activation: nobody is refused, and every request hears its outcome."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from appliance.demo.checkpoints import write_config
from tests.activation import start_activated
from tests.patience import PATIENCE_SECONDS
from tests.unit.notify_double import Manager, manager

CLIENTS = 8
BEFORE, AFTER = 12, 12
"""Answers before the signal, and after it."""


def test_a_restart_under_load(checkpoints: Path, tmp_path: Path) -> None:
    """The socket outlives the daemon. Clients that open a connection for every request, streamed
    or not, see none refused; all that the first daemon took ends whole or with a named error, and
    what came in between is answered by the second."""
    file = write_config(checkpoints, policy="appliance", instances=1)
    models = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, manager(tmp_path) as told:
        port = listener.getsockname()[1]
        load = Load(f"http://127.0.0.1:{port}", models)
        with daemon(file, listener, told, tmp_path / "first.log") as first:
            until(lambda: any("READY" in message for message in told.heard()))

            def restart() -> None:
                first.send_signal(signal.SIGTERM)
                assert first.wait(PATIENCE_SECONDS) == 0
                after.enter_context(daemon(file, listener, told, tmp_path / "second.log"))

            with ExitStack() as after:
                asyncio.run(load.run_through(restart))
        words = [word for message in told.heard() for word in message.items()]
        assert ("STOPPING", "1") in words
        assert ("READY", "1") in words

    outcomes = load.outcomes
    assert set(outcomes) <= {"whole", "shutting_down"}, outcomes
    assert outcomes["whole"] >= BEFORE + AFTER
    log = (tmp_path / "second.log").read_text(errors="replace")
    assert "Traceback" not in log


def test_a_socket_for_everyone_needs_keys(checkpoints: Path, tmp_path: Path) -> None:
    """What `api.bind` may not do, a socket unit may not either: the daemon ends, and says why."""
    file = write_config(checkpoints, policy="appliance", instances=1)
    with socket.create_server(("0.0.0.0", 0)) as listener, manager(tmp_path) as told:
        with daemon(file, listener, told, tmp_path / "daemon.log") as process:
            assert process.wait(PATIENCE_SECONDS) == 1
        assert told.heard() == []
    assert "there are no keys" in (tmp_path / "daemon.log").read_text()


@contextmanager
def daemon(
    file: Path, listener: socket.socket, told: Manager, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "appliance", "serve", "--config", str(file)]
    with log.open("wb") as output:
        process = start_activated(
            command, [listener], environment={"NOTIFY_SOCKET": told.address}, output=output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Load:
    """Clients that ask one thing after the other. Every request is of a connection of its own."""

    def __init__(self, url: str, models: list[str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._models = models
        self._over = False

    async def run_through(self, restart: Callable[[], object]) -> None:
        """Ask before, during and after the restart."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            clients = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]
            try:
                await self._until_whole(BEFORE)
                await asyncio.to_thread(restart)
                await self._until_whole(self.outcomes["whole"] + AFTER)
            finally:
                self._over = True
                await asyncio.gather(*clients)

    async def _until_whole(self, count: int) -> None:
        while self.outcomes["whole"] < count:  # noqa: ASYNC110 - outcomes come from all sides
            await asyncio.sleep(0.02)

    async def _ask_on(self, number: int) -> None:
        turn = number
        while not self._over:
            model = self._models[turn % len(self._models)]
            self.outcomes[await self._ask(model, stream=bool(turn % 2))] += 1
            turn += CLIENTS + 1

    async def _ask(self, model: str, *, stream: bool) -> str:
        """What came of one request, in a word."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me about old bridges."}],
            "max_tokens": 48,
            "ignore_eos": True,
            "stream": stream,
        }
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
                answer = await client.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        return _streamed(answer) if stream and answer.is_success else _whole(answer)


def _whole(answer: httpx.Response) -> str:
    said = answer.json()
    if answer.is_success:
        assert said["usage"]["completion_tokens"] == 48
        return "whole"
    assert answer.status_code == 503
    return str(said["error"]["code"])


def _streamed(answer: httpx.Response) -> str:
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if events and events[-1] == "[DONE]":
        return "whole"
    last = json.loads(events[-1]) if events else {}
    return str(last["error"]["code"]) if "error" in last else f"cut off: {last}"


def until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is so: the daemon is another process."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)
