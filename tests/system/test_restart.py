"""Restarts behind socket activation: no client is refused, every request gets its outcome, every
line of a batch has one."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import openai
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from appliance.batches.log import load_all
from appliance.batches.records import Batch
from appliance.batches.store import store_in
from appliance.cli.main import cli
from appliance.demo.checkpoints import write_config
from tests.activation import start_activated
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.notify import Manager, manager

T = TypeVar("T")
CHATS: Final = "/v1/chat/completions"
MODELS = ["llama-a", "qwen2-a", "qwen3-a"]
"""One of each architecture: each daemon builds an engine for each."""
CLIENTS = 8
BEFORE, AFTER = 8, 12
"""Answers before the first signal, and after each."""
LINES, LINE_TOKENS = 40, 64
CUT_OFF = frozenset({"ReadError", "WriteError", "RemoteProtocolError"})
"""What becomes of requests whose daemon is killed: it had accepted their connections."""


def test_restarts_under_load(checkpoints: Path, tmp_path: Path) -> None:
    """The socket outlives one daemon that is told to end and another that is killed. Clients that
    open a connection for every request, streamed or not, see none refused; all that the first
    daemon took ends whole or with a named error, and what came in between is answered by the next.
    A batch runs meanwhile: every line has one answer, which its key is charged for once."""
    keys, folder = tmp_path / "keys.json", tmp_path / "batches"
    file = configure(checkpoints, keys, folder)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, manager(tmp_path) as told:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        load = Load(url, new_key(keys, "clients"))
        with (
            ExitStack() as daemons,
            openai.OpenAI(base_url=f"{url}/v1", api_key=new_key(keys, "nightly")) as nightly,
        ):

            def start(log: str) -> subprocess.Popen[bytes]:
                return daemons.enter_context(daemon(file, listener, told, tmp_path / log))

            first = start("first.log")
            until(lambda: any("READY" in message for message in told.heard()))
            batch = begin_batch(nightly, MODELS[0])
            until(lambda: completed(nightly, batch) > 0)

            async def restarts() -> Batch:
                """What was recorded of the batch when the second daemon was killed."""
                await load.whole(BEFORE)
                first.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(first.wait, PATIENCE_SECONDS) == 0
                at_first = recorded(folder, batch)
                second = start("second.log")
                await load.whole(load.outcomes["whole"] + AFTER)
                assert set(load.outcomes) <= {"whole", "shutting_down"}, load.outcomes
                second.kill()
                second.wait()
                at_second = recorded(folder, batch)
                assert 0 < at_first.completed <= at_second.completed < LINES
                start("third.log")
                await load.whole(load.outcomes["whole"] + AFTER)
                return at_second

            at_second = asyncio.run(load.meanwhile(restarts()))
            done = finished(nightly, batch)
            charged = charges(url, "nightly")
        words = [word for message in told.heard() for word in message.items()]
        assert ("STOPPING", "1") in words
        assert ("READY", "1") in words

    outcomes = load.outcomes
    assert set(outcomes) <= {"whole", "shutting_down", *CUT_OFF}, outcomes
    assert sum(outcomes[cut] for cut in CUT_OFF) <= CLIENTS  # each asks one thing at a time
    for log in ("second.log", "third.log"):
        assert "Traceback" not in (tmp_path / log).read_text(errors="replace")

    ((usage, counts), answers) = done
    assert (counts.completed, counts.failed) == (LINES, 0)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(map(str, range(LINES)))
    bodies = [answer["response"]["body"] for answer in answers]
    assert {body["usage"]["completion_tokens"] for body in bodies} == {LINE_TOKENS}
    assert usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies)
    left = LINES - at_second.completed
    assert charged == {
        "requests": left,
        "prompt": usage.input_tokens - at_second.input_tokens,
        "output": left * LINE_TOKENS,
    }


def configure(checkpoints: Path, keys: Path, folder: Path) -> Path:
    """One instance; what runs has a short while to end; two lines of a batch at a time."""
    text = write_config(checkpoints, MODELS, policy="appliance", instances=1).read_text()
    api = f"[api]\nkeys = {str(keys)!r}\nopen_metrics = true\ndrain = '2s'\n"
    batches = f"[batches]\ndirectory = {str(folder)!r}\nconcurrency = 2\n"
    file = keys.with_name("appliance.toml")
    file.write_text(text.replace("[api]\n", api) + batches)
    return file


def new_key(keys: Path, name: str, *options: str) -> str:
    made = CliRunner().invoke(cli, ["key", "create", name, "--file", str(keys), *options])
    assert made.exit_code == 0, made.output
    return made.stdout.strip()


def begin_batch(client: openai.OpenAI, model: str) -> str:
    """The id of a batch that takes a while."""
    body = {"model": model, "max_tokens": LINE_TOKENS, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHATS, "body": body | asked}
        for number in range(LINES)
        for asked in [{"messages": [{"role": "user", "content": f"Tell me of bridge {number}."}]}]
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    return made.id


def completed(client: openai.OpenAI, batch: str) -> int:
    """How many lines have an outcome."""
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def recorded(folder: Path, batch: str) -> Batch:
    """A batch as its records have it: what a daemon finds that starts now. None runs meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "batches"
        shutil.copytree(folder, copy)
        store = store_in(copy)
        store.open()
        (found,) = (one for one in load_all(store, copy / "batches") if one.id == batch)
        store.close()
    return found


def finished(client: openai.OpenAI, batch: str) -> tuple[Any, list[Any]]:
    """Usage and counts of a batch when it is completed, and its answers."""
    until(lambda: client.batches.retrieve(batch).status == "completed")
    done = client.batches.retrieve(batch)
    assert done.output_file_id is not None
    lines = client.files.content(done.output_file_id).iter_lines()
    return (done.usage, done.request_counts), [json.loads(line) for line in lines]


def charges(url: str, key: str) -> dict[str, float]:
    """What a daemon has counted for a key."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("key") != key:
                continue
            if sample.name == "appliance_key_requests_total":
                found["requests"] = sample.value
            elif sample.name == "appliance_key_tokens_total":
                found[sample.labels["kind"]] = sample.value
    return found


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
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Load:
    """Clients that ask one thing after the other. Every request is of a connection of its own."""

    def __init__(self, url: str, key: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._over = False

    async def meanwhile(self, happening: Awaitable[T]) -> T:
        """Ask before, during and after what happens; what came of that. Two daemons start in the
        meantime, each of which may take as long as one thing may."""
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            clients = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]
            try:
                return await happening
            finally:
                self._over = True
                await asyncio.gather(*clients)

    async def whole(self, count: int) -> None:
        """Until so many were answered."""
        await self.true(lambda: self.outcomes["whole"] >= count)

    async def true(self, true: Callable[[], bool]) -> None:
        """Until it is so."""
        while not true():  # noqa: ASYNC110 - outcomes come from all sides
            await asyncio.sleep(0.02)

    async def _ask_on(self, number: int) -> None:
        turn = number
        while not self._over:
            model = MODELS[turn % len(MODELS)]
            self.outcomes[await self._ask(model, stream=bool(turn % 2))] += 1
            turn += CLIENTS + 3  # another model, and streamed or not, each time

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
            async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, headers=self._headers) as client:
                answer = await client.post(f"{self._url}{CHATS}", json=body)
        except httpx.TransportError as error:
            return type(error).__name__
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
